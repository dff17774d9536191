"""Training checkpoints: nothing is lost, and any (dp, tp) can load them.

torch.distributed.checkpoint (DCP) saves pieces and can cut them anew, if it is told what each is a
piece of.  Ours are plain tensors; here, and only here, they are described as DTensors on a (tp, dp)
view of the ranks: cut by tp along the table's dimension, and each piece by dp along its rows.

      checkpoints/step-00000200.tmp/   __0_0.distcp ... .metadata    1. DCP writes and fsyncs
                                       meta.json                     2. step, samples, config,
                                                                        checksums of the files
                  step-00000200/                                     3. renamed: now it is real
                  step-00000100/                                     4. all but the last N go

A crash at any moment leaves the older ones as they were; integrity.py finds the newest that is
whole.  There is no random generator to save: weights and samples are functions of (seed, name) and
(seed, k).

Tests: tests/test_checkpoint.py, tests/test_survival.py.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from nanogeex.integrity import checksum_of_json, read_meta, size_and_checksum, steps
from nanogeex.mesh import Mesh
from nanogeex.parameters import Split

MOMENTS = ("exp_avg", "exp_avg_sq")
Pieces = dict[str, Tensor]          # model.NAME, optim.MOMENT.NAME -> what this rank holds of it


class SaveError(Exception):
    """A checkpoint could not be written; older ones are intact.  One line, alike on all ranks."""


def pieces(shards: Pieces, optimizer: torch.optim.Optimizer | None) -> Pieces:
    """All that a checkpoint holds, by name: weights, and moments if there is an optimizer."""
    held = {f"model.{name}": tensor for name, tensor in shards.items()}
    for moment in MOMENTS if optimizer else ():
        held |= {f"optim.{moment}.{name}": optimizer.state[tensor][moment]
                 for name, tensor in shards.items() if tensor in optimizer.state}
    return held


def _parameter(key: str) -> str:
    return key.removeprefix("optim.").split(".", 1)[1]


def set_steps(optimizer: torch.optim.Optimizer, steps: float) -> None:
    """How many steps Adam took; with the moments it would have, zero, where it took none yet."""
    for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        if tensor not in optimizer.state:
            optimizer.state[tensor] = {moment: torch.zeros_like(tensor) for moment in MOMENTS}
        optimizer.state[tensor]["step"] = torch.tensor(steps, device=tensor.device)


def _described(held: Pieces, table: dict[str, Split], mesh: Mesh) -> Pieces:
    """Pieces as parts of whole tensors, without a copy.  A world of one holds them whole."""
    if mesh.world == 1:
        return held
    grid, described = mesh.tp_dp_mesh(next(iter(held.values())).device.type), {}
    for key, tensor in held.items():
        shape, dim = table[_parameter(key)]
        cuts = [Replicate() if dim is None else Shard(dim), Shard(0)]
        stride = torch.empty(shape, device="meta").stride()
        described[key] = DTensor.from_local(
            tensor, grid, cuts, run_check=False, shape=torch.Size(shape), stride=stride)
    return described


def write(directory: Path, meta: dict, held: Pieces, table: dict[str, Split], keep_last: int,
          mesh: Mesh, group: dist.ProcessGroup | None) -> Path:
    """Write `directory`/step-..., by all ranks together, and leave the last `keep_last` there.
    `meta`: the step and whatever else resuming needs.  `group`: gloo, over all ranks, for nothing
    else.  Raises SaveError on all ranks if one cannot write; then no trace is left."""
    final = directory / f"step-{meta['step']:08d}"
    temporary = directory / f"{final.name}.tmp"
    needed = sum(4 * math.prod(table[_parameter(key)].shape) for key in held)      # whole, fp32

    def make_room():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < needed:
            raise OSError(f"no space left in {directory}, {free / 1e6:,.1f} MB are free")

    def publish(files: dict[str, list[int]]):
        content = meta | {"files": files, "topology": {"dp": mesh.dp, "tp": mesh.tp},
                          "torch": torch.__version__}
        with open(temporary / "meta.json", "w") as file:
            json.dump(content | {"checksum": checksum_of_json(content)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _fsync(temporary)
        replaced = final.with_suffix(".old")        # the same step, from before a resume
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(final, replaced)
        os.replace(temporary, final)
        _fsync(directory)
        older = sorted(path for path in steps(directory) if path <= final)[:-keep_last]
        for path in [*older, replaced]:
            shutil.rmtree(path, ignore_errors=True)

    mine = [f"__{mesh.rank}_*"] + [".metadata"] * (mesh.rank == 0)          # DCP's names
    try:
        _all_or_none(make_room, mesh.rank == 0, group)
        _quietly(dcp.save, _described(held, table, mesh), temporary, mesh, group)
        summed = _all_or_none(lambda: {
            path.name: size_and_checksum(path)
            for pattern in mine for path in temporary.glob(pattern)}, True, group)
        files = {name: entry for part in summed for name, entry in part.items()}
        _all_or_none(lambda: publish(files), mesh.rank == 0, group)
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise SaveError(f"checkpoint of step {meta['step']} not written: {_cause(error)}; "
                        f"{needed / 1e6:,.1f} MB are needed; older checkpoints are intact"
                        ) from error
    return final


def _all_or_none(work: Callable[[], Any], here: bool, group: dist.ProcessGroup | None) -> list:
    """work() on the ranks where `here`; every rank's value on all of them, or OSError on all."""
    value, error = None, None
    try:
        value = work() if here else None
    except OSError as mistake:
        error = str(mistake)
    outcomes = [(value, error)]
    if group is not None:
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (value, error), group=group)
    for _, error in outcomes:
        if error:
            raise OSError(error)
    return [value for value, _ in outcomes]


def _cause(error: BaseException) -> str:
    """The failure itself, of what DCP wraps up for all ranks."""
    if isinstance(error, dcp.CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {error}"
    return str(error)


def check_replicas(shards: Pieces, table: dict[str, Split], mesh: Mesh) -> None:
    """What all tp ranks hold must be the same bits on all of them: compared by sums of the bits.
    Raises RuntimeError, on all ranks of the world, with the name of the first that is not."""
    if mesh.tp == 1:
        return
    names = [name for name in shards if table[name].dim is None]
    sums = torch.stack([shards[name].view(torch.int32).sum(dtype=torch.int64) for name in names])
    most = torch.cat([sums, -sums])                                     # largest, and -smallest
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.tp_group)
    differs = most.view(2, -1).sum(0).abs()                             # largest - smallest
    dist.all_reduce(differs, dist.ReduceOp.MAX)                         # over all data ranks
    for name, by in zip(names, differs.tolist(), strict=True):
        if by:
            raise RuntimeError(f"{name}: not the same on all tp ranks of a data rank; nothing is "
                               "saved, resume the last checkpoint")


def load(path: Path, shards: Pieces, optimizer: torch.optim.Optimizer | None,
         table: dict[str, Split], mesh: Mesh) -> None:
    """Fill this rank's pieces in place, and its moments if an optimizer is given.  `path` is one
    that find() gave."""
    if optimizer:
        set_steps(optimizer, read_meta(path)["optimizer_steps"])
    _quietly(dcp.load, _described(pieces(shards, optimizer), table, mesh), path, mesh, None)


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _quietly(call: Callable, state: Pieces, path: Path, mesh: Mesh,
             group: dist.ProcessGroup | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # "assuming a single process": in a world of one it is
        call(state, checkpoint_id=path, no_dist=mesh.world == 1, process_group=group)
