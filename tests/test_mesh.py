"""The grid, its groups, and waiting for rank 0."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nanogeex.config import UsageError
from nanogeex.mesh import Mesh, init_mesh, name_of_attempt, on_rank0, pick_device, share_cores
from tests.ranks import on_ranks


def neighbours(mesh):
    found = [mesh.rank, mesh.dp_rank, mesh.tp_rank]
    for group in (mesh.dp_group, mesh.tp_group):
        found.append(dist.get_process_group_ranks(group))
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(seconds=60)            # new groups do not inherit it
    assert mesh.dp_mesh.mesh.tolist() == found[3]
    assert mesh.tp_dp_mesh("cpu").mesh.tolist() == [[0, 2, 4], [1, 3, 5]]
    return found


def test_tp_is_innermost():
    assert on_ranks(6, 2, neighbours) == [
        [0, 0, 0, [0, 2, 4], [0, 1]], [1, 0, 1, [1, 3, 5], [0, 1]], [2, 1, 0, [0, 2, 4], [2, 3]],
        [3, 1, 1, [1, 3, 5], [2, 3]], [4, 2, 0, [0, 2, 4], [4, 5]], [5, 2, 1, [1, 3, 5], [4, 5]]]


def test_one_process_needs_no_group():
    mesh = init_mesh(1, torch.device("cpu"), 60)
    assert mesh == Mesh() and not dist.is_initialized()


def test_world_that_tp_does_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="3: does not divide the 4 ranks of this job"):
        init_mesh(3, torch.device("cpu"), 60)


def test_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="--device cuda"):
        pick_device("cuda")


def wait(mesh):
    """The collectives' timeout is shorter than the work of rank 0."""
    def slow():
        time.sleep(3)
        return {"made": [1, "two"]}
    return on_rank0(mesh, "slow", slow), on_rank0(mesh, "fast", lambda: mesh.rank)


def test_attempts_have_names_of_their_own():
    """One store sees several worlds; what earlier ones left in it misleads nobody."""
    server, seen = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), set()
    for world in (4, 2, 3, 2, 8, 2):
        names = [None] * world

        def join(rank, names=names, world=world):
            store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
            time.sleep(0.05 * (rank * 7 % 5))
            names[rank] = name_of_attempt(store, rank, world, 30)

        ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(set(names)) == 1 and names[0] and names[0] not in seen
        seen.add(names[0])


def test_all_get_the_value_of_rank0():
    assert on_ranks(3, 1, wait) == [({"made": [1, "two"]}, 0)] * 3
    assert on_rank0(Mesh(), "alone", lambda: 5) == 5


def mistaken(mesh):
    def work():
        raise UsageError("--data nowhere: not there")
    with pytest.raises(UsageError) as mistake:
        on_rank0(mesh, "mistaken", work)
    return str(mistake.value)


def test_all_get_the_mistake_of_rank0():
    assert on_ranks(3, 1, mistaken) == ["--data nowhere: not there"] * 3


@pytest.mark.parametrize("body, code, says", [
    ("return", 0, ""), ("raise UsageError('--x 1: wrong')", 2, "--x 1: wrong"),
    ("raise KeyboardInterrupt", 130, ""), ("raise BaseException('odd')", 1, "BaseException: odd")])
def test_exit_codes(body, code, says):
    script = ("from nanogeex.mesh import launch\nfrom nanogeex.config import UsageError\n"
              f"def main(argv):\n    {body}\nlaunch(main)")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == code and says in ended.stderr
    assert code != 2 or ended.stderr == "-c: --x 1: wrong\n"


@pytest.mark.parametrize("ranks, told, threads", [
    ("2", "1", 4), ("16", "1", 1), ("2", "3", None), ("1", "1", None), (None, None, None)])
def test_ranks_of_a_machine_share_its_cores(monkeypatch, ranks, told, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, value in (("LOCAL_WORLD_SIZE", ranks), ("OMP_NUM_THREADS", told)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    share_cores()
    assert asked == ([threads] if threads else [])
