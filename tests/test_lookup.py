"""Drafts: where they come from, what they may not change, and that they save forwards."""

import pytest
import torch

from nanogeex.generate import Sample, Sampling, generate
from nanogeex.lookup import Lookup
from nanogeex.mesh import Mesh
from tests.test_generate import ready


def test_a_draft_is_what_followed_last_time():
    text = Lookup([1, 2, 3, 4, 5, 9, 1, 2, 3], 4)
    assert text.draft() == [4, 5]
    text.size = 4
    assert text.draft() == [4, 5, 9, 1]
    text.extend([7])
    assert text.draft() == []
    text.extend([1, 2, 3])
    assert text.draft() == [7, 1, 2, 3]                 # the last time, not the first
    assert Lookup([1, 2, 3], 4).draft() == Lookup([], 4).draft() == []


def test_drafts_grow_with_success():
    text = Lookup([1], 9)
    for drafted, right, size in ((0, 0, 2), (2, 2, 4), (4, 4, 8), (8, 8, 9), (9, 3, 3), (3, 0, 1)):
        text.judge(drafted, right)
        assert text.size == size


def test_drafts_pause_where_none_is_right():
    text, asked = Lookup([1] * 4, 9), 0
    for _ in range(200):
        asked += bool(draft := text.draft())
        text.judge(len(draft), 0)
        text.extend([1])
    assert asked == 8                                   # after 0, 2, 6, 14, 30, 62, 126, 190 tokens
    text.judge(1, 1)
    assert text.wait == 0


PERIOD = [11, 12, 13, 14, 15, 16, 17]


def repeating(model):
    """The model's logits, but in three of four positions the period goes on."""
    def hook(module, inputs, logits):
        ids = inputs[0]
        following = torch.tensor([[PERIOD[(PERIOD.index(i) + 1) % 7] if i in PERIOD and i % 4
                                   else 40 for i in row] for row in ids.tolist()])
        at = following[:, -logits.shape[1]:, None]
        return logits.scatter_add(2, at, torch.full(at.shape, 6.0))
    model.register_forward_hook(hook)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0, 0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("longest", [1, 3, 20])
@pytest.mark.parametrize("prompt", [PERIOD * 3, [5, 6], [11, 12, 13, 40] * 4])
def test_the_ids_are_those_of_decoding_token_by_token(sampling, longest, prompt):
    model, counts = ready(Mesh(), seq_length=64), []
    repeating(model)
    model.register_forward_hook(lambda *_: counts.append(1))
    plain, drafted = Sample(prompt, 40, 3), Sample(prompt, 40, 3)
    list(generate(model, [plain], sampling, 3, Mesh()))
    steps = len(counts)
    list(generate(model, [drafted], sampling, 3, Mesh(), longest))
    assert (drafted.ids, drafted.finish) == (plain.ids, plain.finish)
    if prompt[:4] == [11, 12, 13, 40] and longest > 1 and sampling.temperature == 0:
        assert len(counts) - steps < 0.7 * steps
