"""How long training stands still for a checkpoint: `python -m benchmarks.saving`.

One process holds the weights and moments of --preset 125m and saves them several times, alternately
before it goes on and in the background.  The stall is the time until it could go on."""

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from nanogeex.checkpoint import set_steps
from nanogeex.command_line import parse
from nanogeex.config import TrainConfig
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX
from nanogeex.optim import adamw
from nanogeex.parameters import split_table
from nanogeex.saver import Saver


def main() -> None:
    config = parse(TrainConfig, ["--preset", "125m"], "")
    with torch.device("meta"):
        model = CodeGeeX(config, Mesh())
    table = split_table(model)
    shards = {name: torch.randn(table[name].shape) for name in table}
    optimizer = adamw(shards, config)
    set_steps(optimizer, 1.0)
    size = 12 * sum(shard.numel() for shard in shards.values()) / 1e9
    folder = Path(tempfile.mkdtemp(dir="."))
    savers = {background: Saver(folder / str(background), table, 1, background, Mesh(), str)
              for background in (False, True)}
    stalls, whole = {False: [], True: []}, {False: [], True: []}
    try:
        for step in range(1, 6):
            for background, saver in savers.items():
                began = time.perf_counter()
                saver.save(dict(step=step, config={}), shards, optimizer)
                stalls[background].append(time.perf_counter() - began)
                assert saver.wait()
                whole[background].append(time.perf_counter() - began)
    finally:
        shutil.rmtree(folder)
    print(f"{size:.2f} GB of weights and moments, {len(stalls[True])} saves of each kind")
    for background, name in ((False, "--no-async-save"), (True, "--async-save")):
        stall, first = statistics.median(stalls[background]), stalls[background][0]
        print(f"{name:<16} training stands still for {stall:.2f} s (the first time {first:.2f} s), "
              f"written after {statistics.median(whole[background]):.2f} s")
    ratio = statistics.median(stalls[True]) / statistics.median(stalls[False])
    print(f"stall in the background: {ratio:.0%} of the other")


if __name__ == "__main__":
    main()
