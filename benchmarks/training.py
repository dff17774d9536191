"""How fast is a step of training: `python -m benchmarks.training [fp32 bf16 ...] [--rounds N]`.

A model of 5 + 1 blocks of 512, 8 samples of 256 tokens a step, against the plain GPT of
`reference.py`, 6 blocks, in turn: one process of two threads; and two processes of one thread, as
data ranks against DDP and FSDP2, as tensor-parallel ranks against torch's parallelize_module.  All
sides take AdamW, fused.  In bf16 the reference computes under autocast, FSDP2 in its mixed
precision.

A ratio is the median over rounds of the other side's time over ours.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.reference import GPT
from benchmarks.sides import Side, rounds
from nanogeex import zero
from nanogeex.config import DTYPES, TrainConfig
from nanogeex.mesh import all_reduce_sum, init_mesh, keep_freed_memory
from nanogeex.optim import adamw, optimizer_step
from nanogeex.parameters import initial_weight
from nanogeex.samples import Windows
from train import forward_backward

SHAPE = dict(num_layers=5, hidden_size=512, num_attention_heads=8, seq_length=256, vocab_size=8192,
             init_method_std=0.02, lr=1e-4)

SMALL = SHAPE | dict(hidden_size=64, seq_length=32, vocab_size=512)     # Python and torch, no more
PRODUCTS, SIDE = 4, 2048


def batch(shape: dict, samples: int) -> np.ndarray:
    size = samples, shape["seq_length"] + 1
    return np.random.default_rng(0).integers(0, shape["vocab_size"], size)


def ours(shape: dict, precision: str, samples: int, tp: int, rank: int, ranks: int, store: str):
    """What train.py's loop does, but for the log and what it decides by it."""
    config = TrainConfig(**shape, precision=precision, tensor_model_parallel_size=tp)
    windows = Windows(batch(shape, samples), 0, 0)
    keep_freed_memory()
    mesh = init_mesh(tp, torch.device("cpu"), 60, store)
    model, compute, shards, table = zero.build(config, mesh)
    zero.fill(model, table, mesh, lambda name, shape: initial_weight(name, shape, config))
    optimizer = adamw(shards, config)

    def step() -> None:
        sums = forward_backward(model, compute, windows, np.arange(samples), samples,
                                1 / config.seq_length, config, mesh)
        total, tokens = (all_reduce_sum(sums, mesh.world_group) / mesh.tp).tolist()
        gradients = {name: zero.local(weight.grad) for name, weight in model.named_parameters()}
        optimizer_step(optimizer, shards, gradients, table, mesh,
                       mesh.dp * config.seq_length / tokens, config.clip_grad, total)
        model.zero_grad()

    return step


def plain(shape: dict, precision: str, samples: int, kind: str, rank: int, ranks: int, store: str):
    """The reference: `kind` single, ddp, fsdp or tp."""
    torch.manual_seed(0)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    model: nn.Module = GPT(TrainConfig(**shape | dict(num_layers=6)))
    dtype = DTYPES[precision]
    cast = torch.autocast("cpu", dtype) if precision != "fp32" else nullcontext()
    context = nullcontext
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        cast = nullcontext()
        for module in [*model.blocks, model]:
            fully_shard(module, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    elif kind == "tp":
        context = loss_parallel
        for block in model.blocks:
            parallelize_module(block, mesh := init_device_mesh("cpu", (ranks,)), {
                "qkv": ColwiseParallel(), "proj": RowwiseParallel(),
                "up": ColwiseParallel(), "down": RowwiseParallel()})
        parallelize_module(model, mesh, {
            "words": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
        model.head.weight = model.words.weight
    alike = [[weight for weight in model.parameters() if isinstance(weight, DTensor) == cut]
             for cut in (True, False)]                  # torch clips and steps them apart
    alike, ids = [weights for weights in alike if weights], torch.from_numpy(batch(shape, samples))
    optimizer = torch.optim.AdamW([dict(params=weights) for weights in alike], lr=1e-4, fused=True)
    if kind in ("ddp", "fsdp"):
        ids = ids[rank::ranks]

    def step() -> None:
        with cast, context():
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
        for parameters in alike:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def matrix_peak(precision: str, rank: int, ranks: int, store: str):
    """A square product, PRODUCTS times."""
    a, b = (torch.randn(SIDE, SIDE).to(DTYPES[precision]) for _ in range(2))
    return lambda: [F.linear(a, b) for _ in range(PRODUCTS)]


def compare(precision: str, samples: int, number: int) -> dict:
    found: dict = {"precision": precision, "samples": samples}
    print(f"\n{precision}, {samples} x 256 tokens a step, one process of 2 threads")
    sides = {"matrix": Side(partial(matrix_peak, precision), threads=2),
             "nanogeex": Side(partial(ours, SHAPE, precision, samples, 1), threads=2),
             "plain": Side(partial(plain, SHAPE, precision, samples, "single"), threads=2)}
    rounds(sides, number, 1)
    peak = PRODUCTS * 2 * SIDE**3 / sides["matrix"].median()
    config = TrainConfig(**SHAPE)
    print(f"matrix products reach {peak / 1e9:.0f} GFLOP/s")
    for name in ("nanogeex", "plain"):
        speed = 256 * samples / sides[name].median()
        mfu = config.flops_per_token() * speed / peak
        print(f"  {name:<20}{speed:8.0f} tokens/s, mfu {mfu:.0%}, peak {sides[name].peak:.0f} MB")
    found["single"] = dict(
        tokens_per_s=256 * samples / sides["nanogeex"].median(), peak_mb=sides["nanogeex"].peak,
        times=sides["nanogeex"].times(sides["plain"]),
        memory=sides["nanogeex"].peak / sides["plain"].peak)
    print("  {times:.2f} times as fast, {memory:.2f} of the memory".format(**found["single"]))
    sides = {"nanogeex": Side(partial(ours, SMALL, precision, 1, 1), threads=2),
             "plain": Side(partial(plain, SMALL, precision, 1, "single"), threads=2)}
    rounds(sides, number, 10)
    found["host_ms"] = {name: 1e3 * side.median() for name, side in sides.items()}
    print("  hidden size 64, 32 tokens, which is Python and torch alone: {nanogeex:.1f} ms a step, "
          "plain {plain:.1f}".format(**found["host_ms"]))
    for tp, others in ((1, ("ddp", "fsdp")), (2, ("tp",))):
        print(f"{precision}, two processes of one thread, dp {2 // tp} x tp {tp}")
        sides = {"nanogeex": Side(partial(ours, SHAPE, precision, samples, tp), 2)}
        sides |= {kind: Side(partial(plain, SHAPE, precision, samples, kind), 2) for kind in others}
        rounds(sides, number, 1)
        print(f"  nanogeex            {sides['nanogeex'].median():.2f} s a step, peak "
              f"{sides['nanogeex'].peak:.0f} MB a rank")
        for kind in others:
            slower = sides["nanogeex"].times(sides[kind])
            found[kind] = dict(times=slower, seconds=sides["nanogeex"].median())
            print(f"  {kind:<20}{sides[kind].median():.2f} s, peak {sides[kind].peak:.0f} MB; ours "
                  f"takes {1 / slower:.2f} of the time")
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("precisions", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=8, help="a step, of 256 tokens; even")
    parser.add_argument("--json", help="file to write the figures to")
    given = parser.parse_args(argv)
    began = time.perf_counter()
    found = [compare(precision, given.samples, given.rounds) for precision in given.precisions]
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file, indent=1)
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
