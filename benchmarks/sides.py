"""Two ways to do the same, in turn: each is a group of processes that live all the time, of which
one group works while the others wait.  Rounds then see the same machine, and the ratio of two sides
is taken round by round."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing


class Side:
    """`make(rank, ranks, store)` builds on each rank and returns what does one step."""

    def __init__(self, make: Callable[[int, int, str], Callable[[], None]], ranks: int = 1,
                 threads: int = 1):
        context = torch.multiprocessing.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=_work, daemon=True, args=(
                there, make, rank, ranks, threads, f"file://{self.folder.name}/store")))
            self.pipes.append(here)
            self.processes[-1].start()
        self.seconds: list[float] = []
        self.peak = max(self._ask(0)) / 1e6             # MB, see below; also waits for `make`

    def _ask(self, steps: int) -> list[float]:
        for pipe in self.pipes:
            pipe.send(steps)
        return [pipe.recv() for pipe in self.pipes]

    def turn(self, steps: int) -> None:
        """The seconds of a step, of the slowest rank."""
        self.seconds.append(max(self._ask(steps)) / steps)

    def end(self) -> None:
        self.peak = max(self._ask(0)) / 1e6
        for process in self.processes:
            process.terminate()
        self.folder.cleanup()

    def median(self) -> float:
        return statistics.median(self.seconds)

    def times(self, other: "Side") -> float:
        """How many times as long the other takes; the median over the rounds."""
        return statistics.median(its / mine for mine, its in
                                 zip(self.seconds, other.seconds, strict=True))


def _work(pipe: Connection, make: Callable, rank: int, ranks: int, threads: int,
          store: str) -> None:
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    before = _resident("VmRSS")
    step = make(rank, ranks, store)
    while True:
        steps = pipe.recv()
        if not steps:                                   # bytes at the peak, beside what was forked
            pipe.send(_resident("VmHWM") - before)
            continue
        began = time.perf_counter()
        for _ in range(steps):
            step()
        pipe.send(time.perf_counter() - began)


def _resident(kind: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith(kind))
    return 1024.0 * int(line.split()[1])


def rounds(sides: dict[str, Side], number: int, steps: int) -> None:
    """`number` rounds of `steps` steps a side, after one that does not count; then they end."""
    for i in range(number + 1):
        for side in sides.values():
            side.turn(steps)
            if i == 0:
                side.seconds.clear()
    for side in sides.values():
        side.end()
