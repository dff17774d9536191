"""How fast is generation, and how fast could it be: `python -m benchmarks.decode [RUN] [--quick]`.

A model of 5 + 1 blocks of 512 with random weights: prefill and decode, in tokens a second, at batch
1 and 8, after prompts of 64 and 512 tokens, in fp32, bf16 and int8, on one process and on tp 2; the
medians of rounds that take turns, and each best round's share of the bound.  The bound: weights
and cache that a step reads, over the bandwidth of reading 256 MB, measured in the same rounds.

With a trained RUN: what int8 changes in its logits, its text and its bits per byte; and what drafts
save: on its validation text, where the model goes on as it would, and where it goes on as the text
does, as one would that knows it; and on noise.  benchmarks/repeats.py makes files that repeat
themselves.
"""

import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from nanogeex.config import ModelConfig
from nanogeex.decoder import Decoder
from nanogeex.generate import Sample, Sampling, generate
from nanogeex.mesh import Mesh
from nanogeex.quantize import applies_to, fill
from nanogeex.samples import open_windows
from nanogeex.sources import find, on_meta, open_weights
from nanogeex.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from nanogeex.vocab_parallel import VocabParallelEmbedding
from nanogeex.weights import load_model
from tests.ranks import on_ranks

SHAPE = ModelConfig(5, 512, 8, 1024, 8192)
KINDS = ("fp32", "bf16", "int8")
NEW = 48                                        # tokens a round and row


def random_model(kind: str, mesh: Mesh):
    model = on_meta(SHAPE, mesh).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(1)
    for name, weight in list(model.named_parameters()):
        weight.normal_(0, 0.02, generator=generator)
        if kind == "int8" and applies_to(name):
            fill(model.get_submodule(name.removesuffix(".weight")), weight.data, mesh)
    return Decoder(model.bfloat16() if kind == "bf16" else model)


def bytes_a_step(decoder: Decoder, batch: int, tokens: int) -> int:
    """Weights and cache.  Of embeddings a row is read, but for the head's."""
    size = decoder.empty_cache(batch, tokens).nbytes
    for module in decoder.model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            size += module.weight.nbytes if module.weight is not None else module.placed.nbytes
    return size


def seconds(model, prompt: int, batch: int, mesh: Mesh, lookup: int = 0) -> tuple[float, float]:
    """Of a prefill of one prompt; of decoding NEW tokens a row."""
    ids = torch.randint(0, SHAPE.vocab_size, (prompt,), generator=torch.Generator().manual_seed(2))
    samples = [Sample(ids.tolist(), NEW + 1, 0) for _ in range(batch)]
    began = time.perf_counter()
    steps = generate(model, samples, Sampling(), -1, mesh, lookup)
    next(steps)
    prefilled = time.perf_counter()
    for _ in steps:
        pass
    return prefilled - began, time.perf_counter() - prefilled


def bandwidth() -> float:
    block = torch.ones(2**26)
    began = time.perf_counter()
    block.sum()
    return block.nbytes / (time.perf_counter() - began)


