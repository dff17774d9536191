"""What a parameter is, apart from what it computes: its whole shape, how it is cut, how it begins.

One table, name -> Split, is made with the model; initialisation, gradient norm, checkpoints and
weight files all read it.  A rank's piece of a whole tensor is cut twice, first by tp along the
table's dimension, then by dp along the rows:

      whole (8, 6), dim 1, tp 2 x dp 2         [ tp 0  dp 0 | tp 1  dp 0 ]      each (4, 3)
                                               [ tp 0  dp 1 | tp 1  dp 1 ]

Weights are drawn whole, from a seed of their own name, and then cut: drawn piece by piece, every
topology would start from other weights.

Tests: tests/test_model.py, tests/test_train_step.py.
"""

import math
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from nanogeex.config import TrainConfig
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX


class Split(NamedTuple):
    """A parameter's whole shape, and along which dimension tp cuts it: None is not at all."""

    shape: tuple[int, ...]
    dim: int | None


def split_table(model: CodeGeeX) -> dict[str, Split]:
    """name -> Split.  Made before FSDP2 wraps the model: attributes of a Parameter would not
    outlive that."""
    table = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            shape, dim = list(parameter.shape), module.TP_DIM[name]
            if dim is not None:
                shape[dim] *= model.mesh.tp
            table[f"{path}.{name}"] = Split(tuple(shape), dim)
    return table


def piece(whole: Tensor, dim: int | None, mesh: Mesh) -> Tensor:
    """What this rank holds of a whole tensor: its tp slice along `dim`, and of that its dp rows."""
    if dim is not None:
        whole = whole.chunk(mesh.tp, dim)[mesh.tp_rank]
    rows = -(-whole.shape[0] // mesh.dp)        # FSDP2's cut: the last ranks hold fewer, or none
    return whole[mesh.dp_rank * rows:(mesh.dp_rank + 1) * rows]


def origin(split: Split, mesh: Mesh) -> tuple[int, ...]:
    """Where in the whole tensor this rank's piece begins."""
    at, shape = [0] * len(split.shape), list(split.shape)
    if split.dim is not None:
        shape[split.dim] //= mesh.tp
        at[split.dim] = mesh.tp_rank * shape[split.dim]
    at[0] += mesh.dp_rank * -(-shape[0] // mesh.dp)
    return tuple(at)


def initial_weight(name: str, shape: tuple[int, ...], config: TrainConfig) -> Tensor:
    """The whole tensor `name` before training, in fp32: a function of name, shape and seed alone,
    so that every topology starts from the same weights.  Normal(0, init_method_std), what writes
    to the residual stream scaled by 1/sqrt(2 num_layers), as in GPT-2; LayerNorms 1, biases 0."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "layernorm" in name:
        return torch.ones(shape)
    std = config.init_method_std
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        std /= math.sqrt(2 * config.num_layers)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))
    return torch.empty(shape).normal_(0.0, std, generator=generator)
