"""Train a CodeGeeX: `python train.py`, or `torchrun --nproc_per_node N train.py --tp T`.

The loop is all there is: a window of micro-batches forward and backward, one number for clipping
and overflow, AdamW, a line of metrics; now and then an evaluation and a checkpoint.  The defaults
below are those of --preset tiny.
"""

import json
import math
import shlex
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nanogeex import checkpoint, data, report, zero
from nanogeex.command_line import parse
from nanogeex.config import DTYPES, ModelConfig, TrainConfig, UsageError, default_precision
from nanogeex.mesh import (
    Mesh,
    all_reduce_sum,
    init_mesh,
    keep_freed_memory,
    launch,
    on_rank0,
    pick_device,
)
from nanogeex.model import CodeGeeX, Options
from nanogeex.optim import adamw, first_not_finite, loss_scaler, lr_at, optimizer_step
from nanogeex.parameters import initial_weight, split_table
from nanogeex.samples import (
    Windows,
    micro_batches,
    open_windows,
    permuted,
    shares,
    step_seed,
)
from nanogeex.weights import fill_shards, training_defaults


def main(argv: list[str]) -> None:
    config = parse(TrainConfig, argv, __doc__, training_defaults)
    device = pick_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    mesh = init_mesh(config.tensor_model_parallel_size, device, config.timeout)
    out, seq_length, batch = Path(config.out), config.seq_length, config.global_batch_size

    def say(line: str) -> None:
        if mesh.rank == 0:
            print(line, file=sys.stderr, flush=True)

    # What to start from and what to read: rank 0 finds and makes it, the others wait.
    config.precision = on_rank0(
        mesh, "precision", lambda: config.precision or default_precision(config, device))
    start = on_rank0(mesh, "start", lambda: find_start(config))
    directory = on_rank0(mesh, "data", lambda: prepare(config, start))
    train, val, corpus = open_windows(Path(directory), seq_length, config.vocab_size)
    say(data.table(corpus))

    # The model: built without memory, cut over tp and dp, filled in place.
    with torch.device("meta"):
        model = CodeGeeX(config, mesh, Options.of(config))
    table = split_table(model)
    compute = zero.shard(
        model, mesh, DTYPES[config.precision], DTYPES[config.grad_reduce_dtype])
    shards = {name: zero.local(weight.detach()) for name, weight in model.named_parameters()}
    optimizer, scaler = adamw(shards, config), loss_scaler(config)
    step, samples, skipped = 0, 0, 0
    if start:
        meta = checkpoint.read_meta(Path(start))
        step, samples, skipped = meta["step"], meta["samples"], meta["skipped"]
        if scaler and meta["scaler"]:
            vars(scaler).update(meta["scaler"])             # its state; its flags are today's
        checkpoint.load(Path(start), shards, optimizer, table, mesh)
    elif config.init_from:
        say(fill_shards(config.init_from, shards, table, mesh))
    else:
        zero.fill(model, table, mesh, lambda name, shape: initial_weight(name, shape, config))

    def save() -> None:
        state = {"step": step, "samples": samples, "skipped": skipped,
                 "scaler": scaler.state() if scaler else None, "config": asdict(config)}
        path = checkpoint.save(out / "checkpoints", state, shards, optimizer, table, mesh)
        say(f"saved {path}")

    _, number = shares(batch, mesh.dp, config.micro_batch_size)
    say(f"{config.num_parameters:,} parameters | dp {mesh.dp} x tp {mesh.tp} | {device.type} "
        f"{config.precision} | {batch} samples a step, micro-batches a data rank: {number}")
    if batch % mesh.dp:
        say(f"note: {batch} samples on {mesh.dp} data ranks are shares of {batch // mesh.dp} and "
            f"{batch // mesh.dp + 1}; the loss is the same, ranks with less wait")
    if start:
        say(f"resuming {start} at step {step}{changes(meta['config'], config)}")
    if step >= config.train_iters:
        say(f"nothing to train: step {step} of --train-iters {config.train_iters} is reached")

    metrics = report.open_metrics(out / "metrics.jsonl", bool(start)) if mesh.rank == 0 else None
    peak = report.peak_flops(device) * mesh.world
    logged, saved = (time.perf_counter(), step), (step if start else None)
    while step < config.train_iters:
        began = time.perf_counter()
        lr = lr_at(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        scale = scaler.scale if scaler else 1.0

        torch.manual_seed(step_seed(config.seed, samples, mesh.dp_rank))        # for dropout
        sums = torch.zeros(2, dtype=torch.float64, device=device)               # loss, tokens
        chosen = permuted(np.arange(samples, samples + batch), len(train.ids), config.seed)
        window = micro_batches(
            train, chosen, mesh.dp, mesh.dp_rank, config.micro_batch_size, device)
        for i, (ids, targets, weights) in enumerate(window):
            zero.micro_batch(model, compute, first=i == 0, last=i == number - 1)
            part = compute(ids, targets, weights)               # sum over the micro-batch's tokens
            (part * (scale / seq_length)).backward()            # scaled alike at every topology
            sums += torch.stack([part.detach(), weights.sum()])
        total, tokens = all_reduce_sum(sums, mesh.dp_group).tolist()            # of the step

        # FSDP2 has averaged over dp; undo that and the scale, and divide by the step's tokens.
        unscale = mesh.dp * seq_length / (scale * tokens)
        gradients = {name: zero.local(weight.grad) for name, weight in model.named_parameters()}
        if config.debug_inf == f"{step + 1}:{mesh.rank}":
            gradients["final_layernorm.weight"].view(-1)[:1] = math.inf
        norm, taken = optimizer_step(
            optimizer, shards, gradients, table, mesh, unscale, config.clip_grad)
        if scaler and not taken and scaler.exhausted:
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
        record = {
            "step": step, "loss": total / tokens, "lr": lr, "grad_norm": norm, "loss_scale": scale,
            "skipped": skipped, "samples": samples, "tokens": samples * seq_length,
            "tokens_per_s": tokens / seconds, "step_s": seconds,
            "mfu": config.flops_per_token() * tokens / seconds / peak if peak else 0.0,
            "mem_gb": report.memory_gb(device)}
        if metrics:
            report.append(metrics, record)
        if step % config.log_interval == 0 or step == config.train_iters:
            now = time.perf_counter()
            say(report.log_line(record, config.train_iters, (now - logged[0]) / (step - logged[1])))
            logged = now, step
        if step % config.eval_interval == 0 and step < config.train_iters:
            result = evaluate(model, compute, val, config, mesh)
            say(f"step {step} | validation {in_words(result, val)}")
        if step % config.save_interval == 0:
            save()
            saved = step

    if saved != step:
        save()
    result = in_words(evaluate(model, compute, val, config, mesh), val)
    if mesh.rank == 0:
        bits = 8 * corpus["gzip_bytes"] / val.bytes if val.bytes else math.nan
        gzip = f"gzip -9 on the same text: {bits:.4f} bits per byte"
        print(f"step {step} | validation {result} | {gzip}")
    say(f'next: python infer.py --load {shlex.quote(str(out))} --prompt "def main():"')


def find_start(config: TrainConfig) -> str | None:
    """The checkpoint to resume, if any.  Raises UsageError if its model has another shape."""
    own = checkpoint.newest(Path(config.out) / "checkpoints")
    if config.resume == "none":
        if own:
            raise UsageError(f"--resume none: {own} is there; give another --out, or remove it")
        return None
    start = own if config.resume == "auto" else Path(config.resume)
    if start is None:
        return None
    if (start / "checkpoints").is_dir():                        # a run: its newest
        start = checkpoint.newest(start / "checkpoints") or start
    if own and start.resolve() != own.resolve():
        raise UsageError(f"--resume {start}: --out {config.out} has a checkpoint of its own, {own};"
                         " give another --out, or remove that")
    saved = checkpoint.read_meta(start)["config"]
    for field in fields(ModelConfig):
        mine, its = getattr(config, field.name), saved[field.name]
        if mine != its:
            raise UsageError(f"--{field.name.replace('_', '-')} {mine}: the checkpoint {start} has "
                             f"{its}; give {its}, or another --out")
    return str(start)


def prepare(config: TrainConfig, start: str | None) -> str:
    """Make the run directory, its tokenizer and its data; return the data's directory."""
    out = Path(config.out)
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        for path in (out / "checkpoints/.writable", out / "metrics.jsonl"):
            open(path, "a").close()             # fail now, not at the first save
        (out / "checkpoints/.writable").unlink()
        directory = data.prepare(config.data, out, config.vocab_size, config.num_workers,
                                 Path(start).parent.parent if start else config.tokenizer)
        (out / "config.json").write_text(json.dumps(asdict(config), indent=1))
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror}; give an --out that can be "
                         "written and --data that can be read") from None
    return str(directory)


