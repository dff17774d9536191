"""What the dry run predicts against what a real run holds and sends."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

import train
from nanogeex import plan
from nanogeex.config import UsageError
from nanogeex.optim import adamw, optimizer_step, sum_over_tp
from nanogeex.samples import Windows
from tests.programs import run
from tests.ranks import build, on_ranks, small_config
from tests.test_config import train as parsed

KINDS = {"all_reduce": "all-reduce", "all_gather_into_tensor": "all-gather",
         "all_gather_single": "all-gather", "reduce_scatter_tensor": "reduce-scatter",
         "reduce_scatter_single": "reduce-scatter"}


def predicted(config, world):
    """In a process of its own: backward on fake tensors starts threads, and those do not fork."""
    return on_ranks(1, 1, lambda mesh: plan.count(config, world, train.forward_backward))[0]


def counted(mesh, calls, sent):
    """Put a hook that counts around torch.distributed's functions."""
    names = {mesh.dp_group: "dp", mesh.tp_group: "tp", None: "world", dist.group.WORLD: "world"}

    def hook(kind, call):
        def count(*args, **keywords):
            tensors = [*args, *keywords.values()]
            largest = max((t for t in tensors if isinstance(t, torch.Tensor)),
                          key=lambda t: t.nbytes)
            key = kind, names[keywords.get("group")], str(largest.dtype).removeprefix("torch.")
            calls[key] += 1
            sent[key] += largest.nbytes
            return call(*args, **keywords)
        return count

    for name, kind in KINDS.items():
        if hasattr(dist, name):
            setattr(dist, name, hook(kind, getattr(dist, name)))


def measured(mesh, config, number):
    """The second step of `number` micro-batches, for real: parameters, bytes at rest and at the
    peak by torch's own tracker, collectives and bytes."""
    model, compute, shards, table = build(config, mesh)
    optimizer, calls, sent = adamw(shards, config), Counter(), Counter()
    chosen = np.arange(config.global_batch_size)
    windows = Windows(np.zeros((len(chosen), config.seq_length + 1), np.int64), 0, 0)

    def step():
        sums = train.forward_backward(model, compute, windows, chosen, config.micro_batch_size, 1.0,
                                      config, mesh)
        plan.all_reduce_sum(torch.cat([sums, sums.new_zeros(1)]), mesh.world_group)
        gradients = {name: plan.zero.local(w.grad) for name, w in model.named_parameters()}
        if config.sequence_parallel:
            sum_over_tp(gradients, table, mesh)
        optimizer_step(optimizer, shards, gradients, table, mesh, 1.0, config.clip_grad)
        model.zero_grad()

    step()
    counted(mesh, calls, sent)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    begin = plan.zero.micro_batch

    def micro_batch(*args, **keywords):
        tracker.reset_mod_stats()                           # it sees one forward at a time
        begin(*args, **keywords)

    plan.zero.micro_batch = micro_batch
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")[mesh.device]
    moments = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    weights = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
               for tensor in shards.values()}
    return {"parameters": sum(shard.numel() for shard in shards.values()),
            "weights": sum(weights.values()), "optimizer": moments,
            "peak": max(size for kind, size in peak.items() if str(kind).endswith("Total")),
            "calls": calls, "sent": sent}


@pytest.mark.parametrize("world, tp, number, changes", [
    (4, 2, 2, dict(recompute="full")),
    (2, 1, 5, dict(recompute="selective", precision="bf16")),
    (4, 2, 1, dict(recompute="selective", sequence_parallel=True, hidden_dropout=0.1)),
    (4, 2, 4, dict(recompute="selective", sequence_parallel=True, reshard_after_forward=True)),
    (2, 2, 3, dict(recompute="none", precision="bf16")),
    (3, 1, 2, dict(recompute="full", reshard_after_forward=True, grad_reduce_dtype="bf16"))])
def test_predictions_are_true(world, tp, number, changes):
    config = small_config(**dict(
        num_layers=4, hidden_size=128, seq_length=128, tensor_model_parallel_size=tp,
        micro_batch_size=4, global_batch_size=4 * number * (world // tp), precision="fp32")
        | changes)
    expected = predicted(config, world)
    real = on_ranks(world, tp, measured, config, number)[0]
    assert expected.parameters == real["parameters"]
    assert expected.at_rest["weights"] == real["weights"]
    assert expected.at_rest["optimizer"] == real["optimizer"]
    assert expected.calls == real["calls"] and expected.sent == real["sent"]
    assert expected.at_peak.total() == pytest.approx(real["peak"], rel=0.1)


def test_report(tmp_path):
    argv = ["--dry-run", "--world-size", "8", "--tp", "2", "--num-layers", "6", "--fp16",
            "--global-batch-size", "64", "--micro-batch-size", "2"]
    report = json.loads(run("train.py", *argv, "--json", cwd=tmp_path).stdout)
    assert (report["dp"], report["tp"], report["micro_batches"]) == (4, 2, 8)
    peaks = {entry["tp"]: entry["peak_gib"] for entry in report["topologies"]}
    assert sorted(peaks) == [1, 2, 4, 8]
    four = predicted(parsed(*argv, "--tp", "4"), 8)
    assert peaks[4] == pytest.approx(four.at_peak.total() / 2**30, rel=0.02)    # from fewer blocks
    speeds = [entry["tokens_per_s"] for entry in report["topologies"]]
    assert speeds == sorted(speeds, reverse=True)


def test_numbers_of_a_device_are_flags():
    device = plan.accelerator(parsed("--dry-run", "--accelerator", "V100", "--memory-gib", "16"))
    assert (device.peak_tflops, device.memory_gib) == (125, 16)


@pytest.mark.parametrize("argv, says", [
    (["--dry-run", "--world-size", "9", "--tp", "2"], "--world-size 9: --tp 2 does not divide it"),
    (["--dry-run", "--accelerator", "B9"], "--accelerator B9: unknown; choose one of V100,"),
    (["--world-size", "8"], "--world-size 8: is for --dry-run"),
    (["--dry-run", "--micro-batch-size", "auto"], "--micro-batch-size auto: measures a device")])
def test_mistakes(argv, says):
    with pytest.raises(UsageError, match=says):
        plan.dry_run(parsed(*argv), train.forward_backward)


def test_as_a_program(tmp_path):
    ended = run("train.py", "--dry-run", cwd=tmp_path)
    assert "953,856 parameters on 1 ranks" in ended.stdout and ended.stderr == ""
    assert "memory of a rank" in ended.stdout and "which topology" in ended.stdout
    assert not list(tmp_path.iterdir())
