"""Run train.py and infer.py as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(program, *argv, ranks=1, check=True, **keywords):
    """The finished process; with `ranks`, under torchrun."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    ended = subprocess.run([*start, str(ROOT / program), *map(str, argv)], capture_output=True,
                           text=True, timeout=300, **keywords)
    assert not check or ended.returncode == 0, ended.stderr
    return ended


def start(program, *argv):
    return subprocess.Popen([sys.executable, str(ROOT / program), *map(str, argv)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"PYTHONUNBUFFERED": "1"})


def metrics(folder):
    """step -> record, the later one of a step that ran twice."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}
