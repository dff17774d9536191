"""Damage, full disks, signals, restarts: nothing is lost, and nothing damaged is believed."""

import fcntl
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanogeex import checkpoint, integrity, micro_batch
from nanogeex.checkpoint import SaveError, pieces, write
from nanogeex.config import UsageError
from nanogeex.mesh import Mesh
from nanogeex.optim import adamw
from nanogeex.saver import Saver
from tests.programs import ROOT, metrics, run
from tests.ranks import build, on_ranks, small_config
from tests.small_disk import small_disk
from tests.test_data import source
from tests.test_programs import SMALL, same


def tiny_save(mesh, folder, steps=(1, 2, 3), keep_last=9, background=False):
    """Checkpoints of these steps; what was said of them."""
    _, _, shards, table = build(small_config(), mesh)
    optimizer, said = adamw(shards, small_config()), []
    saver = Saver(folder, table, keep_last, background, mesh, said.append)
    for step in steps:
        saver.save(dict(step=step, config={}), shards, optimizer)
    saver.wait()
    return said


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Call:
    """Unpickled, it touches a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def hostile(path):
    """A pickle that calls, with a meta.json that agrees with it."""
    path.write_bytes(pickle.dumps(Call(path.parent.parent / "executed")))
    meta = integrity.read_meta(path.parent)
    meta["files"][path.name] = integrity.size_and_checksum(path)
    checksum = integrity.checksum_of_json(meta)
    (path.parent / "meta.json").write_text(json.dumps(meta | {"checksum": checksum}))


def hidden(path):
    """The same, and meta.json does not tell of it."""
    hostile(path)
    meta = integrity.read_meta(path.parent)
    meta["files"]["./.metadata"] = meta["files"].pop(".metadata")
    checksum = integrity.checksum_of_json(meta)
    (path.parent / "meta.json").write_text(json.dumps(meta | {"checksum": checksum}))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "hidden": (hidden, ".metadata", "./.metadata: No such file"),
    "pipe": (pipe, ".metadata", ".metadata: No such file"),
    "truncated": (truncate, "__1_0.distcp", "__1_0.distcp has"),
    "emptied": (lambda path: path.write_bytes(b""), "__1_0.distcp", "has 0 bytes of"),
    "flipped": (flip, "__1_0.distcp", "__1_0.distcp is not what was written"),
    "missing": (Path.unlink, "__1_0.distcp", "__1_0.distcp: No such file"),
    "metadata": (flip, ".metadata", ".metadata is not what was written"),
    "no meta": (Path.unlink, "meta.json", "meta.json cannot be read"),
    "meta cut": (truncate, "meta.json", "meta.json cannot be read"),
    "meta flipped": (lambda path: path.write_text(path.read_text().replace('p": 3', 'p": 4')),
                     "meta.json", "its checksum differs"),
    "hostile": (hostile, ".metadata", "it names pathlib.Path.touch" if sys.version_info < (3, 13)
                else "it names"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(tmp_path, name):
    """By 2 ranks that wrote it and, with the same words, by one and by three."""
    damage, file, says = DAMAGES[name]
    on_ranks(2, 1, tiny_save, tmp_path)
    damage(tmp_path / "step-00000003" / file)
    for world in (1, 3):
        found = on_ranks(world, 1, found_by, tmp_path)
        assert {path for path, _ in found} == {tmp_path / "step-00000002"}
        assert {tuple(said) for _, said in found} == {tuple(found[0][1])}
        assert len(found[0][1]) == 1 and says in found[0][1][0] and "00000003" in found[0][1][0]
    assert not (tmp_path / "executed").exists()


def found_by(mesh, folder):
    said = []
    return integrity.find(folder, mesh, said.append), said


def test_all_damaged_is_an_error(tmp_path):
    tiny_save(Mesh(), tmp_path)
    for path in tmp_path.glob("step-*/meta.json"):
        path.unlink()
    with pytest.raises(UsageError, match="none of its 3 checkpoints is whole"):
        integrity.find(tmp_path, Mesh(), print)


def test_a_checkpoint_under_another_steps_name(tmp_path):
    tiny_save(Mesh(), tmp_path)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000009")
    path, said = found_by(Mesh(), tmp_path)
    assert path.name == "step-00000003" and "it is of step 2" in said[0]


def test_a_checkpoint_without_permission(tmp_path, monkeypatch):
    tiny_save(Mesh(), tmp_path)
    true = integrity.size_and_checksum

    def refused(path):
        if "00000003" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return true(path)
    monkeypatch.setattr(integrity, "size_and_checksum", refused)
    path, said = found_by(Mesh(), tmp_path)
    assert path.name == "step-00000002" and ".metadata: Permission denied" in said[0]


@pytest.mark.parametrize("world, background", [(1, True), (2, True), (2, False)])
def test_the_last_are_kept(tmp_path, world, background):
    said = on_ranks(world, 1, tiny_save, tmp_path, (1, 2, 3, 4, 5), 2, background)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    assert said == [f"saved {tmp_path}/step-0000000{step}" for step in (1, 2, 3, 4, 5)]


def test_a_damaged_newer_one_does_not_push_out_what_is_whole(tmp_path):
    """Step 9 is damaged, 1 was resumed; saving 2 keeps 2."""
    tiny_save(Mesh(), tmp_path, (1, 9))
    truncate(tmp_path / "step-00000009/.metadata")
    tiny_save(Mesh(), tmp_path, (2,), 1)
    assert found_by(Mesh(), tmp_path)[0].name == "step-00000002"


def test_the_copy_is_what_training_had(tmp_path, monkeypatch):
    """Weights that change while they are written in the background are saved as they were."""
    _, _, shards, table = build(small_config(), Mesh())
    optimizer = adamw(shards, small_config())
    true, release = write, []

    def slow(*arguments):
        while not release:
            time.sleep(0.01)
        return true(*arguments)
    monkeypatch.setattr("nanogeex.checkpoint.write", slow)
    saver = Saver(tmp_path, table, 3, True, Mesh(), print)
    before = {name: shard.clone() for name, shard in shards.items()}
    saver.save(dict(step=1, config={}), shards, optimizer)
    for shard in shards.values():
        shard.zero_()
    release.append(True)
    assert saver.wait()
    _, _, loaded, _ = build(small_config(), Mesh())
    checkpoint.load(tmp_path / "step-00000001", loaded, None, table, Mesh())
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def full(mesh, folder, bad_rank):
    """A disk that fills under one rank, in the middle of writing."""
    _, _, shards, table = build(small_config(), mesh)
    optimizer, said = adamw(shards, small_config()), []
    saver = Saver(folder, table, 3, True, mesh, said.append)
    saver.save(dict(step=1, config={}), shards, optimizer)
    saver.wait()
    if mesh.rank == bad_rank:
        true = os.fsync

        def fsync(descriptor):
            raise OSError(28, "No space left on device")
        os.fsync = fsync
    saver.save(dict(step=2, config={}), shards, optimizer)
    good = saver.wait()
    if mesh.rank == bad_rank:
        os.fsync = true
    saver.save(dict(step=3, config={}), shards, optimizer)
    return good, saver.wait(), said


@pytest.mark.parametrize("world, bad_rank", [(1, 0), (3, 0), (3, 2)])
def test_a_disk_that_fills(tmp_path, world, bad_rank):
    for good, later, said in on_ranks(world, 1, full, tmp_path, bad_rank):
        assert not good and later and len(said) == 3
        assert "checkpoint of step 2 not written: " in said[1] and "MB are needed" in said[1]
        assert "No space left on device" in said[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_no_room_is_noticed_before_writing(tmp_path, monkeypatch):
    _, _, shards, table = build(small_config(), Mesh())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: os.terminal_size((1, 1)) and Usage())
    with pytest.raises(SaveError, match=r"no space left in .*, 0\.0 MB are free; 0\.2 MB are need"):
        write(tmp_path, dict(step=1, config={}), pieces(shards, None), table, 1, Mesh(), None)
    assert list(tmp_path.iterdir()) == []


class Usage:
    free = 1000


# Whole programs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Sources, and a run of 12 steps of them in one process."""
    folder = tmp_path_factory.mktemp("survival")
    (folder / "source").mkdir()
    for number in range(30):
        (folder / f"source/{number}.py").write_text(source(number))
    argv = [*SMALL, "--data", folder / "source", "--train-iters", 12, "--save-interval", 2]
    run("train.py", *argv, "--out", folder / "out")
    return folder / "out", ["--data", folder / "out/data", *argv[:len(SMALL)], *argv[-4:]]


