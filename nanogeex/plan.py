"""The dry run: one rank of any world, in one process, without devices and data.

Fake tensors have shape and dtype but no memory, a fake process group answers at once.  With them
the training code itself runs, model, FSDP2, loss and optimizer, one step's micro-batches as rank
0 would with the largest share of the samples, and Watch counts.  What is counted is exact:

      weights, optimizer, gradients, activations      bytes at rest and at the peak, by kind
      collectives                                     calls and bytes, by kind and group
      floating-point operations                       recomputation included

What the clock would say is an estimate: operations over peak * --compute-efficiency, and bytes over
bandwidth as a ring sends them, 2 (n-1)/n of an all-reduce, (n-1)/n of a gather or a reduce-scatter.
TP traffic lies in the way of compute; that of the data ranks can go on beside it.

Micro-batches after the first are alike: at most two run, the others are multiples.  Attention's
dropout is left out; a GPU's kernel keeps nothing of it, a CPU's would keep whole masks.

Tests: tests/test_plan.py.
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanogeex import zero
from nanogeex.config import DTYPES, TrainConfig, UsageError, check_shape
from nanogeex.mesh import Mesh, all_reduce_sum
from nanogeex.model import CodeGeeX, Options
from nanogeex.optim import adamw, optimizer_step, sum_over_tp
from nanogeex.parameters import split_table
from nanogeex.plan_table import table
from nanogeex.precision import default_precision
from nanogeex.samples import Windows, shares
from nanogeex.watch import Watch

GIB, RESERVE = 2**30, 2**30         # RESERVE: of a device, for its context and the groups' buffers
SIZES = (16, 24, 32, 40, 80)        # GiB of common devices
PAPER_TOKENS = 850e9


@dataclass(frozen=True)
class Accelerator:
    """Dense 16-bit peak, memory, and one direction of a device's links in its node and out of it;
    from the makers' data sheets, the network as is usual with them."""

    peak_tflops: float
    memory_gib: float
    link_gb_s: float
    network_gb_s: float


ACCELERATORS = {
    "V100": Accelerator(125, 32, 150, 12.5), "A100-40": Accelerator(312, 40, 300, 25),
    "A100-80": Accelerator(312, 80, 300, 25), "H100": Accelerator(989, 80, 450, 50),
    "H200": Accelerator(989, 141, 450, 50),
}


@dataclass
class Counts:
    """Of one rank and one step: bytes by kind, (collective, group, dtype) -> calls and bytes."""

    parameters: int
    at_rest: Counter
    at_peak: Counter
    calls: Counter
    sent: Counter
    flops: int


def accelerator(config: TrainConfig) -> Accelerator:
    """The device by name, with what other flags say of it.  Raises UsageError."""
    if config.accelerator not in ACCELERATORS:
        raise UsageError(f"--accelerator {config.accelerator}: unknown; choose one of "
                         f"{', '.join(ACCELERATORS)}, and mend it by --peak-tflops, --memory-gib, "
                         "--link-gb-s, --network-gb-s")
    told = {name: getattr(config, name) for name in Accelerator.__dataclass_fields__}
    return replace(ACCELERATORS[config.accelerator],
                   **{name: value for name, value in told.items() if value is not None})


def dry_run(config: TrainConfig, forward_backward: Callable) -> None:
    """Print the report: a table, or JSON.  Raises UsageError for a world that cannot be."""
    device, tp = accelerator(config), config.tensor_model_parallel_size
    world = config.world_size or tp
    if world % tp:
        raise UsageError(f"--world-size {world}: --tp {tp} does not divide it; take a multiple")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("--dry-run: one process plays all ranks; start it without torchrun")
    precision = "fp16" if config.accelerator == "V100" else (
        default_precision(config, torch.device("cuda")))
    config = replace(config, attention_dropout=0.0, compile=False,
                     precision=config.precision or precision)
    report = _report(config, world, count(config, world, forward_backward), device)
    report["topologies"] = _topologies(config, world, forward_backward, device, report)
    print(json.dumps(report, indent=1) if config.json else table(report))


