"""Writing weights: one file, or N parts, made without holding a model in memory.

      reserve   torch.save makes a file of the right size without data (skip_data), and the disk
                gives it room: a map over a full disk would kill the process
      map       the file's tensors, shared with the file
      copy      into them, tensor by tensor, what the source's parts have of each
      rename    when all parts are on the disk; until then there is no final name

The zip's checksums of the tensors stay 0: torch.load does not look at them, `unzip -t` complains.

Tests: tests/test_convert.py.
"""

import math
import mmap
import os
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options, skip_data
from tqdm import tqdm

from nanogeex.config import ModelConfig, UsageError
from nanogeex.mesh import Mesh
from nanogeex.parameters import split_table
from nanogeex.released_layout import PART, nest, read_part, released_name
from nanogeex.sources import Weights, on_meta, read_run
from nanogeex.weights import WORDS, fill, vocabulary_note, with_rows


def describe(weights: Weights) -> str:
    """What it is, a line a fact."""
    config, parts = weights.config, weights.parts
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in parts[0].values())
    sizes = [tensor.nbytes for part in parts for tensor in part.values()]
    repeated = sum(split.dim is None for split in weights.table.values())
    facts = {
        "kind": weights.kind, "path": weights.path,
        "layers": f"{config.num_layers} + 1 top-query layer", "hidden size": config.hidden_size,
        "heads": weights.heads or "not in the file",
        "positions": config.seq_length, "vocabulary": f"{config.padded_vocab_size} rows",
        "parameters": f"{config.num_parameters:,}",
        "dtype": ", ".join(f"{dtype} ({count} tensors)" for dtype, count in dtypes.items()),
        "parts": len(parts), "bytes": f"{sum(sizes):,}",
        "repeated tensors": f"{repeated}, the same bits in all parts" if len(parts) > 1 else "none",
    }
    return "\n".join(f"{what:<18}{value}" for what, value in facts.items())


def convert(weights: Weights, destination: Path, tp: int, dtype: torch.dtype | None = None,
            rows: int | None = None) -> int:
    """Write `weights` as `tp` parts in the directory `destination`, or as one file; returns bytes.
    `dtype` None keeps each tensor's.  `rows`: of the vocabulary; None: as many as there are, and
    what makes them a multiple of `tp`."""
    _check_divides(weights, tp)
    rows = rows or -(-weights.config.padded_vocab_size // tp) * tp
    if rows % tp:
        raise UsageError(f"--padded-vocab-size {rows}: not a multiple of --tp {tp}; give one")
    _check_destination(destination, tp)
    if weights.trained:                                 # whole, the one copy in memory
        weights.parts = [{name: torch.empty(each.shape) for name, each in weights.table.items()}]
        read_run(weights, weights.parts[0], weights.table, Mesh())
    weights.notes += vocabulary_note(weights, rows)
    files = [destination / PART.format(i) for i in range(tp)] if tp > 1 else [destination]
    temporaries = [file.with_name(file.name + ".tmp") for file in files]
    made = tp > 1 and not destination.exists()
    try:
        if tp > 1:
            destination.mkdir(parents=True, exist_ok=True)
        size = _write(weights, temporaries, dtype, with_rows(weights.config, rows))
        for path, file in zip(temporaries, files, strict=True):
            os.rename(path, file)
    except BaseException as error:
        for path in [*temporaries, *files]:
            path.unlink(missing_ok=True)
        if made and destination.is_dir():
            destination.rmdir()
        if isinstance(error, OSError):
            raise UsageError(f"{error.filename or destination}: {error.strerror}; give a DST that "
                             "can be written, with room for all of the weights") from None
        raise
    return size


def _write(weights: Weights, paths: list[Path], dtype: torch.dtype | None,
           config: ModelConfig) -> int:
    """Fill one file a tp rank and see it onto the disk."""
    outputs = []
    for rank, path in enumerate(paths):                 # all of the space before any of the data
        mesh = Mesh(rank=rank, tp=len(paths))
        model = on_meta(config, mesh)
        like = {name: torch.empty(weight.shape, dtype=dtype or weights.parts[0][name].dtype)
                for name, weight in model.named_parameters()}       # never touched: no memory
        outputs.append((mesh, _reserve(path, nest(like, len(paths)))))
    table = split_table(on_meta(config, Mesh()))
    size = sum(tensor.nbytes for _, tensors in outputs for tensor in tensors.values())
    with tqdm(total=size, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for name in outputs[0][1]:                      # the source is read once, in its order
            for mesh, tensors in outputs:
                fill(tensors[name], name, table[name], mesh, weights)
                bar.update(tensors[name].nbytes)
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return size


def _reserve(path: Path, content: dict) -> dict[str, Tensor]:
    """A file of tensors like these, without their data; returns its own, mapped."""
    try:
        with open(path, "w+b") as file:
            with skip_data():
                torch.save(content, file)
            if hasattr(os, "posix_fallocate"):          # not on macOS
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    with set_default_mmap_options(mmap.MAP_SHARED):
        return read_part(path)[0]


def _check_divides(weights: Weights, tp: int) -> None:
    """The vocabulary is made to fit; whatever else is cut must divide."""
    cut = {released_name(name): split.shape[split.dim] for name, split in weights.table.items()
           if split.dim is not None and name != WORDS}
    if weights.heads:
        cut["the attention heads"] = weights.heads
    for what, size in cut.items():
        if size % tp:
            common = math.gcd(*cut.values())
            fit = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise UsageError(f"--tp {tp}: does not divide {what} of {weights.path}, {size}; choose "
                             f"one of {fit}")


def _check_destination(destination: Path, tp: int) -> None:
    """Nothing that is there is written over; what a killed run has left behind may be."""
    if tp > 1 and (destination.suffix == ".pt" or destination.is_file()):
        raise UsageError(f"{destination}: a file, and --tp {tp} makes a directory of {tp} parts; "
                         "give a directory, or --tp 1")
    if destination.is_dir() and any(path.suffix != ".tmp" for path in destination.iterdir()):
        raise UsageError(f"{destination}: exists and is not empty; give another DST")
    if tp == 1 and destination.exists():
        raise UsageError(f"{destination}: exists; give --tp 1 the name of a new file")
