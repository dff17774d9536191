"""Bad input: one line that names field, value and remedy, exit code 2; on one rank and on four."""

import os

import pytest

from tests.programs import run
from tests.test_data import source

CASES = {
    "tp": (["--tp", "3"], "--tensor-model-parallel-size 3: does not divide"),
    "flag": (["--hiden-size", "64"], "--hiden-size: no such flag"),
    "preset": (["--preset", "huge"], "--preset huge: unknown"),
    "missing": (["--data", "nowhere"], "--data nowhere: no such file or folder"),
    "unusable": (["--data", "empty"], "--data empty: no usable document in 1 files (1 under 1 KB)"),
    "short": (["--data", "short", "--seq-length", "4096", "--vocab-size", "400"], "fewer than one"),
    "seq_length": (["--seq-length", "0"], "--seq-length 0: must be 1 or more"),
    "lr": (["--lr", "-1"], "--lr -1.0: must be above 0"),
    "batch": (["--global-batch-size", "0"], "--global-batch-size 0: must be 1 or more"),
    "shape": (["--data", "short", "--resume", "run", "--hidden-size", "128"],
              "--hidden-size 128: the checkpoint run/checkpoints/step-00000000 has 64; give 64"),
    "resume none": (["--data", "short", "--out", "run", "--resume", "none"],
                    "--resume none: run/checkpoints/step-00000000 is there"),
    "resume": (["--data", "short", "--resume", "nowhere"], "nowhere: its meta.json cannot be read"),
    "out": (["--data", "short", "--out", "short/0.py"],
            "short/0.py/checkpoints: Not a directory; give an --out that can be written"),
    "late": (["--data", "short", "--out", "late"],
             "late/checkpoints: File exists; give an --out that can be written"),
}
SMALL = ["--seq-length", "32", "--vocab-size", "400"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    (folder / "empty").mkdir()
    (folder / "empty/a.py").write_text("x = 1\n")
    (folder / "short").mkdir()
    for number in range(2):
        (folder / f"short/{number}.py").write_text(source(number))
    (folder / "late").mkdir()
    (folder / "late/checkpoints").write_text("in the way")
    run("train.py", *SMALL, "--data", "short", "--hidden-size", "64", "--train-iters", "0",
        "--out", "run", cwd=folder)
    return folder


def check(ended, says, program="train.py"):
    assert ended.returncode != 0 and ended.stdout == ""
    lines = [line for line in ended.stderr.splitlines() if line.startswith(f"{program}: ")]
    assert len(lines) == 1 and says in lines[0], ended.stderr
    return lines[0]


@pytest.mark.parametrize("name", CASES)
def test_train_in_one_process(folder, name):
    argv, says = CASES[name]
    small = SMALL if name in ("shape", "resume none") else []
    ended = run("train.py", *small, *argv, cwd=folder, check=False)
    assert ended.returncode == 2
    assert ended.stderr == check(ended, says) + "\n"


@pytest.mark.parametrize("name", ["tp", "missing", "short", "shape"])
def test_train_on_four(folder, name):
    argv, says = CASES[name]
    small = SMALL if name == "shape" else []
    check(run("train.py", *small, *argv, ranks=4, cwd=folder, check=False), says)


@pytest.mark.parametrize("argv, says", [
    (["--load", "nowhere"], "nowhere: no released file"),
    (["--load", "run", "--prompt", "x" * 200], "prompt 1: "),
    (["--load", "run", "--out-seq-length", "-1"], "--out-seq-length -1: must be 0 or more"),
    (["--load", "run", "--num-samples", "0"], "--num-samples 0: must be 1 or more"),
    (["--load", "run", "--top-k", "-1"], "--top-k -1: must be 0 or more"),
    (["--load", "run", "--stop", ""], "--stop: empty"),
    (["--load", "run", "--prompt", "x", "--prompt-file", "y"], "--prompt-file: --prompt is there"),
    (["--load", "run", "--prompt", "x", "--output", "no/f"], "--output no/f: No such file"),
    (["--load", "run", "--temperature", "-1"], "--temperature -1.0: must be 0 or more"),
    (["--load", "run", "--top-p", "2"], "--top-p 2.0: must be 1 or less"),
    (["--load", "run", "--tp", "2"], "--tensor-model-parallel-size 2: all 1 ranks")])
def test_infer(folder, argv, says):
    ended = run("infer.py", *argv, cwd=folder, check=False)
    assert ended.returncode == 2
    check(ended, says, "infer.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensorboard_that_is_not_installed(folder, ranks):
    (folder / "none").mkdir(exist_ok=True)
    (folder / "none/tensorboard.py").write_text("raise ImportError")
    ended = run("train.py", "--tensorboard-dir", "board", "--out", "new", ranks=ranks, cwd=folder,
                check=False, env=os.environ | {"PYTHONPATH": str(folder / "none")})
    check(ended, "--tensorboard-dir board: tensorboard is not installed; pip install tensorboard")
    assert not (folder / "new").exists()


def test_going_back_within_a_run_is_refused(folder):
    argv = [*SMALL, "--data", "short", "--hidden-size", "64", "--out", "back"]
    run("train.py", *argv, "--train-iters", "2", "--save-interval", "1", cwd=folder)
    first = "back/checkpoints/step-00000001"
    ended = run("train.py", *argv, "--resume", first, cwd=folder, check=False)
    check(ended, f"--resume {first}: --out back has a checkpoint of its own")


@pytest.mark.parametrize("ranks", [1, 2])
def test_compile_without_a_compiler(folder, ranks):
    ended = run("train.py", "--compile", "--out", "new", ranks=ranks, cwd=folder, check=False,
                env=os.environ | {"PATH": ""})
    check(ended, "--compile: finds no C++ compiler; install g++, or leave it out")
    assert not (folder / "new").exists()


def test_ranks_without_torchrun(folder):
    alone = os.environ | {"WORLD_SIZE": "2", "RANK": "0"}
    ended = run("train.py", cwd=folder, check=False, env=alone)
    check(ended, "WORLD_SIZE 2: ")


def test_infer_on_two(folder):
    argv = ["--load", "run", "--prompt", "x" * 200]
    ended = run("infer.py", *argv, ranks=2, cwd=folder, check=False)
    check(ended, "the context holds 32", "infer.py")


def test_infer_input_that_is_not_text(folder):
    ended = run("infer.py", "--load", "run", cwd=folder, check=False, input="caf\udce9",
                encoding="utf-8", errors="surrogateescape")
    check(ended, "standard input: not UTF-8", "infer.py")
