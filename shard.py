"""Split, merge and describe weights: `python shard.py SRC DST --tp 8`.

SRC is a released .pt file, a directory of parts, or a training run; DST a directory of --tp parts
or, with --tp 1, one .pt file.  Without DST: what SRC is.
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from nanogeex.command_line import parse
from nanogeex.config import DTYPES, flag
from nanogeex.convert import convert, describe
from nanogeex.mesh import launch
from nanogeex.sources import find, open_weights


@dataclass
class ShardConfig:
    source: str = flag(
        "", "files", "a released .pt file, a directory of its parts, or a training run",
        positional="SRC")
    destination: str | None = flag(
        None, "files", "a directory for the parts or, with --tp 1, a .pt file; left out: SRC is "
        "described", positional="[DST]")

    tensor_model_parallel_size: int = flag(8, "conversion", "parts to make", low=1, short="--tp")
    dtype: str | None = flag(
        None, "conversion", "of all tensors; default: as they are, fp16 for a training run",
        choices=tuple(DTYPES), type=str)
    padded_vocab_size: int | None = flag(
        None, "conversion", "rows of the vocabulary: zeros are added, or the last left out; "
        "default: as it is, or the next multiple of --tp", low=1, type=int)


def main(argv: list[str]) -> None:
    config = parse(ShardConfig, argv, __doc__)
    torch.set_num_threads(1)                # a copy waits for pages: threads that spin slow it down
    weights = open_weights(find(config.source, say=partial(print, file=sys.stderr)))
    if config.destination is None:
        print(describe(weights))
    else:
        dtype = config.dtype or ("fp16" if weights.trained else None)
        began = time.perf_counter()
        size = convert(weights, Path(config.destination), config.tensor_model_parallel_size,
                       DTYPES.get(dtype), config.padded_vocab_size)
        seconds = time.perf_counter() - began
        print(f"{config.destination}: tp {config.tensor_model_parallel_size}, {size:,} bytes in "
              f"{seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s", file=sys.stderr)
    for note in weights.notes:
        print(f"note: {config.source}: {note}", file=sys.stderr)


if __name__ == "__main__":
    launch(main)
