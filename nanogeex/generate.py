"""Decoding: one token at a time, from a cache of the keys and values of those before.

      prefill   a prompt in one forward, which fills its row of the cache; samples of one prompt
                get copies of the row, not forwards of their own
      decode    a token a row and forward; each block adds its key and value, and reads all before

Prompts of unequal length end in the same column, so that a step writes one column of the cache:

      row 0   [ p p p p p p | 1 2 3 . . ]       p prompt, . room; what is left of a short prompt is
      row 1   [ - - - p p p | 1 2 . . . ]       padding, which the row does not see and its
                                                positions do not count

A row that has ended leaves the batch.  Under tensor parallelism a rank caches its own heads and
computes its own rows of the vocabulary; the last position's logits alone go to rank 0, and its
choice to all: no rank can stray.  Each sample draws from a generator of its own, so that its text
depends neither on the ranks nor on who else is in the batch.

Tests: tests/test_generate.py.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from nanogeex.config import UsageError
from nanogeex.decoder import Decoder
from nanogeex.lookup import Lookup
from nanogeex.mesh import Mesh
from nanogeex.streaming import TextStream

NOT_FINITE, NOT_TAKEN = -1, -2          # in the place of ids


@dataclass
class Sampling:
    """temperature 0 takes the likeliest token; top_k 0 and top_p 0 or 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0


@dataclass
class Sample:
    """A continuation in the making.  `finish` says what ended it: "end" (of the document), "stop"
    (a stop string), "length" (`limit` new tokens) or "context" (it is full)."""

    prompt: list[int]
    limit: int
    seed: int
    stream: TextStream | None = None            # None: without a tokenizer there is no text
    ids: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)          # of the text, as they were decided
    finish: str | None = None
    seconds: float = 0.0

    def __post_init__(self):
        if self.limit == 0:
            self.finish = "length"

    def take(self, token: int, end: int, context: int) -> None:
        if token == end:
            self.finish = "end"
        else:
            self.ids.append(token)
            self.parts.append(self.stream(token) if self.stream else f",{token}")
            if self.stream and self.stream.stopped:
                self.finish = "stop"
            elif len(self.ids) == self.limit:
                self.finish = "length"
            elif len(self.prompt) + len(self.ids) == context:
                self.finish = "context"
        if self.finish and self.stream:
            self.parts.append(self.stream.end())
            self.finish = "stop" if self.stream.stopped else self.finish


