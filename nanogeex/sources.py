"""Opening weights, whatever they lie in: a released file, its parts, or a training run.

All come to one form, `Weights`: a dictionary a part, from the model's names to tensors in mapped
memory, of which nothing has been read yet.  What the parts must agree on is checked at once:

      names and shapes       those of a model of this shape, cut as its split table says
      repeated tensors       the same bits in every part: else these are parts of two models

The shape of the model is read off the tensors; the number of heads is not in them.  Only reading a
run needs checkpoint.py, which is imported where it is called: DCP takes 45 MB.

Tests: tests/test_weights.py.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from nanogeex import integrity
from nanogeex.config import DTYPES, ModelConfig, UsageError
from nanogeex.mesh import Mesh, on_rank0
from nanogeex.model import CodeGeeX, Options
from nanogeex.parameters import Split, split_table
from nanogeex.released_layout import PART, read_part, released_name


@dataclass
class Weights:
    """An opened source of weights.  A run's tensors are on the meta device until they are read."""

    path: Path
    kind: str                           # "released file", "parts" or "training run"
    files: list[Path]                   # a file, or a run's directory, a part
    parts: list[dict[str, Tensor]]      # our name -> its piece
    config: ModelConfig                 # one head is one wide where `heads` is unknown
    heads: int | None
    table: dict[str, Split]
    notes: list[str] = field(default_factory=list)
    trained: dict | None = None         # a run's configuration


def find(given: str, mesh: Mesh | None = None, say: Callable[[str], None] = print) -> Path:
    """What a user gives -> what to open: a run's newest checkpoint that is whole, else the path
    itself.  All ranks together; `say` hears of checkpoints that are damaged."""
    path, mesh = Path(given), mesh or Mesh()
    if on_rank0(mesh, f"{given}: a run", (path / "checkpoints").is_dir):
        path = integrity.find(path / "checkpoints", mesh, say) or path
    elif on_rank0(mesh, f"{given}: a checkpoint", (path / "meta.json").is_file):
        if problem := integrity.damage(path, mesh):
            raise UsageError(f"{given}: {problem}; give the run, for its newest whole checkpoint")
    if path.is_file() or (path / "meta.json").is_file() or any(path.glob("mp_rank_*.pt")):
        return path.resolve()
    raise UsageError(f"{given}: no released file, no directory of {PART.format(0)} ..., and no run "
                     f"with a checkpoint; give one, or make a run: `python train.py --out {given}`")


def open_weights(path: Path) -> Weights:
    """Open what `find` has found, and check names, shapes and repeated tensors.  UsageError names
    the file and the tensor that are wrong."""
    if (path / "meta.json").is_file():
        return _open_run(path)
    kind, files = "released file", [path]
    if path.is_dir():
        kind, files = "parts", sorted(path.glob("mp_rank_*.pt"))
    first, left = read_part(files[0])
    rows, hidden = (_shape(first, files[0], name) for name in (
        "top_query_layer.attention.query.weight", "position_embeddings.weight"))
    count = hidden[1] // max(1, rows[0])
    if count * rows[0] != hidden[1] or not count:
        raise UsageError(f"{files[0]}: its query has {rows[0]} rows, its positions {hidden[1]} "
                         "columns; give weights of a CodeGeeX")
    if kind == "released file" and count != 1:
        raise UsageError(f"{path}: one of {count} parts; give the directory that holds all of them")
    wanted = [path / PART.format(i) for i in range(count)] if kind == "parts" else files
    for file in wanted:
        if file not in files:
            raise UsageError(f"{file}: missing; {files[0].name} is cut {count} ways, and "
                             f"{len(files)} parts are there; get it, too")
    for file in files:
        if file not in wanted:
            raise UsageError(f"{file}: not one of the {count} parts of {files[0].name}; take it "
                             "away")
    parts = [first]
    for file in wanted[1:]:
        part, more = read_part(file)
        parts.append(part)
        left += [entry for entry in more if entry not in left]
    layers = {found[1] for name in first if (found := re.match(r"layers\.(\d+)\.", name))}
    vocabulary = _shape(first, files[0], "word_embeddings.weight")[0] * count
    config = ModelConfig(len(layers), hidden[1], hidden[1], hidden[0], vocabulary, vocabulary)
    shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
    weights = Weights(path, kind, wanted, parts, config, None, split_table(on_meta(config, Mesh())))
    if left:
        weights.notes.append(f"left out, as no weights of the model: {shown}")
    for file, part in zip(wanted, parts, strict=True):
        _check(weights, file, part)
    return weights


def on_meta(config: ModelConfig, mesh: Mesh, options: Options | None = None) -> CodeGeeX:
    """A model of this shape without memory, which is there to be filled."""
    with torch.device("meta"):
        return CodeGeeX(config, mesh, options).requires_grad_(False)


def _open_run(path: Path) -> Weights:
    """A training checkpoint: its shape, with tensors that are not read yet."""
    trained = integrity.read_meta(path)["config"]
    config = ModelConfig(**{each.name: trained[each.name] for each in fields(ModelConfig)})
    table = split_table(on_meta(config, Mesh()))
    tensors = {name: torch.empty(split.shape, device="meta") for name, split in table.items()}
    return Weights(path, "training run", [path], [tensors], config, config.num_attention_heads,
                   table, trained=trained)


def read_run(weights: Weights, pieces: dict[str, Tensor], table: dict[str, Split],
             mesh: Mesh) -> None:
    """Fill this rank's pieces, in fp32, from a run's checkpoint."""
    from nanogeex import checkpoint

    if table != weights.table:
        rows = table["word_embeddings.weight"].shape[0]
        raise UsageError(f"--vocab-size: makes {rows} rows, padding included, {weights.path} has "
                         f"{weights.config.padded_vocab_size}; leave it out")
    checkpoint.load(weights.path, pieces, None, table, mesh)


def _shape(part: dict[str, Tensor], file: Path, name: str) -> torch.Size:
    if name not in part or part[name].dim() != 2:
        raise UsageError(f"{file}: {released_name(name)} is missing; give weights of a CodeGeeX")
    return part[name].shape


def _check(weights: Weights, file: Path, part: dict[str, Tensor]) -> None:
    """Names and shapes as the model has them; what is repeated, the same bits as in part 0."""
    count, first = len(weights.parts), weights.parts[0]
    other = "they are parts of different models, or one is damaged; get them anew"
    for name in [*weights.table, *part]:
        where = f"{file}: {released_name(name)}"
        if name not in weights.table:
            raise UsageError(f"{where} is not in {weights.files[0]}; {other}" if count > 1 else
                             f"{where} is no weight of a CodeGeeX of this shape; take it out")
        if name not in part:
            raise UsageError(f"{where} is missing; {other}" if count > 1 else
                             f"{where} is missing; give the whole model")
        shape, dim = list(weights.table[name].shape), weights.table[name].dim
        if dim is not None:
            shape[dim] //= count
        if list(part[name].shape) != shape:
            raise UsageError(f"{where} is {list(part[name].shape)}, where {shape} fits the rest of "
                             "the model; " + other)
        if part[name].layout != torch.strided or part[name].is_meta:
            raise UsageError(f"{where} holds no plain tensor; give the weights themselves")
        if part[name].dtype not in (*DTYPES.values(), torch.float64):
            raise UsageError(f"{where} is {part[name].dtype}; give fp16, bf16 or fp32")
        if part[name].dtype != first[name].dtype or dim is None and not _same_bits(
                part[name], first[name]):
            raise UsageError(f"{where} differs from {weights.files[0].name}'s; {other}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
