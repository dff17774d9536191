"""How fast are the data: `python -m benchmarks.data [--rounds N] [SOURCE ...]`.

From source files to train.bin and val.bin, with a tokenizer that is there already and one worker,
beside the tokenizer's bare encode of the same text, in turn; and the loader's batches, which are
read from the file's memory map, beside what it takes to train on them.  SOURCE: the running
Python's library if left out.
"""

import argparse
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from nanogeex import corpus, data
from nanogeex.samples import micro_batches, open_windows, permuted
from nanogeex.tokenizer import open_tokenizer


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    sources = given.sources or [sysconfig.get_path("stdlib")]
    torch.set_num_threads(1)
    home = Path(tempfile.mkdtemp(prefix="nanogeex-"))
    try:
        data.prepare(sources, home / "run", 32000, 2)                   # trains the tokenizer
        encoder = open_tokenizer(home / "run")
        units = corpus.units(corpus.list_files(sources, leave=home))
        texts = [document.text for unit in units for document in corpus.read(unit)
                 if not document.left]
        size = sum(len(text.encode()) for text in texts) / 1e6
        bare, whole, tokens = [], [], []
        for number in range(given.rounds):
            began = time.perf_counter()
            for text in texts:
                encoder.encode(text)
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            directory = data.prepare(sources, home / str(number), 32000, 1, home / "run")
            whole.append(time.perf_counter() - began)
            train, _, _ = open_windows(directory, 256, 32000)
            began = time.perf_counter()
            for step in range(200):
                samples = permuted(np.arange(64 * step, 64 * step + 64), len(train.ids), 1)
                for _ in micro_batches(train, samples, 1, 0, 64, torch.device("cpu")):
                    pass
            tokens.append(200 * 64 * 256 / (time.perf_counter() - began))
        ratio = statistics.median(b / w for b, w in zip(bare, whole, strict=True))
        print(f"{size:.1f} MB of text: bare encode {size / statistics.median(bare):.2f} MB/s, "
              f"source to .bin {size / statistics.median(whole):.2f} MB/s, {ratio:.2f} of it; "
              f"batches {statistics.median(tokens) / 1e6:.0f} million tokens/s")
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main(sys.argv[1:])
