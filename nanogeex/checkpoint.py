"""Training checkpoints that any (dp, tp) can load.

torch.distributed.checkpoint (DCP) saves pieces and can cut them anew, if it is told what each is a
piece of.  Ours are plain tensors; here, and only here, they are described as DTensors on a (tp, dp)
view of the ranks: cut by tp along the table's dimension, and each piece by dp along its rows.

      checkpoints/step-00000200/     __0_0.distcp ...  .metadata       DCP's: weights and moments
                                     meta.json                         step, samples, scaler, config

A checkpoint is written under another name, meta.json last, and renamed when it is whole.  There is
no random generator to save: weights and samples are functions of (seed, name) and (seed, k).

Tests: tests/test_checkpoint.py.
"""

import json
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from nanogeex.config import UsageError
from nanogeex.mesh import Mesh
from nanogeex.parameters import Split

MOMENTS = ("exp_avg", "exp_avg_sq")


def _described(pieces: dict[str, Tensor], prefix: str, table: dict[str, Split],
               mesh: Mesh) -> dict[str, Tensor]:
    """Pieces as parts of whole tensors, without a copy.  A world of one holds them whole."""
    if mesh.world == 1:
        return {prefix + name: tensor for name, tensor in pieces.items()}
    grid, described = mesh.tp_dp_mesh(), {}
    for name, tensor in pieces.items():
        shape, dim = table[name]
        cuts = [Replicate() if dim is None else Shard(dim), Shard(0)]
        stride = torch.empty(shape, device="meta").stride()
        described[prefix + name] = DTensor.from_local(
            tensor, grid, cuts, run_check=False, shape=torch.Size(shape), stride=stride)
    return described


def _state(shards: dict[str, Tensor], optimizer: torch.optim.Optimizer | None,
           table: dict[str, Split], mesh: Mesh) -> dict[str, Tensor]:
    state = _described(shards, "model.", table, mesh)
    for moment in MOMENTS if optimizer else ():
        pieces = {name: optimizer.state[tensor][moment] for name, tensor in shards.items()
                  if tensor in optimizer.state}
        state |= _described(pieces, f"optim.{moment}.", table, mesh)
    return state


def _set_steps(optimizer: torch.optim.Optimizer, steps: float) -> None:
    """How many steps Adam took; with the moments it would have, zero, where it took none yet."""
    for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        if tensor not in optimizer.state:
            optimizer.state[tensor] = {moment: torch.zeros_like(tensor) for moment in MOMENTS}
        optimizer.state[tensor]["step"] = torch.tensor(steps, device=tensor.device)


def save(directory: Path, meta: dict, shards: dict[str, Tensor], optimizer: torch.optim.Optimizer,
         table: dict[str, Split], mesh: Mesh) -> Path:
    """Write `directory`/step-..., by all ranks together.  `meta` holds the step and whatever else
    resuming needs; the number of steps that Adam took goes with it."""
    check_replicas(shards, table, mesh)
    final = directory / f"step-{meta['step']:08d}"
    temporary = directory / f"{final.name}.tmp"
    if mesh.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    first = optimizer.param_groups[0]["params"][0]
    if first not in optimizer.state:
        _set_steps(optimizer, 0.0)
    steps = optimizer.state[first]["step"].item()
    _barrier(mesh)
    _quietly(dcp.save, _state(shards, optimizer, table, mesh), temporary, mesh)
    if mesh.rank == 0:
        topology = {"dp": mesh.dp, "tp": mesh.tp}
        meta = meta | {"optimizer_steps": steps, "topology": topology, "torch": torch.__version__}
        with open(temporary / "meta.json", "w") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)        # the same step, from before a resume
        os.replace(temporary, final)
    _barrier(mesh)
    return final


def check_replicas(shards: dict[str, Tensor], table: dict[str, Split], mesh: Mesh) -> None:
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


def load(path: Path, shards: dict[str, Tensor], optimizer: torch.optim.Optimizer | None,
         table: dict[str, Split], mesh: Mesh) -> None:
    """Fill this rank's pieces in place, and its moments if an optimizer is given."""
    if optimizer:
        _set_steps(optimizer, read_meta(path)["optimizer_steps"])
    _quietly(dcp.load, _state(shards, optimizer, table, mesh), path, mesh)


def read_meta(path: Path) -> dict:
    """A checkpoint's meta.json.  Raises UsageError where there is none."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        meta["config"], meta["step"]
        return meta
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"checkpoint {path}: its meta.json cannot be read ({error}); give a "
                         "directory step-... of a run's checkpoints") from None


def newest(directory: Path) -> Path | None:
    """The whole checkpoint of the highest step, if there is one."""
    whole = directory.glob(f"step-{'[0-9]' * 8}/meta.json")
    return max((path.parent for path in whole), default=None)


def _quietly(call, state: dict[str, Tensor], path: Path, mesh: Mesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # "assuming a single process": in a world of one it is
        call(state, checkpoint_id=path, no_dist=mesh.world == 1)


def _barrier(mesh: Mesh) -> None:
    if mesh.world > 1:
        dist.barrier()
