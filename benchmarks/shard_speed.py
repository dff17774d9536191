"""How fast shard.py is, and what it holds: `python -m benchmarks.shard_speed [GB] [FOLDER]`.

Makes a released-layout file of about that size (default 2), copies it with cp, splits it 8 ways,
merges it and cuts it anew, each followed by fsync, and prints a line for each: seconds, and the
peak of memory that belongs to the process alone (RssAnon), which is sampled.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanogeex.config import ModelConfig
from tests.programs import ROOT
from tests.released import write


def measure(what: str, command: list) -> float:
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines()
                            if line.startswith("RssAnon"))])
        time.sleep(0.005)
    assert process.returncode == 0, what
    seconds = time.perf_counter() - began
    print(f"{what:<24}{seconds:7.2f} s   peak {peak / 1024:6.0f} MB", flush=True)
    return seconds


def main(gigabytes: float = 2.0, folder: str | None = None) -> None:
    hidden = 2560
    layers = max(1, round(gigabytes * 1e9 / (24 * hidden * hidden)) - 3)
    config = ModelConfig(layers, hidden, hidden // 128, 2048, 52224, 52224)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        at = Path(name)
        source = write(at / "released.pt", config)
        print(f"{layers} + 1 layers, hidden {hidden}: {source.stat().st_size / 1e9:.2f} GB")
        os.sync()
        shard = [sys.executable, ROOT / "shard.py"]
        measure("import torch alone", [sys.executable, "-c", "import torch"])
        for turn in (1, 2):
            copy = at / "copy.pt"
            measure("cp, fsync", ["sh", "-c", f"cp {source} {copy} && sync {copy}"])
            copy.unlink()
            measure("split 8", [*shard, source, at / "8"])
            measure("merge", [*shard, at / "8", at / "1.pt", "--tp", 1])
            measure("8 -> 4", [*shard, at / "8", at / "4", "--tp", 4])
            assert turn == 2 or (at / "1.pt").stat().st_size > 0.99 * source.stat().st_size
            for made in ("8", "4"):
                shutil.rmtree(at / made)
            (at / "1.pt").unlink()


if __name__ == "__main__":
    main(*(convert(word) for convert, word in zip((float, str), sys.argv[1:], strict=False)))
