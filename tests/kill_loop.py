"""Kill a run again and again: `python -m tests.kill_loop` prints what each `kill -9` cost, and
whether final weights and metrics equal an undisturbed run's, bit for bit."""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from nanogeex import checkpoint, data, integrity
from nanogeex.command_line import parse
from nanogeex.config import TrainConfig
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX
from nanogeex.parameters import split_table
from tests.programs import ROOT, metrics

FLAGS = ["--hidden-size", "64", "--seq-length", "64", "--vocab-size", "1000",
         "--global-batch-size", "8", "--precision", "fp32", "--save-interval", "5",
         "--eval-interval", "1000000", "--eval-iters", "1"]
# Of a killed run, in its records: the last loss may be missing, if the kill came before it.
UNLIKE = ("tokens_per_s", "step_s", "mem_gb", "restart", "val_loss")


def begin(argv: list[str], out: Path, ranks: int) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train.py")]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    log = open(f"{out}.log", "a")
    return subprocess.Popen([*command, *argv, "--out", str(out)], stdout=log, stderr=log)


def last_step(out: Path) -> int:
    return max(metrics(out), default=0) if (out / "metrics.jsonl").exists() else 0


def weights(argv: list[str], out: Path) -> dict[str, torch.Tensor]:
    model = CodeGeeX(parse(TrainConfig, argv, ""), Mesh()).requires_grad_(False)
    held = dict(model.named_parameters())
    path = integrity.find(out / "checkpoints", Mesh(), print)
    checkpoint.load(path, held, None, split_table(model), Mesh())
    return held


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    options = options.parse_args()
    pick = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder, kills, while_saving = Path(folder), 0, 0
        prepared = data.prepare(None, folder / "data", 1000, 0)
        argv = [*FLAGS, "--data", str(prepared), "--train-iters", str(options.steps)]
        assert begin(argv, folder / "undisturbed", options.ranks).wait() == 0
        out = folder / "killed"
        process = begin(argv, out, options.ranks)
        while kills < options.kills and process.poll() is None:
            before = last_step(out)
            while last_step(out) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(pick.uniform(0, 1.0))
            if process.poll() is None:
                process.kill()
                process.wait()
                kills += 1
                torn = list((out / "checkpoints").glob("*.tmp"))
                while_saving += bool(torn)
                time.sleep(0.2 if options.ranks == 1 else 2)        # its ranks see that it is gone
                saved = max(integrity.steps(out / "checkpoints"), default=None)
                print(f"kill {kills}: at step {last_step(out)}, goes on from "
                      f"{saved.name if saved else 'the start'}{', was saving' if torn else ''}",
                      flush=True)
                process = begin(argv, out, options.ranks)
        assert process.wait() == 0, Path(f"{out}.log").read_text()
        mine, true = metrics(out), metrics(folder / "undisturbed")
        same = {step: {key: value for key, value in record.items() if key not in UNLIKE}
                for step, record in mine.items()} == {
            step: {key: value for key, value in record.items() if key not in UNLIKE}
            for step, record in true.items()}
        mine, true = weights(argv, out), weights(argv, folder / "undisturbed")
        equal = all(torch.equal(mine[name], true[name]) for name in true)
        print(f"{kills} kills, {while_saving} of them in a save | metrics equal: {same} | final "
              f"weights equal: {equal}")
        sys.exit(not (same and equal))


if __name__ == "__main__":
    main()