def count(config: TrainConfig, world: int, forward_backward: Callable) -> Counts:
    """Run a step as rank 0 of `world`, on nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        tp = config.tensor_model_parallel_size
        row, column = list(range(tp)), list(range(0, world, tp))
        mesh = Mesh(0, world // tp, tp, torch.device("cpu"), dist.new_group(row),
                    dist.new_group(column))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # of torch, on copies of fake tensors
            return _count(config, mesh, forward_backward)
    finally:
        dist.destroy_process_group()


def _count(config: TrainConfig, mesh: Mesh, forward_backward: Callable) -> Counts:
    dp, _ = mesh.dp, mesh.dp_mesh               # made of real numbers: before there are fake ones
    share = -(-config.global_batch_size // dp)              # of a data rank, the largest
    _, number = shares(share, 1, config.micro_batch_size)
    size = -(-share // number)
    watch = Watch({"tp": mesh.tp_group, "dp": mesh.dp_group, "world": mesh.world_group},
                  config.padded_vocab_size // mesh.tp)
    with torch.device("meta"):
        model = CodeGeeX(config, mesh, Options.of(config))
    table = split_table(model)
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        compute = zero.shard(model, mesh, DTYPES[config.precision],
                             DTYPES[config.grad_reduce_dtype], config.reshard_after_forward)
        shards = {name: zero.local(weight.detach()) for name, weight in model.named_parameters()}
        watch.claim(shards, "weights")
        if compute is not model:
            watch.claim(list(compute.parameters()), "gathered weights")
        optimizer = adamw(shards, config)

        def step(samples: int) -> None:
            """As in train.py."""
            chosen = np.arange(samples * dp)
            ids = np.broadcast_to(np.zeros(1, np.int64), (len(chosen), config.seq_length + 1))
            sums = forward_backward(
                model, compute, Windows(ids, 0, 0), chosen, size, 1.0, config, mesh)
            all_reduce_sum(torch.cat([sums, sums.new_zeros(1)]), mesh.world_group)
            gradients = {name: zero.local(weight.grad) for name, weight in model.named_parameters()}
            watch.claim(gradients, "gradients")
            if config.sequence_parallel:
                sum_over_tp(gradients, table, mesh)
            optimizer_step(optimizer, shards, gradients, table, mesh, 1.0, config.clip_grad)
            watch.claim([list(state.values()) for state in optimizer.state.values()], "optimizer")
            model.zero_grad()

        step(size)                                          # makes the moments, too
        first = watch.calls, watch.sent, watch.flops
        watch.reset()
        step(share if number <= 2 else 2 * size)
        again = max(0, number - 2)                          # further ones are like the second
        calls, sent, flops = (_more(one, two, again) for one, two in zip(
            first, (watch.calls, watch.sent, watch.flops), strict=True))
        return Counts(sum(shard.numel() for shard in shards.values()), watch.held_by_kind(),
                      watch.peak_by_kind(), calls, sent, flops)


def _more(one, two, again: int):
    """What two micro-batches took, and `again` times what the second added to the first."""
    if isinstance(two, Counter):
        return Counter({key: _more(one[key], two[key], again) for key in two})
    return two + again * (two - one)


def _topologies(config: TrainConfig, world: int, forward_backward: Callable,
                device: Accelerator, asked: dict) -> list[dict]:
    """Every --tp that cuts this model and stays in a node, best first; `asked` is known.  For the
    others models of few blocks run, and what a block adds is multiplied: all are alike."""
    found = []
    for tp in range(1, config.devices_per_node + 1):
        try:
            check_shape(config, tp)
        except UsageError:
            continue
        if world % tp:
            continue
        report = asked
        if tp != asked["tp"]:
            changed = replace(config, tensor_model_parallel_size=tp)
            few, more = (count(replace(changed, num_layers=layers), world, forward_backward)
                         for layers in (3, 4))
            counts = Counts(*(_more(getattr(few, name), getattr(more, name), config.num_layers - 4)
                              for name in Counts.__dataclass_fields__))
            report = _report(changed, world, counts, device)
        found.append({key: report[key] for key in (
            "dp", "tp", "peak_gib", "fits", "step_s", "tokens_per_s", "mfu")})
    return sorted(found, key=lambda entry: (not entry["fits"], -entry["tokens_per_s"]))


def _report(config: TrainConfig, world: int, counts: Counts, device: Accelerator) -> dict:
    tp = config.tensor_model_parallel_size
    dp, peak = world // tp, sum(counts.at_peak.values())
    fits = {size: peak + RESERVE <= size * GIB for size in SIZES}
    near = max(1, config.devices_per_node // tp)            # data ranks that share a node's network
    inside = device.link_gb_s if tp <= config.devices_per_node else device.network_gb_s
    outside = device.link_gb_s
    if world > config.devices_per_node:
        outside = min(outside, near * device.network_gb_s)
    ranks, speed = {"tp": tp, "dp": dp, "world": world}, {"tp": inside, "dp": outside,
                                                          "world": outside}
    collectives, traffic = [], Counter()
    for (kind, group, dtype), calls in sorted(counts.calls.items(), key=lambda item: item[0][1:]):
        n, sent = ranks[group], counts.sent[kind, group, dtype]
        traffic[group] += (2 if kind == "all-reduce" else 1) * (n - 1) / n * sent / (
            1e9 * speed[group])
        collectives.append({"kind": kind, "group": group, "ranks": n, "dtype": dtype,
                            "calls": calls, "bytes": sent})
    compute = counts.flops / (1e12 * device.peak_tflops * config.compute_efficiency)
    tp_s, dp_s = traffic["tp"], traffic["dp"] + traffic["world"]
    step, serial = max(compute + tp_s, dp_s), compute + tp_s + dp_s
    tokens = config.global_batch_size * config.seq_length
    return {
        "world": world, "dp": dp, "tp": tp, "precision": config.precision,
        "recompute": config.recompute, "sequence_parallel": config.sequence_parallel,
        "reshard_after_forward": config.reshard_after_forward,
        "global_batch_size": config.global_batch_size,
        "micro_batches": shares(-(-config.global_batch_size // dp), 1, config.micro_batch_size)[1],
        "parameters": config.num_parameters, "parameters_of_rank": counts.parameters,
        "bytes_at_rest": dict(counts.at_rest), "bytes_at_peak": dict(counts.at_peak),
        "peak_gib": peak / GIB, "fits_gib": fits,
        "fits": peak + RESERVE <= device.memory_gib * GIB, "collectives": collectives,
        "flops_of_rank": counts.flops, "accelerator": config.accelerator, **vars(device),
        "compute_s": compute, "tp_s": tp_s, "dp_s": dp_s, "step_s": step,
        "step_s_without_overlap": serial, "tokens_per_s": tokens / step,
        "mfu": config.flops_per_token() * tokens / (step * 1e12 * device.peak_tflops * world),
        "days_of_850b_tokens": PAPER_TOKENS / (tokens / step) / 86400}