def start(argv, out, ranks=1, torchrun=(), env=None):
    """train.py, begun."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}",
                    *(torchrun or ["--standalone"])]
    return subprocess.Popen(
        [*command, str(ROOT / "train.py"), *map(str, argv), "--out", str(out)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | (env or {}))


def wait_for_step(out, step, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "metrics.jsonl").exists() and max(metrics(out), default=0) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")


def test_killed_again_and_again(one, tmp_path):
    """tests/kill_loop.py does this 30 times."""
    out, argv = one
    for step in (1, 3, 6):
        process = start([*argv, "--seq-length", 64], tmp_path)
        wait_for_step(tmp_path, step, process)
        process.kill()
        process.wait()
    run("train.py", *argv, "--out", tmp_path)
    same(metrics(tmp_path), metrics(out), range(1, 13), 1e-12)


@pytest.mark.parametrize("number, ranks", [(signal.SIGTERM, 1), (signal.SIGUSR1, 2)])
def test_a_signal_saves_and_ends_orderly(one, tmp_path, number, ranks):
    """Sent to one rank of two, both stop at the same step."""
    out, argv = one
    argv = [*argv[:-4], "--train-iters", 100_000, "--save-interval", 100_000,
            "--eval-interval", 100_000]
    process = start(argv, tmp_path, ranks)
    wait_for_step(tmp_path, 3, process)
    target = process.pid
    if ranks > 1:
        target = int((tmp_path / "lock").read_text().split()[1])
    os.kill(target, number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    step = max(metrics(tmp_path))
    assert f"stopped at step {step} of 100000 by ['{number.name}']" in said
    assert integrity.find(tmp_path / "checkpoints", Mesh(), print).name == f"step-{step:08d}"


def test_the_second_signal_ends_at_once():
    code = ("import os, signal, time; from nanogeex.mesh import stop_signals\n"
            "seen = stop_signals()\n"
            "os.kill(os.getpid(), signal.SIGTERM); print(seen, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)")
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == "['SIGTERM']\n" and ended.returncode == -signal.SIGTERM


def test_ctrl_c_leaves_a_usable_run(one, tmp_path):
    out, argv = one
    process = start(argv[:-4] + ["--train-iters", 100_000, "--save-interval", 2], tmp_path)
    wait_for_step(tmp_path, 5, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    step = max(metrics(tmp_path)) + 2
    run("train.py", *argv[:-4], "--train-iters", step, "--out", tmp_path)
    assert sorted(metrics(tmp_path)) == list(range(1, step + 1))


def test_a_live_run_is_not_joined(one, tmp_path):
    _, argv = one
    with open(tmp_path / "lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        lock.write("process 12 on host\n")
        lock.flush()
        ended = run("train.py", *argv, "--out", tmp_path, check=False)
    assert ended.returncode == 2 and "process 12 on host is training there" in ended.stderr


def test_steps_that_are_not_finite_stop_the_run(one, tmp_path):
    _, argv = one
    ended = run("train.py", *argv, "--lr", "1e30", "--max-consecutive-skips", 3, "--out", tmp_path,
                check=False)
    assert ended.returncode == 2 and "--max-consecutive-skips 3: reached at step" in ended.stderr
    assert ended.stderr.count("skipped, loss") == 3


def test_a_full_disk(one, tmp_path):
    out, argv = one
    with small_disk(tmp_path / "disk", "3500k") as folder:
        ended = run("train.py", *argv, "--keep-last", 9, "--out", folder / "out", check=False)
        assert ended.returncode == 2, ended.stderr
        lines = ended.stderr.splitlines()
        assert any("not written" in line and "MB are needed" in line for line in lines)
        assert "the last checkpoint is not written, see above" in lines[-1]
        assert integrity.find(folder / "out/checkpoints", Mesh(), pytest.fail)
        assert not list((folder / "out/checkpoints").glob("*.tmp"))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_agents_that_come_and_go(one, tmp_path):
    """Agents of two ranks: one begins, one joins and is killed; the same curve as one process."""
    out, argv = one
    argv = [*argv[:-4], "--train-iters", 300, "--save-interval", 4, "--lr-decay-iters", 300]
    run("train.py", *argv, "--out", tmp_path / "one")
    elastic = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test",
               "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1",
               f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = start(argv, tmp_path / "two", 2, elastic, shared)
    wait_for_step(tmp_path / "two", 10, first)
    second = start(argv, tmp_path / "two", 2, elastic, shared)
    while "4" != topology(tmp_path / "two") and first.poll() is None:
        time.sleep(0.1)
    second.kill()
    second.communicate()
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 0, said
    worlds = re.findall(r"dp (\d) x tp 1|by \['(SIGTERM)'\]", said)
    assert worlds == [("2", ""), ("", "SIGTERM"), ("4", ""), ("2", "")], said
    same(metrics(tmp_path / "two"), metrics(tmp_path / "one"), range(1, 301), 1e-3)


def topology(out):
    """dp of the newest checkpoint."""
    newest = max(integrity.steps(out / "checkpoints"))
    return str(integrity.read_meta(newest)["topology"]["dp"])


def test_an_agent_that_is_killed(one, tmp_path):
    """torchrun as it comes; the survivor goes on with dp 2."""
    out, argv = one
    argv = [*argv[:-4], "--train-iters", 40, "--save-interval", 4, "--lr-decay-iters", 40]
    run("train.py", *argv, "--out", tmp_path / "one")
    port = free_port()
    elastic = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test",
               "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1",
               f"--rdzv-endpoint=127.0.0.1:{port}"]
    first = start(argv, tmp_path / "two", 2, elastic)
    while socket.socket().connect_ex(("127.0.0.1", port)):              # it hosts the rendezvous
        time.sleep(0.05)
    second = start(argv, tmp_path / "two", 2, elastic)
    wait_for_step(tmp_path / "two", 10, first)
    second.kill()
    second.communicate()
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 0, said
    assert "dp 4 x tp 1" in said and "dp 2 x tp 1" in said and "resuming" in said
    same(metrics(tmp_path / "two"), metrics(tmp_path / "one"), range(1, 41), 1e-5)


def test_a_rank_that_hangs_takes_the_others_down(one, tmp_path):
    """Without torchrun, which gives one that is stopped 30 seconds to end."""
    _, argv = one
    world = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    argv = [*argv[:-4], "--train-iters", 100_000, "--timeout", 5]
    ranks = [start(argv, tmp_path, env=world | {"RANK": str(rank)}) for rank in range(2)]
    wait_for_step(tmp_path, 3, ranks[0])
    ranks[0].send_signal(signal.SIGSTOP)
    said = ranks[1].communicate(timeout=20)[0]
    assert ranks[1].returncode == 1 and "rank 1 failed" in said
    ranks[0].kill()
    ranks[0].communicate()


# Micro-batches ----------------------------------------------------------------------------------


def automatic(mesh, free):
    config = small_config()
    model, compute, _, _ = build(config, mesh)
    micro_batch._free_memory = lambda: free[mesh.rank]
    size = micro_batch.auto(model, compute, config, 50, mesh)
    return size, all(weight.grad is None for weight in model.parameters())


def test_the_largest_micro_batch_that_fits(monkeypatch):
    sample = micro_batch._saved(*build(small_config(), Mesh())[:2], small_config(), Mesh())
    assert 30_000 < sample < 300_000
    for samples, expected in ((0, 1), (7.5, 7), (1000, 50)):
        free = {rank: 2 * sample * (samples + rank) for rank in range(2)}
        assert automatic(Mesh(), free) == (expected, True)
        assert on_ranks(2, 1, automatic, free) == [(expected, True)] * 2


def test_auto_gives_the_same_curve(one, tmp_path):
    out, argv = one
    run("train.py", *argv, "--micro-batch-size", "auto", "--out", tmp_path)
    same(metrics(tmp_path), metrics(out), range(1, 13), 1e-6)


OUT_OF_MEMORY = """
import sys
sys.path.insert(0, {root!r})
import torch, train
from nanogeex import zero
true, calls = zero.micro_batch, []

