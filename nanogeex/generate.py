"""Decoding: one token at a time, from a cache of the keys and values of those before.

      prefill   the whole prompt in one forward, which fills the cache
      decode    one token a forward; each block adds its key and value, and reads all that are there

Under tensor parallelism a rank caches its own heads and computes its own rows of the vocabulary;
only the last position's logits are gathered.  Rank 0's choice is everyone's: no rank can stray.

Tests: tests/test_generate.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX, KeysValues
from nanogeex.tokenizer import CodeGeeXTokenizer, CodeTokenizer


@dataclass
class Sampling:
    """temperature 0 takes the likeliest token; top_k 0 and top_p 0 or 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One id from logits (V).  top_k keeps the k likeliest; then top_p the fewest that hold that
    much (nucleus sampling, arXiv:1904.09751).  The likeliest always stays."""
    if sampling.temperature == 0:
        return logits.argmax().item()
    logits, ids = logits.double().sort(descending=True)
    if sampling.top_k > 0:
        logits = logits[:sampling.top_k]
    probabilities = ((logits - logits[0]) / sampling.temperature).softmax(-1)
    if 0 < sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities       # held by likelier ones
        probabilities = probabilities[before < sampling.top_p]
    return ids[torch.multinomial(probabilities.cpu(), 1, generator=generator)].item()


def last_logits(model: CodeGeeX, ids: Tensor, cache: list[KeysValues], start: int,
                mesh: Mesh) -> Tensor:
    """Logits (V) after the last of ids (1, T), from all tp ranks, without padding ids."""
    logits = model(ids, cache=cache, start=start)[0, -1].contiguous()           # (V/tp)
    if mesh.tp > 1:
        parts = [torch.empty_like(logits) for _ in range(mesh.tp)]
        dist.all_gather(parts, logits, group=mesh.tp_group)
        logits = torch.cat(parts)                                               # (V)
    return logits[:model.config.vocab_size]


@torch.inference_mode()
def generate(model: CodeGeeX, prompt: list[int], new_tokens: int, end: int, sampling: Sampling,
             seed: int, mesh: Mesh) -> Iterator[int]:
    """Continue `prompt` by up to `new_tokens` ids, the same on every rank.  Stops before `end`, and
    where the context is full."""
    generator = torch.Generator().manual_seed(seed)
    length = min(len(prompt) + new_tokens, model.config.seq_length)
    cache = model.empty_cache(1, length, model.word_embeddings.weight.dtype)
    ids, start = torch.tensor([prompt], device=mesh.device), 0
    while start + ids.shape[1] < length:
        logits = last_logits(model, ids, cache, start, mesh)
        start += ids.shape[1]
        ids = torch.zeros(1, 1, dtype=torch.long, device=mesh.device)
        if mesh.rank == 0:
            ids.fill_(choose(logits, sampling, generator))
        if mesh.tp > 1:
            dist.broadcast(ids, src=0, group=mesh.tp_group)
        if ids.item() == end:
            return
        yield ids.item()


def stream_text(tokenizer: CodeTokenizer | CodeGeeXTokenizer, prompt: list[int],
                ids: Iterator[int]) -> Iterator[str]:
    """The text of `ids` as it is decided, never half a character; its parts joined are all."""
    so_far = list(prompt)
    text = tokenizer.decode(so_far)
    shown = len(text)
    for token in ids:
        so_far.append(token)
        text = tokenizer.decode(so_far)
        if not tokenizer.may_change(text):
            yield text[shown:]
            shown = len(text)
    yield text[shown:]
