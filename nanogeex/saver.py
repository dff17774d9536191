"""Saving without stopping: training waits for a copy in memory, a thread writes it.

      step 200 | copy | 201  202  203 ...                     the ranks' training
                      | write, fsync, check, rename |         their threads, over a group of gloo's

The thread must not share a process group with training: collectives of the two would meet in any
order.  A save that fails is said at once and training goes on, towards the next; only the last save
of a run has to succeed.

Tests: tests/test_survival.py.  Measured: benchmarks/saving.py.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nanogeex import checkpoint
from nanogeex.mesh import Mesh
from nanogeex.parameters import Split


class Saver:
    """Writes checkpoints below `directory`, one at a time, in the background or before it returns.
    `say` hears of each that is done, and of each that failed."""

    def __init__(self, directory: Path, table: dict[str, Split], keep_last: int, background: bool,
                 mesh: Mesh, say: Callable[[str], None]):
        self.directory, self.table, self.keep_last, self.mesh = directory, table, keep_last, mesh
        self.background, self.say = background, say
        self.copies: checkpoint.Pieces = {}
        self.thread: threading.Thread | None = None
        self.outcome: Path | BaseException | None = None
        self.group = None           # disks may be slow: not the timeout of training's collectives
        if mesh.world > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))

    def save(self, meta: dict, shards: checkpoint.Pieces, optimizer: torch.optim.Optimizer) -> None:
        """Begin to save this step; waits for the save before it, if that is still being written."""
        self.wait()
        checkpoint.check_replicas(shards, self.table, self.mesh)
        first = optimizer.param_groups[0]["params"][0]
        if first not in optimizer.state:
            checkpoint.set_steps(optimizer, 0.0)
        meta = meta | {"optimizer_steps": optimizer.state[first]["step"].item()}
        held = checkpoint.pieces(shards, optimizer)
        if self.background:
            held = self._copied(held)
        self.thread = threading.Thread(target=self._write, args=(meta, held), daemon=True)
        self.thread.start()
        if not self.background:
            self.wait()

    def _copied(self, held: checkpoint.Pieces) -> checkpoint.Pieces:
        on_gpu = self.mesh.device.type == "cuda"
        for key, tensor in held.items():
            if key not in self.copies:              # kept from save to save: new pages cost more
                self.copies[key] = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
            self.copies[key].copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return self.copies

    def _write(self, meta: dict, held: checkpoint.Pieces) -> None:
        try:
            self.outcome = checkpoint.write(self.directory, meta, held, self.table, self.keep_last,
                                            self.mesh, self.group)
        except BaseException as error:
            self.outcome = error

    def poll(self) -> None:
        """Say how a save ended, if one did."""
        if self.thread and not self.thread.is_alive():
            self.wait()

    def wait(self) -> bool:
        """Wait for the save that is being written; False if the last one failed."""
        if self.thread:
            self.thread.join()
            self.thread = None
            if isinstance(self.outcome, BaseException):
                if not isinstance(self.outcome, checkpoint.SaveError):
                    raise self.outcome              # a dead peer, or a mistake of ours
                self.say(str(self.outcome))
            else:
                self.say(f"saved {self.outcome}")
        return not isinstance(self.outcome, BaseException)
