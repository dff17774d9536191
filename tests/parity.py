"""One curve at every topology: `python -m tests.parity` trains the same small model at each.

Prints, against one process in the same precision, the largest difference of a step's loss, of its
gradient norm (relative) and of a final weight.  train.py itself runs, in forked processes; flags
that are not this tool's are handed to it.
"""

import argparse
import os
import re
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing

import train
from nanogeex import checkpoint, data, integrity
from nanogeex.command_line import parse
from nanogeex.config import TrainConfig
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX
from nanogeex.parameters import split_table
from tests.programs import metrics

TOPOLOGIES = ["2x1", "1x2", "2x2", "4x1", "1x4", "1x8", "3x1", "3x2", "2x4sp",
              "2x2spz3"]
SHAPE = ["--hidden-size", "64", "--seq-length", "64", "--vocab-size", "1000", "--lr", "2e-3",
         "--global-batch-size", "7", "--micro-batch-size", "3", "--eval-iters", "1"]


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
    path = integrity.find(out / "checkpoints", Mesh(), print)
    checkpoint.load(path, weights, None, split_table(model), Mesh())
    return metrics(out), weights


def place(topology: str, argv: list[str]) -> tuple[int, int, list[str]]:
    """dp, tp and flags of "2x4", "2x4sp", "2x4spz3"."""
    dp, tp, split, dropped = re.fullmatch(r"(\d+)x(\d+)(sp)?(z3)?", topology).groups()
    flags = ["--sequence-parallel"] if split else []
    return int(dp), int(tp), argv + flags + (["--reshard-after-forward"] if dropped else [])


def differences(mine: tuple[dict, dict], true: tuple[dict, dict]) -> tuple:
    """Of two runs: loss of a step, norm of a step (relative), final weight, and which; the largest
    of each."""
    (records, weights), (true_records, true_weights) = mine, true
    assert sorted(records) == sorted(true_records)
    pairs = [(records[step], true_records[step]) for step in records]
    loss = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs)
    weight, name = max(((weights[name] - true_weights[name]).abs().max().item(), name)
                       for name in weights)
    return loss, norm, weight, name


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"])
    options.add_argument("--topologies", nargs="+", metavar="DPxTP[sp][z3]", default=TOPOLOGIES,
                         help="sp: --sequence-parallel; z3: --reshard-after-forward")
    options, flags = options.parse_known_args()             # the others are train.py's
    began = time.time()
    print(f"{options.steps} steps, against one process")
    print("precision  dp x tp max |d loss|   max d norm   max |d weight|, in")
    with tempfile.TemporaryDirectory() as folder:
        prepared = data.prepare(None, Path(folder) / "data", 1000, 0)
        for precision in options.precisions:
            argv = [*SHAPE, "--train-iters", str(options.steps), "--data", str(prepared),
                    "--precision", precision, *flags]
            true = run(1, 1, argv, Path(folder) / precision)
            for topology in options.topologies:
                mine = run(*place(topology, argv), Path(folder) / f"{precision}-{topology}")
                loss, norm, weight, name = differences(mine, true)
                print(f"{precision:<9}  {topology:<7} {loss:12.1e}   {norm:10.1e}   "
                      f"{weight:14.1e}, {name}", flush=True)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
