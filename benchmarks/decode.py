"""How fast is generation, and how fast could it be: `python -m benchmarks.decode [RUN] [--quick]`.

A model of 5 + 1 blocks of 512 with random weights: prefill and decode, in tokens a second, at batch
1 and 8, after prompts of 64 and 512 tokens, in fp32, bf16 and int8, on one process and on tp 2; the
medians of rounds that take turns, and each best round's share of the bound.  The bound: weights
and cache that a step reads, over the bandwidth of reading 256 MB, measured in the same rounds.

With a trained RUN: what int8 changes in its logits, its text and its bits per byte; and what drafts
save, on prompts of its validation text, once as it is and once after a copy of itself.
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

    half = config.seq_length // 3
    for what, copies in (("new text", 1), ("after a copy of itself", 2)):
        pairs, counts = [], []
        for row in ids[:8]:
            prompt, took = row[:half].tolist() * copies, []
            if copies == 2:                     # the file's beginning again, without its end
                prompt = prompt[:half + half // 4]
            for lookup in (0, 16):
                sample = Sample(prompt, half // 2, 0)
                began = time.perf_counter()
                counts.append(sum(1 for _ in generate(decoders[0], [sample], Sampling(), -1, Mesh(),
                                                      lookup)))
                took.append((time.perf_counter() - began, sample.ids))
            assert took[0][1] == took[1][1]
            pairs.append(took[0][0] / took[1][0])
        print(f"--lookup 16, {what}: {statistics.median(pairs):.2f} times as fast (from "
              f"{min(pairs):.2f} to {max(pairs):.2f}), {sum(counts[1::2])} forwards instead of "
              f"{sum(counts[::2])}")


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
