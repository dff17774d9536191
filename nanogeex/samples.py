"""Tokens on disk -> a step's micro-batches, the same samples at every topology.

Training reads windows of seq_length + 1 ids.  The k-th window of a run is perm(k): each epoch has
an order of its own, computed from (seed, k) in constant memory.  So a step's samples depend neither
on the topology nor on what was read before, and resuming needs one number: how many were consumed.

      step's samples  [ 0 1 2 3 4 5 6 ]       a global batch of 7
      dp_rank 0       [ 0 1 ]                 3 data ranks, micro-batches of 1: shares that differ
              1       [ 2 3 ]                 by one at most, and as many micro-batches on every
              2       [ 4 5 6 ]               rank, for all must meet in the same collectives;
                                              where nothing is left, a sample runs with weight 0

This is one of three reasons why the loss curve depends on neither dp, tp nor micro-batch.  Weights
are drawn whole, from seed and name, and then cut (parameters.py); the vocabulary is padded alike
everywhere (config.py).  And losses are sums over tokens, divided once, by the tokens of the whole
step (train.py): a mean of the ranks' means would count shares that differ as equals.  Rounding is
left (where Adam would make steps of it, it is kept out: optim.py), and dropout, whose masks differ.

Tests: tests/test_samples.py.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanogeex.config import UsageError


@dataclass
class Windows:
    """One split: its windows as a view of the file, (number of windows, seq_length + 1) ids."""

    ids: np.ndarray
    tokens: int             # of the whole file
    bytes: int              # of the text it was made from


def open_windows(directory: Path, seq_length: int,
                 vocab_size: int) -> tuple[Windows, Windows, dict]:
    """Training and validation windows, and meta.json.  Raises UsageError if the files are not what
    meta.json says, if they use more than `vocab_size` ids, or if they hold no whole window."""
    if not (directory / "meta.json").is_file():
        raise UsageError(f"--out: {directory} was made by rank 0 and is not seen here; "
                         "put it on a disk that all nodes share")
    try:
        meta = json.loads((directory / "meta.json").read_text())
        uses = meta["vocab_size"]
    except (ValueError, KeyError):
        raise UsageError(f"--data: {directory}/meta.json is not that of prepared data; give the "
                         "sources") from None
    if uses > vocab_size:
        raise UsageError(f"--data: {directory} uses {uses} token ids, the model has {vocab_size}; "
                         f"give --vocab-size {uses}")
    splits = []
    for split in ("train", "val"):
        path, dtype = directory / f"{split}.bin", np.dtype(meta["dtype"])
        tokens = meta[split].get("tokens", 0)
        if not path.is_file() or path.stat().st_size != tokens * dtype.itemsize:
            raise UsageError(f"--data: {path} is not the {tokens} {dtype} ids that meta.json tells "
                             f"of; remove {directory}, to have it made anew")
        ids = np.empty((0, seq_length + 1), dtype)
        if tokens > seq_length:
            flat = np.memmap(path, dtype, "r")
            ids = np.lib.stride_tricks.sliding_window_view(flat, seq_length + 1)[::seq_length]
        splits.append(Windows(ids, tokens, meta[split].get("bytes", 0)))
    if len(splits[0].ids) == 0:
        raise UsageError(f"--data: {splits[0].tokens} tokens of training text, fewer than one "
                         f"sample of --seq-length {seq_length} and the token after it; give more "
                         "text, or a shorter --seq-length")
    return *splits, meta


def _mix(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    """64 well-mixed bits of (x, key): splitmix64's finaliser (Steele et al., OOPSLA 2014)."""
    x = (x + key) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(k: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Element k % n of the permutation of 0 .. n-1 that belongs to epoch k // n, for an array k.  A
    Feistel network permutes a power of four of numbers; what lands beyond n goes through again."""
    epoch, x = np.divmod(k.astype(np.uint64), np.uint64(n))
    key = _mix(epoch, np.uint64(seed))
    half = np.uint64(max(1, (n - 1).bit_length() + 1 >> 1))
    low = np.uint64((1 << int(half)) - 1)

    def network(x: np.ndarray, key: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & low
        for turn in range(4):
            left, right = right, left ^ (_mix(right, key + np.uint64(turn)) & low)
        return left << half | right

    x = network(x, key)
    while (outside := x >= n).any():
        x[outside] = network(x[outside], key[outside])
    return x.astype(np.int64)


def step_seed(seed: int, samples: int, dp_rank: int) -> int:
    """Seed of the random numbers that a data rank draws in the step that begins at `samples`."""
    key = _mix(np.array([samples], np.uint64), np.array([dp_rank], np.uint64))
    return int(_mix(key, np.array([seed], np.uint64))[0])


def shares(count: int, dp: int, micro_batch_size: int) -> tuple[list[int], int]:
    """Where each data rank's samples of a step begin (dp + 1 bounds), and how many micro-batches
    every rank runs: as many as the largest share needs."""
    bounds = [count * rank // dp for rank in range(dp + 1)]
    largest = -(-count // dp)
    return bounds, -(-largest // micro_batch_size)


def micro_batches(windows: Windows, samples: np.ndarray, dp: int, dp_rank: int,
                  micro_batch_size: int, device: torch.device
                  ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """This rank's share of a step's `samples`: ids, targets and the targets' weights, all (B, T), a
    micro-batch; where nothing is left, one sample of weight 0."""
    bounds, number = shares(len(samples), dp, micro_batch_size)
    for mine in np.array_split(samples[bounds[dp_rank]:bounds[dp_rank + 1]], number):
        rows = windows.ids[mine if len(mine) else samples[:1]].astype(np.int64)     # (B, T + 1)
        rows = torch.from_numpy(rows).to(device, non_blocking=True)
        ids, targets = rows[:, :-1], rows[:, 1:]
        yield ids, targets, torch.full(ids.shape, float(len(mine) > 0), device=device)