def choose(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """An id a row of logits (N, V), each by one number of its row's generator.  top_k keeps the k
    likeliest; then top_p the fewest that hold that much (nucleus sampling, arXiv:1904.09751).  The
    likeliest always stays.  NOT_FINITE where there is none."""
    if sampling.temperature == 0:
        top, ids = logits.max(-1)
        return ids.where(top.isfinite(), NOT_FINITE)
    logits, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    if sampling.top_k > 0:
        logits = logits[:, :sampling.top_k]
    probabilities = ((logits.double() - logits[:, :1]) / sampling.temperature).softmax(-1)
    if 0 < sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities       # held by likelier ones
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    edges = probabilities.cumsum(-1)                            # (N, k)
    total = edges[:, -1:]
    draws = torch.cat([torch.rand(1, 1, generator=generator, dtype=torch.float64)
                       for generator in generators]).to(logits.device)
    at = torch.searchsorted(edges, draws * total, right=True)
    at = at.minimum((edges < total).sum(-1, keepdim=True))      # where the product is rounded up
    return ids.gather(1, at)[:, 0].where(logits[:, 0].isfinite(), NOT_FINITE)


def on_rank0_of_tp(logits: Tensor, model: Decoder, mesh: Mesh) -> Tensor:
    """This rank's logits (N, V/tp) -> all of them, without padding ids: (N, V) on rank 0."""
    if mesh.tp > 1:
        logits = logits.contiguous()
        parts = [torch.empty_like(logits) for _ in range(mesh.tp)] if mesh.rank == 0 else None
        dist.gather(logits, parts, dst=0, group=mesh.tp_group)
        logits = torch.cat(parts, -1) if parts else logits
    return logits[:, :model.config.vocab_size]


def shared(chosen: Tensor, mesh: Mesh) -> list[int]:
    """Rank 0's ids, on all ranks.  Raises UsageError if there is none to choose."""
    if mesh.tp > 1:
        dist.broadcast(chosen, src=0, group=mesh.tp_group)
    ids = chosen.tolist()
    if NOT_FINITE in ids:
        raise UsageError("the logits are not finite: 16 bits overflow, or the weights are damaged; "
                         "try --precision bf16 or fp32")
    return ids


@torch.inference_mode()
def generate(model: Decoder, samples: list[Sample], sampling: Sampling, end: int, mesh: Mesh,
             lookup: int = 0) -> Iterator[None]:
    """Continue the samples together, the same on every rank, until each has a `finish`; yields when
    some have grown.  `end` is the id to stop before.  With `lookup`, drafts of up to that many
    tokens, and a row after the other.  Prompts are shorter than the context."""
    began, context, device = time.perf_counter(), model.config.seq_length, mesh.device
    samples = [sample for sample in samples if not sample.finish]
    if not samples:
        return
    generators = [torch.Generator().manual_seed(sample.seed) for sample in samples]
    longest = max(len(sample.prompt) for sample in samples)
    padding = [longest - len(sample.prompt) for sample in samples]
    room = longest + max(min(sample.limit, context - len(sample.prompt)) for sample in samples) - 1
    cache = model.empty_cache(len(samples), room)           # (blocks, 2, B, heads/tp, room, D)

    def row(i: int) -> Tensor:                              # without its padding
        return cache[:, :, i:i + 1, :, padding[i]:]

    logits: list[Tensor] = []                                           # (1, V/tp) a sample
    for i, sample in enumerate(samples):
        if i and sample.prompt == samples[i - 1].prompt:
            logits.append(logits[-1])
            cache[:, :, i, :, :longest] = cache[:, :, i - 1, :, :longest]
            continue
        ids = torch.tensor([sample.prompt], device=device)
        logits.append(model(ids, row(i), last=True)[0])

    def take(chosen: list[int], takers: list[Sample]) -> None:
        for token, sample in zip(chosen, takers, strict=True):
            sample.take(token, end, context)
            sample.seconds = time.perf_counter() - began

    def choices(logits: Tensor, generators: list[torch.Generator]) -> list[int]:
        logits = on_rank0_of_tp(logits, model, mesh)                    # (N, V)
        chosen = torch.zeros(len(logits), dtype=torch.long, device=device)
        if mesh.rank == 0:
            chosen = choose(logits, sampling, generators)
        return shared(chosen, mesh)

    take(choices(torch.cat(logits), generators), samples)
    yield
    if lookup:
        for i, sample in enumerate(samples):
            yield from _with_drafts(model, sample, row(i), lookup, sampling, end, generators[i],
                                    began, mesh)
        return

    offsets = torch.tensor(padding, device=device)[:, None] if any(padding) else None   # (B, 1)
    for start in range(longest, room + 1):
        live = [i for i, sample in enumerate(samples) if not sample.finish]
        if not live:
            return
        if len(live) < len(samples):                                    # who has ended, leaves
            samples, generators = [samples[i] for i in live], [generators[i] for i in live]
            offsets = offsets if offsets is None else offsets[live]
            cache = cache[:, :, live]
        ids = torch.tensor([sample.ids[-1:] for sample in samples], device=device)      # (B, 1)
        logits = model(ids, cache, start, offsets)[:, 0]                                # (B, V/tp)
        take(choices(logits, generators), samples)
        yield


def _with_drafts(model: Decoder, sample: Sample, cache: Tensor, longest: int, sampling: Sampling,
                 end: int, generator: torch.Generator, began: float, mesh: Mesh) -> Iterator[None]:
    """A sample, of which the first token is there, to its end: several tokens a forward where
    lookup.py's draft is right.  What the cache holds of wrong ones is written over."""
    context = model.config.seq_length
    text = Lookup(sample.prompt + sample.ids, longest)
    while not sample.finish:
        left = min(sample.limit - len(sample.ids), context - len(sample.prompt) - len(sample.ids))
        draft = text.draft()[:left - 1]
        ids = torch.tensor([[sample.ids[-1], *draft]], device=mesh.device)      # (1, T)
        start = len(sample.prompt) + len(sample.ids) - 1
        logits = on_rank0_of_tp(model(ids, cache, start)[0], model, mesh)   # (T, V)
        chosen = torch.full((len(draft) + 1,), NOT_TAKEN, device=mesh.device)
        if mesh.rank == 0 and sampling.temperature == 0:            # draws nothing: all at once
            chosen = choose(logits, sampling, [])
            right = (chosen[:-1] == ids[0, 1:]).cumprod(0).sum()
            chosen[right + 1:] = NOT_TAKEN
        elif mesh.rank == 0:
            for i in range(len(chosen)):
                chosen[i] = choose(logits[i:i + 1], sampling, [generator])[0]
                if i < len(draft) and chosen[i] != draft[i]:
                    break
        taken = [token for token in shared(chosen, mesh) if token >= 0]
        text.judge(len(draft), len(taken) - 1)
        text.extend(taken)
        for token in taken:
            if not sample.finish:
                sample.take(token, end, context)
        sample.seconds = time.perf_counter() - began
        yield
