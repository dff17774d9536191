"""Process groups: who works with whom.

A world of dp x tp ranks is a grid.  A row shares one model (tensor parallelism), a column holds the
same slice of it and shares the batch (data parallelism):

                  tp_rank 0    1         rank = dp_rank * tp + tp_rank.  tp is innermost, so that a
      dp_rank 0        [ 0     1 ]       row, which talks in every layer, stays in one node;
              1        [ 2     3 ]       columns talk less, beside compute.

torchrun tells each process its rank through the environment.  Without it there is one process: no
group is made, and every collective in this package is left out.

Tests: tests/test_mesh.py, tests/test_errors.py.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nanogeex.config import UsageError


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid, and its groups: None in a world of one."""

    rank: int = 0
    dp: int = 1
    tp: int = 1
    device: torch.device = torch.device("cpu")
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    store: dist.Store | None = None

    @property
    def world(self) -> int:
        return self.dp * self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.world > 1 else None

    @cached_property
    def dp_mesh(self) -> DeviceMesh:
        """This rank's column, as FSDP2 asks for it."""
        return DeviceMesh.from_group(self.dp_group, self.device.type, mesh_dim_names=("dp",))

    def tp_dp_mesh(self, device_type: str) -> DeviceMesh:
        """The grid with tp outermost, as checkpoints ask for it: cut by tp, and each cut by dp."""
        ranks = torch.arange(self.world).view(self.dp, self.tp).T.contiguous()
        return DeviceMesh.from_group([self.tp_group, self.dp_group], device_type, mesh=ranks,
                                     mesh_dim_names=("tp", "dp"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def pick_device(name: str) -> torch.device:
    """auto, cpu or cuda -> this process's device.  Raises UsageError for CUDA that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device here; take --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, devices = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= devices:
        raise UsageError(f"--nproc_per_node {local_rank + 1} or more: this node has {devices} CUDA "
                         "devices; start one process a device")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def keep_freed_memory() -> None:
    """glibc gives a large buffer back to the kernel when it is freed, and getting it again costs
    page faults: 9 to 15% of a small training step on a CPU.  Tell it to keep them."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):           # not glibc
        return
    mallopt(-4, 0)                              # M_MMAP_MAX: allocate from the heap
    mallopt(-1, 2**31 - 1)                      # M_TRIM_THRESHOLD: and do not shrink it


def share_cores() -> None:
    """torchrun gives each of several ranks one thread, if OMP_NUM_THREADS does not say otherwise.
    Ranks on CPUs are better off with all cores between them."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks > 1 and os.environ.get("OMP_NUM_THREADS") == "1" and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def init_mesh(tp: int, device: torch.device, timeout: float, init_method: str = "env://") -> Mesh:
    """Join the world and make this rank's groups.  `timeout`, in seconds, holds for every group:
    new ones do not inherit it.  Raises UsageError if tp does not divide the world."""
    world, rank = world_size(), int(os.environ.get("RANK", 0))
    if world % tp:
        raise UsageError(f"--tensor-model-parallel-size {tp}: does not divide the {world} ranks of "
                         f"this job; start a multiple of {tp}, or choose another --tp")
    if world == 1:
        return Mesh(device=device)
    if device.type == "cpu":
        share_cores()
    limit = timedelta(seconds=timeout)
    try:
        store, rank, world = next(dist.rendezvous(init_method, rank, world, timeout=limit))
    except ValueError as error:
        raise UsageError(f"WORLD_SIZE {world}: {error}; start the ranks with torchrun") from None
    store = dist.PrefixStore(name_of_attempt(store, rank, world, timeout), store)
    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.PrefixStore("world", store),
                            rank=rank, world_size=world, timeout=limit,
                            device_id=device if cuda else None)
    ranks = torch.arange(world).view(world // tp, tp)
    tp_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)      # rows
    dp_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=limit)    # columns
    if not cuda:
        dist.barrier()              # gloo: a rank that ends before all are connected fails the rest
    return Mesh(rank, world // tp, tp, device, tp_group, dp_group, store)


def name_of_attempt(store: dist.Store, rank: int, world: int, timeout: float) -> str:
    """A name that the ranks of this attempt share and that no earlier one had.  torchrun's store
    outlives workers that it starts anew, and what the dead ones left in it must not be taken for
    news; nothing that torchrun tells a worker numbers the attempts.

    Every rank says hello with a fresh id; rank 0 offers a fresh name and the ids that it read; who
    finds his own accepts.  An id that a dead rank left is never accepted, and rank 0 reads again
    until all have."""
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    ranks, offer = [f"hello/{other}" for other in range(world)], None
    store.set(ranks[rank], mine)
    while time.monotonic() < deadline:
        if rank == 0:
            hellos = [hello.decode() for hello in store.multi_get(ranks)]
            if offer is None or hellos != offer["hellos"]:
                offer = {"name": uuid.uuid4().hex, "hellos": hellos}
                store.set("offer", json.dumps(offer))
        else:
            offer = json.loads(store.get("offer"))
        if offer["hellos"][rank:rank + 1] == [mine]:            # else an earlier attempt's
            store.set(f"accepted/{offer['name']}/{rank}", "")
            if store.check([f"accepted/{offer['name']}/{other}" for other in range(world)]):
                return offer["name"]
        time.sleep(0.02)
    raise TimeoutError(f"rank {rank}: not all {world} ranks of the job have come within --timeout "
                       f"{timeout:g} seconds")


def none_can_join() -> bool:
    """Whether torchrun may restart this job, but keeps the first round's store: see README."""
    return (os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def end_with_parent() -> None:
    """Be killed when the process that started this one ends: a killed torchrun would leave its
    workers behind, in the way of those that take their place.  Linux only; elsewhere they stay."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)          # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        pass


def stop_signals() -> list[str]:
    """SIGTERM and SIGUSR1 no longer end the process: their names are put into the returned list,
    for the training loop to see.  A second one ends it at once; so does Ctrl-C, which as an
    exception could be lost in a callback from C++."""
    seen: list[str] = []

    def note(number, frame):
        seen.append(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    return seen


def on_rank0(mesh: Mesh, what: str, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 alone and give its value, which JSON can write, to all ranks.  Its
    UsageError is raised on all of them.  The others wait, however long it takes, outside any
    collective and so outside any timeout.  `what` names the call, and is used once in a run."""
    key = f"on_rank0/{what}"
    if mesh.rank == 0:
        try:
            outcome = {"value": work()}
        except UsageError as mistake:
            outcome = {"error": str(mistake)}
        if mesh.store is not None:
            mesh.store.set(key, json.dumps(outcome))
    else:
        while not mesh.store.check([key]):
            time.sleep(min(0.01 * mesh.world, 2.0))         # one store answers all
        outcome = json.loads(mesh.store.get(key))
    if "error" in outcome:
        raise UsageError(outcome["error"])
    return outcome["value"]


def all_reduce_sum(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over a group, in place; None is a group of one."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def launch(main: Callable[[list[str]], None]) -> None:
    """Run an entry point.  Exit code 0: done; 2: a user's mistake, one line, from rank 0; 1: any
    other failure, its traceback from the rank that had it; 130: Ctrl-C.  A process that fails
    leaves at once, without teardown: no collective that waits for a dead peer can keep it here."""
    code, rank = 1, int(os.environ.get("RANK", 0))
    try:
        if torch.__version__ < "2.11":          # TorchVersion compares as versions do
            raise UsageError(f"torch {torch.__version__}: 2.11 or newer is needed; "
                             "pip install -r requirements.txt")
        main(sys.argv[1:])
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    except UsageError as mistake:
        code = 2
        if rank > 0:            # torchrun ends all when the first one leaves: let rank 0 be the one
            time.sleep(5)       # that speaks; who is still here has a mistake of its own
        print(f"{os.path.basename(sys.argv[0])}: {mistake}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:                     # `| head` has read enough
        os._exit(141)
    except SystemExit as leave:                 # argparse's --help
        code = leave.code or 0
    except BaseException:                       # DCP's CheckpointException is no Exception
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
