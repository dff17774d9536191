"""Filling a model: each rank reads the slices that it holds, from any number of parts.

Every piece of a tensor, in a file or on a rank, is a box in the whole one.  What a box that is
there and a box that is wanted have in common is copied; that is splitting, merging, cutting anew,
loading on a rank and filling ZeRO's shards, all at once:

      two parts, cut along dim 1       wanted: the third of four, along dim 0
      [ part 0 | part 1 ]              [               ]
      [        |        ]              [               ]     two copies: the left half of the box
      [        |        ]              [###############]     from part 0, the right from part 1
      [        |        ]              [               ]

Parts are memory maps: what is read of them is the kernel's page cache, which it may drop.  A loaded
model is the only copy in memory.

Tests: tests/test_weights.py.
"""

from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanogeex import integrity, quantize
from nanogeex.config import DTYPES, ModelConfig, UsageError, check_shape
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX, Options
from nanogeex.parameters import Split, origin, split_table
from nanogeex.released_layout import released_name
from nanogeex.sources import Weights, find, on_meta, open_weights, read_run
from nanogeex.tokenizer import open_tokenizer

WORDS = "word_embeddings.weight"


Common = tuple[tuple[slice, ...], Tensor]       # where in a box that is wanted, and a view of it


def overlap(at: tuple[int, ...], shape: torch.Size, source: Tensor,
            source_at: tuple[int, ...]) -> Common | None:
    """What a box of `shape` and `source` have in common; `_at` is where each begins."""
    where = []
    for dim, (mine, its) in enumerate(zip(at, source_at, strict=True)):
        begin = max(mine, its)
        size = min(mine + shape[dim], its + source.shape[dim]) - begin
        if size <= 0:
            return None
        where.append(slice(begin - mine, begin - mine + size))
        source = source.narrow(dim, begin - its, size)
    return tuple(where), source


def common(weights: Weights, name: str, at: tuple[int, ...], shape: torch.Size) -> list[Common]:
    """What the parts hold of a box of `name` that begins at `at`."""
    split = weights.table[name]
    parts = weights.parts if split.dim is not None else weights.parts[:1]       # all hold the same
    found = [overlap(at, shape, part[name], origin(split, Mesh(rank=number, tp=len(parts))))
             for number, part in enumerate(parts)]
    return [each for each in found if each]


@torch.no_grad()
def fill(target: Tensor, name: str, at: tuple[int, ...], weights: Weights) -> None:
    """The box of `name` that begins at `at`, from whichever parts hold some of it.  Rows of the
    vocabulary that the file does not have are 0."""
    if name == WORDS:
        target.zero_()
    for where, source in common(weights, name, at, target.shape):
        target[where].copy_(source)


def vocabulary_note(weights: Weights, rows: int) -> list[str]:
    """What happens to the vocabulary's rows, if anything."""
    had = weights.config.padded_vocab_size
    if rows > had:
        return [f"{released_name(WORDS)}: {had} rows, {rows - had} rows of zeros added"]
    if rows < had:
        return [f"{released_name(WORDS)}: {had} rows, the last {had - rows} left out"]
    return []


def with_rows(config: ModelConfig, rows: int) -> ModelConfig:
    """The same shape with another number of rows in the vocabulary."""
    return replace(config, vocab_size=min(config.vocab_size, rows),
                   make_vocab_size_divisible_by=rows)