def measure(mesh: Mesh, rounds: int, prompts: tuple[int, ...]) -> list[tuple]:
    """(kind, prompt, batch, prefill and decode seconds a round, bytes a step); then bandwidths."""
    models = {kind: random_model(kind, mesh) for kind in KINDS}
    cases = [(kind, prompt, batch) for prompt in prompts for batch in (1, 8) for kind in KINDS]
    times = {case: [] for case in cases}
    read = []
    for number in range(rounds + 1):
        read.append(bandwidth())
        for kind, prompt, batch in cases:
            pair = seconds(models[kind], prompt, batch, mesh)
            if number:                          # the first is to warm up
                times[kind, prompt, batch].append(pair)
    return [(*case, times[case], bytes_a_step(models[case[0]], case[2], case[1] + NEW // 2))
            for case in cases] + [("bandwidth", read[1:])]


def table(title: str, results: list[tuple]) -> None:
    *rows, (_, read) = results
    print(f"\n{title}: {statistics.median(read) / 1e9:.1f} GB/s are read (median; best "
          f"{max(read) / 1e9:.1f})")
    print(f"{'':12}{'prompt':>7}{'batch':>7}{'prefill/s':>11}{'decode/s':>10}{'of fp32':>9}"
          f"{'bound':>8}{'best/bound':>12}")
    true = {row[1:3]: row[3] for row in rows if row[0] == "fp32"}
    for kind, prompt, batch, pairs, size in rows:
        prefill, decode = zip(*pairs, strict=True)
        ratio = statistics.median(mine / its for (_, its), mine in
                                  zip(pairs, [d for _, d in true[prompt, batch]], strict=True))
        bound = max(read) / size * batch
        print(f"{kind:12}{prompt:7}{batch:7}{prompt / statistics.median(prefill):11.0f}"
              f"{batch * NEW / statistics.median(decode):10.1f}{ratio:9.2f}{bound:8.0f}"
              f"{batch * NEW / min(decode) / bound:12.2f}")


@torch.inference_mode()
def accuracy(run: str) -> None:
    weights = open_weights(find(run))
    models = [load_model(weights, int8=int8) for int8 in (False, True)]
    config = models[0].config
    _, val, _ = open_windows(weights.path.parent.parent / "data", config.seq_length,
                             config.vocab_size)
    ids = torch.from_numpy(val.ids[:16].astype("int64"))                # (16, T + 1)
    logits = [model(ids[:, :-1])[..., :config.vocab_size] for model in models]
    losses = [F.cross_entropy(each.flatten(0, 1), ids[:, 1:].flatten()).item() for each in logits]
    bits = [loss / math.log(2) * val.tokens / val.bytes for loss in losses]
    prompts = [row[:config.seq_length // 4].tolist() for row in ids]
    decoders, made = [Decoder(model) for model in models], []
    for decoder in decoders:
        samples = [Sample(prompt, 200, 0) for prompt in prompts]
        list(generate(decoder, samples, Sampling(), -1, Mesh()))
        made.append([sample.ids for sample in samples])
    same = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
            for pair in zip(*made, strict=True)]
    print(f"\n{run}, int8 against fp32, {ids.numel()} tokens of validation text: largest logit "
          f"change {(logits[1] - logits[0]).abs().max():.3f} (logits up to "
          f"{logits[0].abs().max():.1f}); bits per byte {bits[0]:.4f} -> {bits[1]:.4f}; greedy "
          f"text agrees for {statistics.mean(same):.0f} of {len(made[0][0])} tokens")

    half, decoder = config.seq_length // 2, decoders[0]
    halves = [row[:half].tolist() for row in ids]
    compare_drafts("as the model goes on", [(decoder, prompt) for prompt in halves], half)
    compare_drafts("as the text goes on", [
        (Recital(decoder, row), prompt) for row, prompt in zip(ids, halves, strict=True)], half)
    noise = torch.randint(0, config.vocab_size, ids.shape, generator=torch.Generator())
    compare_drafts("noise, as it goes on", [
        (Recital(decoder, row), row[:half].tolist()) for row in noise], half)


class Recital:
    """A decoder in the place of one that knows `text`: logits as ever, but for what comes next."""

    def __init__(self, decoder: Decoder, text: torch.Tensor):
        self.decoder, self.text, self.config = decoder, text, decoder.config
        self.empty_cache = decoder.empty_cache

    def __call__(self, ids, cache, start=0, padding=None, last=False) -> torch.Tensor:
        logits = self.decoder(ids, cache, start, padding, last)             # (1, T or 1, V)
        after = start + ids.shape[1]
        places = self.text[after - logits.shape[1] + 1:after + 1]
        logits[0, torch.arange(len(places)), places] = 1e4
        return logits


def compare_drafts(what: str, cases: list[tuple[Decoder | Recital, list[int]]], limit: int) -> None:
    """Prints how --lookup 16 does where each decoder continues its prompt."""
    pairs, counts = [], {0: 0, 16: 0}
    for decoder, prompt in cases:
        took, made = {0: [], 16: []}, []
        for _ in range(3):                              # in turn
            for lookup in took:
                sample = Sample(prompt, limit, 0)
                began = time.perf_counter()
                steps = generate(decoder, [sample], Sampling(), -1, Mesh(), lookup)
                counts[lookup] += sum(1 for _ in steps)
                took[lookup].append(time.perf_counter() - began)
                made.append(sample.ids)
        assert all(ids == made[0] for ids in made)
        pairs.append(statistics.median(took[0]) / statistics.median(took[16]))
    print(f"--lookup 16, the second half of a window, {what}: {statistics.median(pairs):.2f} times "
          f"as fast (from {min(pairs):.2f} to {max(pairs):.2f}), {counts[16] // 3} forwards, not "
          f"{counts[0] // 3}")


def main(argv: list[str]) -> None:
    rounds = 2 if "--quick" in argv else 7
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    table("one process", measure(Mesh(), rounds, (64, 512)))
    table("tp 2, a thread each, one round", on_ranks(2, 2, measure, 1, (64,))[0])
    for run in argv:
        if Path(run).is_dir():
            accuracy(run)


if __name__ == "__main__":
    main(sys.argv[1:])