def changes(before: dict, config: TrainConfig) -> str:
    """What differs from the run that is resumed, in words."""
    now = asdict(config)
    names = [name for name in now if name in before and now[name] != before[name]]
    return "".join(f", --{name.replace('_', '-')} {now[name]} (was {before[name]})"
                   for name in names if name not in ("out", "resume"))


@torch.no_grad()
def evaluate(model: nn.Module, compute: nn.Module, val: Windows, config: TrainConfig,
             mesh: Mesh) -> float | None:
    """Mean loss a token over the first --eval-iters global batches of validation windows, shared by
    the data ranks; None where there is no window."""
    count = min(len(val.ids), config.eval_iters * config.global_batch_size)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)              # loss, tokens
    if count == 0:
        return None
    zero.refresh(model, compute)
    compute.eval()
    for ids, targets, weights in micro_batches(val, np.arange(count), mesh.dp, mesh.dp_rank,
                                               config.micro_batch_size, mesh.device):
        sums += torch.stack([compute(ids, targets, weights), weights.sum()])
    compute.train()
    zero.release(compute)
    total, tokens = all_reduce_sum(sums, mesh.dp_group).tolist()
    return total / tokens


def in_words(loss: float | None, val: Windows) -> str:
    if loss is None:
        return "none, its text is shorter than one sample"
    bits = loss / math.log(2) * val.tokens / val.bytes
    return f"loss {loss:.4f}, {bits:.4f} bits per byte"


if __name__ == "__main__":
    launch(main)
