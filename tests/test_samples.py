"""The order of the samples, and their shares."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogeex.config import UsageError
from nanogeex.samples import (
    Windows,
    micro_batches,
    open_windows,
    permuted,
    shares,
    step_seed,
)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_each_epoch_is_a_permutation(n, seed, epoch):
    order = permuted(np.arange(epoch * n, (epoch + 1) * n), n, seed)
    assert sorted(order) == list(range(n))


def test_order_depends_on_seed_and_epoch_alone():
    n = 1000
    first = permuted(np.arange(n), n, 1)
    assert (permuted(np.arange(300, 400), n, 1) == first[300:400]).all()
    assert (permuted(np.arange(n), n, 2) != first).mean() > 0.99
    assert (permuted(np.arange(n, 2 * n), n, 1) != first).mean() > 0.99


def test_seeds_of_steps_differ():
    seeds = {step_seed(seed, samples, rank) for seed in (1, 2) for samples in (0, 16, 32)
             for rank in range(8)}
    assert len(seeds) == 48


def test_order_is_well_mixed():
    n = 10_000
    order = permuted(np.arange(n), n, 1)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


@given(count=st.integers(1, 600), dp=st.integers(1, 200), size=st.integers(1, 20))
def test_shares_differ_by_one_and_micro_batches_fit(count, dp, size):
    bounds, number = shares(count, dp, size)
    mine = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == count and mine.max() - mine.min() <= 1
    assert (number - 1) * size < mine.max() <= number * size


@pytest.mark.parametrize("count, dp, size", [(560, 192, 10), (7, 3, 2), (7, 5, 1), (2, 4, 16),
                                             (16, 1, 16)])
def test_every_sample_once_and_as_many_micro_batches_on_every_rank(count, dp, size):
    windows = Windows(np.arange(1000 * 5, dtype=np.uint16).reshape(1000, 5), 0, 0)
    samples = permuted(np.arange(count), 1000, 1)
    seen, numbers = [], set()
    for rank in range(dp):
        batches = list(micro_batches(windows, samples, dp, rank, size, torch.device("cpu")))
        numbers.add(len(batches))
        for ids, targets, weights in batches:
            assert 1 <= len(ids) <= size and torch.equal(ids[:, 1:], targets[:, :-1])
            assert weights.shape == targets.shape
            seen += ids[weights[:, 0] == 1, 0].tolist()
    assert len(numbers) == 1
    assert sorted(seen) == sorted((samples * 5).tolist())


def prepared(folder, train, **meta):
    for split, tokens in (("train", train), ("val", 3)):
        np.arange(tokens, dtype=np.uint16).tofile(folder / f"{split}.bin")
    whole = dict(dtype="uint16", vocab_size=300, train=dict(tokens=train, bytes=9),
                 val=dict(tokens=3, bytes=9))
    (folder / "meta.json").write_text(json.dumps(whole | meta))
    return folder


def test_windows_overlap_by_the_one_token_that_is_target_only(tmp_path):
    train, val, _ = open_windows(prepared(tmp_path, 21), 5, 300)
    assert train.ids.tolist() == [list(range(i, i + 6)) for i in (0, 5, 10, 15)]
    assert val.ids.shape == (0, 6)


@pytest.mark.parametrize("train, meta, says", [
    (5, {}, "5 tokens of training text, fewer than one sample of --seq-length 5"),
    (20, dict(vocab_size=500), "give --vocab-size 500"),
    (20, dict(dtype="uint32"), "not the 20 uint32 ids")])
def test_unusable_files_are_refused(tmp_path, train, meta, says):
    with pytest.raises(UsageError, match=says):
        open_windows(prepared(tmp_path, train, **meta), 5, 400)
