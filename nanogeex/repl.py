"""A terminal to try a model in: `python infer.py` without a prompt.

The kernel edits the line that is typed, and hands it over when it ends.  Here Ctrl-C ends one, too,
instead of sending a signal (termios(3): VINTR is off, its key is VEOL):

      at a prompt       the line that ends with the key is dropped, with those before it; if there
                        was nothing to drop, that was all
      in an answer      rank 0 looks after each token whether such a line is there, and broadcasts
                        what it saw: all ranks stop after the same token

A signal would go to the terminal's foreground processes.  Under torchrun that is torchrun, which
ends the job; the ranks have sessions of their own and would not even hear of it.

Tests: tests/test_repl.py.
"""

import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count

import torch
import torch.distributed as dist

from nanogeex.mesh import Mesh, on_rank0


class Stopped(Exception):
    """Ctrl-C in an answer; raised on all ranks."""


class Keyboard:
    """Standard input, a terminal, in which Ctrl-C is a key that ends a line."""

    def __init__(self):
        self.file = sys.stdin.fileno()
        self.before = termios.tcgetattr(self.file)
        self.ctrl_c: bytes = self.before[6][termios.VINTR]
        self.waiting: list[bytes] = []              # lines typed in an answer: for the next prompt

    def __enter__(self) -> "Keyboard":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))      # by way of __exit__
        settings = termios.tcgetattr(self.file)
        settings[6][termios.VINTR] = bytes([os.fpathconf(self.file, "PC_VDISABLE")])
        settings[6][termios.VEOL] = self.ctrl_c
        termios.tcsetattr(self.file, termios.TCSANOW, settings)
        return self

    def __exit__(self, *error) -> None:
        termios.tcsetattr(self.file, termios.TCSANOW, self.before)

    def ask(self) -> str | None:
        """Lines up to an empty one or Ctrl-D; without their last line end, so that a line can be
        continued.  None: Ctrl-C or Ctrl-D, and no lines."""
        typed = b""
        while True:
            print("... " if typed else ">>> ", end="", file=sys.stderr, flush=True)
            line = self.waiting.pop(0) if self.waiting else os.read(self.file, 1 << 16)
            if line.endswith(self.ctrl_c):
                print(file=sys.stderr)
                if not typed and line == self.ctrl_c:
                    return None
                typed = b""
            elif line in (b"", b"\n"):
                if typed or not line:
                    return typed.removesuffix(b"\n").decode(errors="surrogateescape") or None
            else:
                typed += line
                if not line.endswith(b"\n"):        # Ctrl-D, in mid-line
                    return typed.decode(errors="surrogateescape")

    def stopped(self) -> bool:
        """Whether Ctrl-C was pressed since; what was typed before it is dropped."""
        while select.select([self.file], [], [], 0)[0]:
            line = os.read(self.file, 1 << 16)
            if line.endswith(self.ctrl_c):
                self.waiting.clear()
                return True
            self.waiting.append(line)
            if not line:                            # Ctrl-D, or the terminal has gone
                break
        return False


def converse(mesh: Mesh, reply: Callable[[int, str, Callable], None]) -> None:
    """Ask and reply until the user ends it.  All ranks run reply(number, text, watch); it puts a
    generation's steps through `watch`, which raises Stopped after a Ctrl-C."""
    with Keyboard() if mesh.rank == 0 else nullcontext() as keyboard:
        if keyboard:
            print("type code; an empty line or Ctrl-D sends it; Ctrl-C stops the answer; "
                  "at an empty prompt, either key ends", file=sys.stderr)
        for number in count():
            text = on_rank0(mesh, f"typed {number}", lambda: keyboard.ask())
            if text is None:
                return
            try:
                reply(number, text, partial(until_stopped, keyboard=keyboard, mesh=mesh))
            except Stopped:
                if keyboard:
                    print(file=sys.stderr)


def until_stopped(steps: Iterator[None], keyboard: Keyboard | None, mesh: Mesh) -> Iterator[None]:
    for _ in steps:
        stopped = torch.tensor([bool(keyboard and keyboard.stopped())], device=mesh.device)
        if mesh.tp > 1:
            dist.broadcast(stopped, src=0, group=mesh.tp_group)
        if stopped.item():
            raise Stopped
        yield
