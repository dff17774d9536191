"""infer.py in a terminal (a pty): prompts, answers, Ctrl-C and Ctrl-D, as keys."""

import json
import os
import pty
import select
import signal
import sys
import termios

import pytest

from tests.programs import ROOT, run
from tests.test_data import source

CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose context is so long that an answer takes a while."""
    folder = tmp_path_factory.mktemp("repl")
    (folder / "src").mkdir()
    for number in range(80):
        (folder / f"src/{number}.py").write_text(source(number))
    run("train.py", "--data", "src", "--out", "run", "--vocab-size", 400, "--hidden-size", 64,
        "--seq-length", 4096, "--global-batch-size", 1, "--train-iters", 0, "--precision", "fp32",
        cwd=folder)
    return folder


class Terminal:
    """infer.py as the leader of a terminal's foreground processes, alone or under torchrun."""

    def __init__(self, folder, *argv, ranks=1):
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execv(sys.executable, [*start, str(ROOT / "infer.py"), "--load", "run",
                                      "--end-id", "1000000", *argv])
        self.seen = ""

    def until(self, text):
        """What it shows up to `text`, which is taken away."""
        while text not in self.seen:
            self.more()
        found, _, self.seen = self.seen.partition(text)
        return found

    def more(self):
        assert select.select([self.file], [], [], 120)[0], self.seen
        try:
            self.seen += os.read(self.file, 4096).decode(errors="replace")
        except OSError:                             # the other side has gone
            raise AssertionError(self.seen) from None

    def type(self, text):
        os.write(self.file, text.encode())

    def code(self):
        """Its exit code; what it still shows is read, or it would wait."""
        try:
            while os.read(self.file, 4096):
                pass
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_conversation(folder, ranks):
    """A prompt, an answer that is stopped, another one that is not, and the end."""
    terminal = Terminal(folder, "--out-seq-length", "1000", "--language", "python", "--greedy",
                        "--output", "out.jsonl", ranks=ranks)
    assert "Ctrl-C stops the answer" in terminal.until(">>> ")
    terminal.type("def f(x):\n    return\n")
    terminal.until("... ")
    terminal.until("... ")
    terminal.type("\n")
    terminal.until("\n")
    terminal.more()                                 # it has begun
    terminal.type("half a line" + CTRL_C)
    terminal.until(">>> ")
    assert (folder / "out.jsonl").read_text() == ""
    terminal.type("abc" + CTRL_C)                   # dropped, and asked again
    terminal.until(">>> ")
    terminal.type("\n")                             # nothing to send
    terminal.until(">>> ")
    terminal.type("y = 1" + CTRL_D)                 # it is answered to its end
    terminal.until(">>> ")
    terminal.type(CTRL_D)
    assert terminal.code() == 0
    [answered] = records(folder / "out.jsonl")
    assert answered["prompt"] == "y = 1" and answered["tokens"] == 1000
    if ranks == 1:                                  # the same as without a terminal
        run("infer.py", "--load", "run", "--end-id", 1000000, "--out-seq-length", 1000, "--greedy",
            "--language", "Python", "--prompt", "y = 1", "--output", "again.jsonl", cwd=folder)
        assert answered["ids"] == records(folder / "again.jsonl")[0]["ids"]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("by, code", [("Ctrl-C", 0), ("SIGTERM", 143)])
def test_the_terminal_is_left_as_it_was(folder, by, code):
    terminal = Terminal(folder)
    before = termios.tcgetattr(terminal.file)
    terminal.until(">>> ")
    assert termios.tcgetattr(terminal.file) != before
    if by == "Ctrl-C":
        terminal.type(CTRL_C)
    else:
        os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.code() == code
    assert termios.tcgetattr(terminal.file) == before
