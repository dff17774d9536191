"""Writing weights: one file, or N parts, made without holding a model in memory.

      reserve   torch.save makes a file of the right size without data (skip_data), and the disk
                gives it room: a full one is noticed before the work
      write     tensor by tensor, a few rows at a time, to where the file has them: straight from
                the source's map if the rows lie there in one stretch, else by way of a buffer
      rename    when all parts are on the disk; until then there is no final name

The zip's checksums of the tensors stay 0: torch.load does not look at them, `unzip -t` complains.

Tests: tests/test_convert.py.
"""

import math
import os
import struct
from collections import Counter
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from zipfile import ZipFile

import torch
from torch import Tensor
from torch.serialization import skip_data
from tqdm import tqdm

from nanogeex.config import DTYPES, ModelConfig, UsageError
from nanogeex.mesh import Mesh
from nanogeex.parameters import origin, split_table
from nanogeex.released_layout import PART, flatten, nest, released_name
from nanogeex.sources import Weights, on_meta, read_run
from nanogeex.weights import WORDS, common, fill, vocabulary_note, with_rows

BUFFER = 4 << 20


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
    files = [destination / PART.format(i) for i in range(tp)] if tp > 1 else [destination]
    temporaries = [file.with_name(file.name + ".tmp") for file in files]
    _check_destination(destination, temporaries, tp)
    if weights.trained:                                 # whole, the one copy in memory
        weights.parts = [{name: torch.empty(each.shape) for name, each in weights.table.items()}]
        read_run(weights, weights.parts[0], weights.table, Mesh())
    weights.notes += vocabulary_note(weights, rows)
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
        like = {name: torch.empty(weight.shape, dtype=dtype or weights.parts[0][name].dtype)
                for name, weight in on_meta(config, mesh).named_parameters()}   # never touched
        outputs.append((mesh, path, like, _reserve(path, nest(like, len(paths)))))
    table = split_table(on_meta(config, Mesh()))
    size = sum(tensor.nbytes for _, _, like, _ in outputs for tensor in like.values())
    with (tqdm(total=size, unit="B", unit_scale=True, disable=None, leave=False) as bar,
          ExitStack() as opened):
        files = [opened.enter_context(open(path, "r+b", buffering=0)) for path in paths]
        for name in outputs[0][2]:                      # the source is read once, in its order
            for file, (mesh, _, like, offsets) in zip(files, outputs, strict=True):
                _write_tensor(file, offsets[name], like[name], name, origin(table[name], mesh),
                              weights)
                bar.update(like[name].nbytes)
        for file in files:
            os.fsync(file.fileno())
    return size


def _write_tensor(file: FileIO, offset: int, like: Tensor, name: str, at: tuple[int, ...],
                  weights: Weights) -> None:
    """The box of `name` that begins at `at`, to `offset` of the file, some rows at a time."""
    file.seek(offset)
    row = like[:1].nbytes
    buffer = torch.empty(like[:max(1, BUFFER // row)].shape, dtype=like.dtype)
    for first in range(0, len(like), len(buffer)):
        rows = buffer[:len(like) - first]
        begin = (at[0] + first, *at[1:])
        found = common(weights, name, begin, rows.shape)
        if len(found) == 1 and found[0][1].shape == rows.shape and (
                found[0][1].is_contiguous() and found[0][1].dtype == rows.dtype):
            rows = found[0][1]
        else:
            fill(rows, name, begin, weights)
            converted = found and found[0][1].dtype != rows.dtype
            if converted and rows.isinf().any() and not any(v.isinf().any() for _, v in found):
                [short] = [short for short, dtype in DTYPES.items() if dtype == rows.dtype]
                raise UsageError(f"--dtype {short}: cannot hold the values of "
                                 f"{released_name(name)}; take fp32 or bf16")
        content = memoryview(rows.view(torch.uint8).numpy()).cast("B")
        while content:                                  # a write may take less than it is given
            content = content[file.write(content):]


def _reserve(path: Path, content: dict) -> dict[str, int]:
    """A file of tensors like these, without their data; returns where in it each begins."""
    try:
        with open(path, "x+b") as file:
            with skip_data():
                torch.save(content, file)
            if hasattr(os, "posix_fallocate"):          # not on macOS
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    offsets = {}
    with ZipFile(path) as archive, open(path, "rb") as file:
        for number, name in enumerate(flatten(content)):        # numbered as they are met
            file.seek(archive.getinfo(f"archive/data/{number}").header_offset)
            header = file.read(30)                              # a name and padding, then the data
            offsets[name] = file.tell() + sum(struct.unpack("<HH", header[26:]))
    return offsets


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


def _check_destination(destination: Path, temporaries: list[Path], tp: int) -> None:
    """Nothing that is there is written over."""
    if tp > 1 and (destination.suffix == ".pt" or destination.is_file()):
        raise UsageError(f"{destination}: a file, and --tp {tp} makes a directory of {tp} parts; "
                         "give a directory, or --tp 1")
    if destination.is_dir() and any(destination.iterdir()):
        raise UsageError(f"{destination}: exists and is not empty; give another DST")
    if tp == 1 and destination.exists():
        raise UsageError(f"{destination}: exists; give --tp 1 the name of a new file")
    for path in temporaries:
        if os.path.lexists(path):
            raise UsageError(f"{path}: exists, maybe left from a run that was killed; remove it")
