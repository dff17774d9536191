"""Train a CodeGeeX: `python train.py`, or `torchrun --nproc_per_node N train.py --tp T`.

The loop is all there is: a step's micro-batches forward and backward, one number for clipping and
overflow, AdamW, a line of metrics; now and then an evaluation and a checkpoint.
"""

import math
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nanogeex import checkpoint, data, integrity, micro_batch, plan, report, run_directory, zero
from nanogeex.command_line import parse
from nanogeex.config import TrainConfig, UsageError
from nanogeex.mesh import (
    Mesh,
    all_reduce_sum,
    end_with_parent,
    init_mesh,
    keep_freed_memory,
    launch,
    none_can_join,
    on_rank0,
    pick_device,
    stop_signals,
)
from nanogeex.optim import adamw, first_not_finite, loss_scaler, lr_at, optimizer_step, sum_over_tp
from nanogeex.parameters import initial_weight
from nanogeex.precision import default_precision
from nanogeex.samples import Windows, micro_batches, open_windows, permuted, shares, step_seed
from nanogeex.saver import Saver
from nanogeex.weights import fill_shards, training_defaults


def main(argv: list[str]) -> None:
    config = parse(TrainConfig, argv, __doc__, training_defaults)
    if config.dry_run:
        return plan.dry_run(config, forward_backward)
    if config.compile:
        zero.check_compiler()
    device = pick_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    mesh = init_mesh(config.tensor_model_parallel_size, device, config.timeout)
    out, seq_length, batch = Path(config.out), config.seq_length, config.global_batch_size

    def say(line: str) -> None:
        if mesh.rank == 0:
            print(line, file=sys.stderr, flush=True)

    # What to start from and what to read: rank 0 finds and makes it, the others wait.
    on_rank0(mesh, "tensorboard", lambda: report.check_tensorboard(config.tensorboard_dir))
    lock: list = []
    on_rank0(mesh, "run directory", lambda: lock.append(run_directory.take(out)))
    config.precision = on_rank0(
        mesh, "precision", lambda: config.precision or default_precision(config, device))
    start = run_directory.find_start(config, mesh, say)
    directory = on_rank0(mesh, "data", lambda: run_directory.prepare(config, start))
    train, val, corpus = open_windows(Path(directory), seq_length, config.vocab_size)
    say(data.table(corpus))

    # The model: cut over tp and dp, filled in place.
    model, compute, shards, table = zero.build(config, mesh)
    optimizer, scaler = adamw(shards, config), loss_scaler(config)
    step, samples, skipped = 0, 0, 0
    if start:
        meta = integrity.read_meta(start)
        step, samples, skipped = meta["step"], meta["samples"], meta["skipped"]
        if scaler and meta["scaler"]:
            vars(scaler).update(meta["scaler"])             # its state; its flags are today's
        checkpoint.load(start, shards, optimizer, table, mesh)
    elif config.init_from:
        fill_shards(config.init_from, shards, table, mesh, say)
    else:
        zero.fill(model, table, mesh, lambda name, shape: initial_weight(name, shape, config))

    saver = Saver(out / "checkpoints", table, config.keep_last, config.async_save, mesh, say)

    def save() -> None:
        saver.save({"step": step, "samples": samples, "skipped": skipped,
                    "scaler": scaler.state() if scaler else None, "config": asdict(config)},
                   shards, optimizer)

    share = -(-batch // mesh.dp)                                # of a data rank, the largest
    size = micro_batch.choose(model, compute, config, share, mesh, say)
    _, number = shares(batch, mesh.dp, size)
    say(f"{config.num_parameters:,} parameters | dp {mesh.dp} x tp {mesh.tp} | {device.type} "
        f"{config.precision} | {batch} samples a step, micro-batches a data rank: {number}")
    if batch % mesh.dp:
        say(f"note: {batch} samples on {mesh.dp} data ranks are shares of {share - 1} and {share}; "
            "the loss is the same, ranks with less wait")
    if none_can_join():
        say("note: for nodes that may come back, start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; without it torch lets none join a running job")
    if start:
        say(f"resuming {start} at step {step}{run_directory.changes(meta['config'], config)}")
    if step >= config.train_iters:
        say(f"nothing to train: step {step} of --train-iters {config.train_iters} is reached")

    metrics = report.open_metrics(out / "metrics.jsonl", bool(start)) if mesh.rank == 0 else None
    board = report.open_tensorboard(config.tensorboard_dir, step) if mesh.rank == 0 else None
    peak = report.peak_flops(device) * mesh.world
    times, saved = [], (step if start else None)            # of the steps since the last log line
    stepped = report.profiler(out, say) if config.profile and mesh.rank == 0 else lambda: None
    signals, skipped_in_a_row, record = stop_signals(), 0, {}
    while step < config.train_iters:
        began = time.perf_counter()
        lr = lr_at(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        scale = scaler.scale if scaler else 1.0

        torch.manual_seed(step_seed(config.seed, samples, mesh.dp_rank))        # for dropout
        chosen = permuted(np.arange(samples, samples + batch), len(train.ids), config.seed)
        try:
            sums = forward_backward(
                model, compute, train, chosen, size, scale / seq_length, config, mesh)
        except torch.OutOfMemoryError:
            model.zero_grad()
            size = micro_batch.halved(size, out, mesh)
            say(f"step {step + 1}: out of memory, again with micro-batches of {size}")
            continue
        sums = torch.cat([sums, sums.new_tensor([len(signals)])])       # loss, tokens, told to stop
        total, tokens, told = (all_reduce_sum(sums, mesh.world_group) / mesh.tp).tolist()
        # (tp ranks have the same sums: all of the world's count them tp times)

        # FSDP2 has averaged over dp; undo that, the scale and the 1 / seq_length that keeps sums of
        # a sample's losses in range, and divide by the step's tokens.
        unscale = mesh.dp * seq_length / (scale * tokens)
        gradients = {name: zero.local(weight.grad) for name, weight in model.named_parameters()}
        if config.sequence_parallel:
            sum_over_tp(gradients, table, mesh)
        if config.debug_inf == f"{step + 1}:{mesh.rank}":
            gradients["final_layernorm.weight"].view(-1)[:1] = math.inf
        norm, taken = optimizer_step(
            optimizer, shards, gradients, table, mesh, unscale, config.clip_grad, total)
        if not taken:
            say(f"step {step + 1}: skipped, loss {total / tokens:g}, gradient norm {norm:g}")
        skipped_in_a_row = 0 if taken else skipped_in_a_row + 1
        if skipped_in_a_row >= config.max_consecutive_skips:
            saver.wait()
            raise UsageError(
                f"--max-consecutive-skips {skipped_in_a_row}: reached at step {step + 1}, loss "
                f"{total / tokens:g}, first gradient that is not finite: "
                f"{first_not_finite(gradients, mesh)}; lower --lr and resume: the last checkpoint "
                "is intact")
        if scaler and not taken and scaler.exhausted:
            saver.wait()
            raise UsageError(
                f"--min-loss-scale {scaler.minimum:g}: reached, and step {step + 1} still "
                f"overflows, first in {first_not_finite(gradients, mesh)}; lower --lr, or take "
                "--bf16, and resume: the last checkpoint is intact")
        model.zero_grad()
        del gradients                                           # or they live through the next step
        step, samples, skipped = step + 1, samples + batch, skipped + (not taken)
        if scaler:
            scaler.update(overflow=not taken)

        seconds = time.perf_counter() - began
        times.append(seconds)
        record = {
            "step": step, "loss": total / tokens, "lr": lr, "grad_norm": norm, "loss_scale": scale,
            "skipped": skipped, "samples": samples, "tokens": samples * seq_length,
            "tokens_per_s": tokens / seconds, "step_s": seconds,
            "mfu": config.flops_per_token() * tokens / seconds / peak if peak else 0.0,
            "mem_gb": report.memory_gb(device)}
        if start:
            record["restart"], start = True, None           # in the first record alone
        if step % config.log_interval == 0 or step == config.train_iters:
            say(report.log_line(record, config.train_iters, sum(times) / len(times)))
            times.clear()
        if step % config.eval_interval == 0 and step < config.train_iters:
            record["val_loss"] = evaluate(model, compute, val, size, config, mesh)
            say(f"step {step} | validation {report.in_words(record['val_loss'], val)}")
        report.append(metrics, record, board)
        stepped()
        saver.poll()
        if step % config.save_interval == 0:
            save()
            saved = step
        if told:
            break

    if saved != step:
        save()
    if not saver.wait():
        raise UsageError(f"--out {out}: the last checkpoint is not written, see above; mend that, "
                         f"and the same command goes on")
    if step < config.train_iters:
        say(f"stopped at step {step} of {config.train_iters} by {signals or 'a signal elsewhere'}; "
            "the same command goes on")
        return
    loss = evaluate(model, compute, val, size, config, mesh)
    if mesh.rank == 0:
        print(report.final_line(step, loss, val, corpus["gzip_bytes"]), flush=True)
    if record:
        report.append(metrics, record | {"val_loss": loss}, board)
    say(f'next: python infer.py --load {shlex.quote(str(out))} --prompt "def main():"')


def forward_backward(model: nn.Module, compute: nn.Module, train: Windows, chosen: np.ndarray,
                     micro_batch_size: int, scale: float, config: TrainConfig,
                     mesh: Mesh) -> Tensor:
    """This rank's share of a step's `chosen` samples, in micro-batches: leaves gradients of `scale`
    times the loss; returns the sums of loss and tokens, (2)."""
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    _, number = shares(len(chosen), mesh.dp, micro_batch_size)
    batches = micro_batches(train, chosen, mesh.dp, mesh.dp_rank, micro_batch_size, mesh.device)
    for i, (ids, targets, weights) in enumerate(batches):
        zero.micro_batch(model, compute, first=i == 0, last=i == number - 1,
                         reshard_after_forward=config.reshard_after_forward)
        part = compute(ids, targets, weights * scale)       # sum over the micro-batch's tokens,
        part.backward()                                     # scaled alike at every topology
        sums += torch.stack([part.detach() / scale, weights.sum()])
    return sums


@torch.no_grad()
def evaluate(model: nn.Module, compute: nn.Module, val: Windows, micro_batch_size: int,
             config: TrainConfig, mesh: Mesh) -> float | None:
    """Mean loss a token over the first --eval-iters global batches of validation windows, shared by
    the data ranks; None where there is no window."""
    count = min(len(val.ids), config.eval_iters * config.global_batch_size)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)              # loss, tokens
    if count == 0:
        return None
    zero.refresh(model, compute)
    compute.eval()
    for ids, targets, weights in micro_batches(val, np.arange(count), mesh.dp, mesh.dp_rank,
                                               micro_batch_size, mesh.device):
        sums += torch.stack([compute(ids, targets, weights), weights.sum()])
    compute.train()
    zero.release(compute)
    total, tokens = all_reduce_sum(sums, mesh.dp_group).tolist()
    return total / tokens


if __name__ == "__main__":
    launch(main)
