"""How many samples a rank puts through the model at once: --micro-batch-size auto, and what to do
when memory runs out.  The loss curve does not depend on it, only the speed.

auto measures what a sample holds from forward to backward, and divides the memory that is free by
it: on a CPU the tensors that autograd saves, on a GPU how the peak grows from one sample to two.
All ranks take the smallest answer.

A process that runs out of memory in the middle of collectives cannot take the others back with it.
So a process alone halves the size and repeats the step; one of several leaves the halved size in
the run directory and fails, and the job, started again by torchrun or by hand, goes on with it.

Tests: tests/test_survival.py.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nanogeex import zero
from nanogeex.config import TrainConfig, UsageError
from nanogeex.mesh import Mesh, on_rank0

CPU_SHARE, GPU_SHARE = 0.5, 0.9         # of the memory that is free


def choose(model: nn.Module, compute: nn.Module, config: TrainConfig, share: int, mesh: Mesh,
           say: Callable[[str], None]) -> int:
    """The size to begin with, for a data rank's `share` of a step; `say` hears what limits it."""
    size, out = config.micro_batch_size, Path(config.out)
    if size == "auto":
        size = auto(model, compute, config, share, mesh)
    elif size > share:
        say(f"note: --micro-batch-size {size} is more than a data rank's share of a step, {share}; "
            f"micro-batches are of {share}")
    if limit := on_rank0(mesh, "micro-batch limit", lambda: _limit(out)):
        say(f"note: micro-batches of at most {limit}, more was out of memory; remove "
            f"{out}/micro_batch_size to try again")
    return min(size, limit or size)


def auto(model: nn.Module, compute: nn.Module, config: TrainConfig, largest: int,
         mesh: Mesh) -> int:
    """The largest micro-batch that fits, at most `largest`, the same on all ranks.  Runs the model,
    once its weights and AdamW's moments are there; leaves no gradients behind."""
    if mesh.device.type == "cuda":
        base, sample = _peak(model, compute, config, 1, mesh), 0
        if largest > 1:
            sample = _peak(model, compute, config, 2, mesh) - base
        free, _ = torch.cuda.mem_get_info(mesh.device)
        room = GPU_SHARE * (free + torch.cuda.memory_reserved(mesh.device)) - (base - sample)
    else:
        sample = _saved(model, compute, config, mesh)
        room = CPU_SHARE * _free_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fits = torch.tensor(max(1, min(largest, int(room / max(sample, 1)))), device=mesh.device)
    if mesh.world > 1:
        dist.all_reduce(fits, dist.ReduceOp.MIN)
    return fits.item()


def _forward(compute: nn.Module, config: TrainConfig, count: int, mesh: Mesh) -> torch.Tensor:
    ids = torch.zeros(count, config.seq_length, dtype=torch.long, device=mesh.device)
    return compute(ids, ids, torch.ones(ids.shape, device=mesh.device))


def _peak(model: nn.Module, compute: nn.Module, config: TrainConfig, count: int,
          mesh: Mesh) -> int:
    """Bytes on the GPU at the peak of a forward and a backward of `count` samples."""
    torch.cuda.reset_peak_memory_stats(mesh.device)
    zero.micro_batch(model, compute, first=True, last=True)
    _forward(compute, config, count, mesh).backward()
    model.zero_grad()
    return torch.cuda.max_memory_allocated(mesh.device)


def _saved(model: nn.Module, compute: nn.Module, config: TrainConfig, mesh: Mesh) -> int:
    """Bytes that autograd keeps of one sample, beside the weights."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    zero.refresh(model, compute)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        part = _forward(compute, config, 1, mesh)
    for weight in compute.parameters():
        kept.pop(zero.local(weight).untyped_storage().data_ptr(), None)
    del part
    zero.release(compute)
    return sum(kept.values())


def _free_memory() -> int:
    """Bytes that the kernel would give without swapping; 4 GB where it does not say."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 4 << 30


def _limit(out: Path) -> int | None:
    """What is left in the run directory by a run that was out of memory."""
    try:
        return int((out / "micro_batch_size").read_text())
    except (OSError, ValueError):
        return None


def halved(size: int, out: Path, mesh: Mesh) -> int:
    """After an out-of-memory at `size`.  Raises UsageError where the step cannot be repeated."""
    if size == 1:
        raise UsageError("--micro-batch-size 1: out of memory; take --recompute full, a larger --tp"
                         " or more data ranks")
    (out / "micro_batch_size").write_text(f"{size // 2}\n")
    if mesh.world > 1:
        raise UsageError(f"--micro-batch-size {size}: rank {mesh.rank} is out of memory; the same "
                         f"command goes on from the last checkpoint with {size // 2}, as noted in "
                         f"{out}/micro_batch_size")
    return size // 2
