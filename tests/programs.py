"""Run train.py and infer.py as a user does."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(program, *argv, ranks=1, torchrun=(), check=True, **keywords):
    """The finished process; with `ranks`, under torchrun."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                  *torchrun]
    ended = subprocess.run([*start, str(ROOT / program), *map(str, argv)], capture_output=True,
                           text=True, timeout=300, **keywords)
    assert not check or ended.returncode == 0, ended.stderr
    return ended


def metrics(folder):
    """step -> record, the later one of a step that ran twice."""
    records = {}
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:                      # cut short by a crash
            continue
        records[record["step"]] = record
    return records