def micro_batch(*arguments, **keywords):
    calls.append(1)
    if len(calls) == 5:
        raise torch.OutOfMemoryError("planted")
    true(*arguments, **keywords)

zero.micro_batch = micro_batch
train.launch(train.main)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_out_of_memory(one, tmp_path, ranks):
    """Alone, the step is repeated; with others the job ends, and goes on with half."""
    out, argv = one
    argv = [*argv, "--micro-batch-size", 4, "--out", tmp_path / "out"]
    (tmp_path / "program.py").write_text(OUT_OF_MEMORY.format(root=str(ROOT)))
    ended = run(tmp_path / "program.py", *argv, ranks=ranks, check=False)
    if ranks == 1:
        assert "step 3: out of memory, again with micro-batches of 2" in ended.stderr
    else:
        assert ended.returncode != 0 and "--micro-batch-size 4: rank" in ended.stderr
        again = run("train.py", *argv, ranks=ranks)
        assert "micro-batches of at most 2, more was out of memory" in again.stderr
    same(metrics(tmp_path / "out"), metrics(out), range(1, 13), 1e-5)


def test_out_of_memory_with_one_sample(tmp_path):
    with pytest.raises(UsageError, match="--micro-batch-size 1: out of memory; take --recompute"):
        micro_batch.halved(1, tmp_path, Mesh())
