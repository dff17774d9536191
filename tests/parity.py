"""One curve at every topology: `python -m tests.parity` trains the same small model at each.

Prints, against one process in the same precision, the largest difference of a step's loss, of its
gradient norm (relative) and of a final weight.  train.py itself runs, in forked processes.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing

import train
from nanogeex import checkpoint, data
from nanogeex.command_line import parse
from nanogeex.config import TrainConfig
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX
from nanogeex.parameters import split_table
from tests.programs import metrics

TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (1, 8), (3, 1), (3, 2)]
SHAPE = ["--hidden-size", "64", "--seq-length", "64", "--vocab-size", "1000", "--lr", "2e-3",
         "--global-batch-size", "7", "--micro-batch-size", "2", "--eval-iters", "1"]


def rank_runs(rank: int, world: int, port: int, argv: list[str], log: str) -> None:
    torch.set_num_threads(1)                # first: a forked OpenMP pool can hang
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open(log, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["train.py", *argv]
    train.launch(train.main)


def run(dp: int, tp: int, argv: list[str], out: Path) -> tuple[dict, dict]:
    """A run's metrics by step, and its final weights, whole."""
    argv = [*argv, "--tp", str(tp), "--out", str(out)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, log = torch.multiprocessing.get_context("fork"), f"{out}.log"
    ranks = [context.Process(target=rank_runs, args=(rank, dp * tp, port, argv, log))
             for rank in range(dp * tp)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"dp {dp} x tp {tp} failed:\n{Path(log).read_text()}")
    model = CodeGeeX(parse(TrainConfig, argv[:-4], ""), Mesh()).requires_grad_(False)
    weights = dict(model.named_parameters())
    path = checkpoint.newest(out / "checkpoints")
    checkpoint.load(path, weights, None, split_table(model), Mesh())
    return metrics(out), weights


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"])
    options = options.parse_args()
    began = time.time()
    print(f"{options.steps} steps")
    print("precision  dp x tp   max |d loss|   max d norm   max |d weight|, in")
    with tempfile.TemporaryDirectory() as folder:
        prepared = data.prepare(None, Path(folder) / "data", 1000, 0)
        for precision in options.precisions:
            argv = [*SHAPE, "--train-iters", str(options.steps), "--data", str(prepared),
                    "--precision", precision]
            for dp, tp in TOPOLOGIES:
                records, weights = run(dp, tp, argv, Path(folder) / f"{precision}-{dp}-{tp}")
                if (dp, tp) == (1, 1):
                    true, true_weights = records, weights
                loss = max(abs(records[step]["loss"] - true[step]["loss"]) for step in true)
                norm = max(abs(records[step]["grad_norm"] / true[step]["grad_norm"] - 1)
                           for step in true)
                weight, name = max(((weights[name] - true_weights[name]).abs().max().item(), name)
                                   for name in weights)
                print(f"{precision:<10} {dp} x {tp}     {loss:12.1e}   {norm:10.1e}   "
                      f"{weight:14.1e} {name}", flush=True)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