def model_config(weights: Weights, num_attention_heads: int | None, vocab_size: int | None,
                 tp: int) -> ModelConfig:
    """The model that these weights fill.  `vocab_size`: the ids that the tokenizer has; rows beyond
    them are padding, made a multiple of `tp`."""
    hidden, rows = weights.config.hidden_size, weights.config.padded_vocab_size
    heads = num_attention_heads or weights.heads
    if heads is None and hidden % 128:
        raise UsageError(f"--num-attention-heads: not in {weights.path}, and hidden size {hidden} "
                         "is not a multiple of 128, a head's size in the 13B model; give it")
    if weights.heads not in (None, heads):
        raise UsageError(f"--num-attention-heads {heads}: {weights.path} was trained with "
                         f"{weights.heads}; leave it out")
    if vocab_size and vocab_size > rows:
        raise UsageError(f"--tokenizer: has {vocab_size} ids, the vocabulary of {weights.path} "
                         f"{rows} rows; give the tokenizer of these weights")
    config = replace(weights.config, num_attention_heads=heads or hidden // 128)
    if weights.trained:
        check_shape(config, tp)
        return config
    check_shape(replace(config, vocab_size=0), tp)              # the vocabulary is made to fit
    return replace(with_rows(config, -(-rows // tp) * tp), vocab_size=vocab_size or rows)


def load_model(path: str | Path | Weights, num_attention_heads: int | None = None,
               dtype: torch.dtype | str | None = None, mesh: Mesh | None = None,
               vocab_size: int | None = None, int8: bool = False) -> CodeGeeX:
    """This rank's share of a released file, of parts or of a run, on its device, ready to generate:
    `model(ids)` gives logits (B, T, V/tp).  `dtype` None: fp32 on the CPU, elsewhere the weights'
    own; LayerNorms keep what is wider; `int8` makes that of the blocks' products, see quantize.py.
    No second copy of the model is made in memory: a block, or a tensor, is read at a time."""
    mesh = mesh or Mesh()
    weights = path if isinstance(path, Weights) else open_weights(find(str(path), mesh))
    config = model_config(weights, num_attention_heads, vocab_size, mesh.tp)
    dtype = DTYPES.get(dtype, dtype)
    if weights.trained:
        own, options = DTYPES[weights.trained["precision"]], Options(weights.trained["ln_fp16"])
    else:
        own, options = weights.parts[0][WORDS].dtype, Options()
    dtype = dtype or (torch.float32 if mesh.device.type == "cpu" else own)
    model = on_meta(config, mesh, options)
    table, names = split_table(model), dict(model.named_parameters())
    for _, group in groupby(_bar(names, mesh), lambda name: name.split(".")[:2]):
        group = list(group)
        if weights.trained:
            pieces = {name: torch.empty(names[name].shape, device=mesh.device) for name in group}
            read_run(weights, pieces, table, mesh)
        for name in group:
            if weights.trained:
                tensor = pieces.pop(name).to(dtype)
            else:
                kept = weights.parts[0][name].dtype if "layernorm" in name else dtype
                tensor = torch.empty(names[name].shape, device=mesh.device,
                                     dtype=torch.promote_types(dtype, kept))
                fill(tensor, name, origin(table[name], mesh), weights)
            module, _, last = name.rpartition(".")
            module = model.get_submodule(module)
            if int8 and quantize.applies_to(name):
                quantize.fill(module, tensor, mesh)
            else:
                setattr(module, last, nn.Parameter(tensor, requires_grad=False))
    return model.eval()


def _bar(tensors: Collection, mesh: Mesh) -> tqdm:
    """Shows on rank 0, in a terminal, how many of them have been read."""
    return tqdm(tensors, "loading", unit=" tensors", disable=mesh.rank > 0 or None, leave=False)


def fill_shards(path: str, shards: dict[str, Tensor], table: dict[str, Split], mesh: Mesh,
                say: Callable[[str], None]) -> None:
    """A training run's masters, before its first step: this rank's pieces, cut by tp and by dp."""
    weights = open_weights(find(path, mesh, say))
    if weights.trained:
        read_run(weights, shards, table, mesh)
    else:
        for name, shard in _bar(shards.items(), mesh):
            fill(shard, name, origin(table[name], mesh), weights)
    notes = weights.notes + vocabulary_note(weights, table[WORDS].shape[0])
    say("; ".join([f"starting from {weights.kind} {path}", *notes]))


def training_defaults(given: dict) -> dict:
    """What --tokenizer and --init-from say of a run's shape, for command_line.parse: fields that
    come before the flags and after the preset."""
    fields: dict = {}
    if "tokenizer" in given:
        fields["vocab_size"] = open_tokenizer(Path(given["tokenizer"])).vocab_size
    if "init_from" not in given:
        return fields
    path = Path(given["init_from"])                     # a run's shape is in all its checkpoints
    path = max(integrity.steps(path / "checkpoints"), default=path)
    weights = open_weights(find(str(path)))
    if weights.trained:
        fields = {"tokenizer": str(weights.path.parent.parent)} | fields
    elif not fields:
        raise UsageError(f"--init-from {given['init_from']}: ids mean nothing without their "
                         "tokenizer; give --tokenizer DIR, the folder that came with the weights")
    config = model_config(weights, given.get("num_attention_heads"), fields.get("vocab_size"),
                          given.get("tensor_model_parallel_size", 1))
    for name in ("num_layers", "hidden_size", "seq_length"):
        its = getattr(config, name)
        if given.get(name, its) != its:
            raise UsageError(f"--{name.replace('_', '-')} {given[name]}: {given['init_from']} has "
                             f"{its}; leave it out")
    return fields | asdict(config)
