"""int8 weights: half the memory of fp16, and half the reading, which is what a token's time is.

A row of a weight (what makes one output) becomes integers from -127 to 127 and one scale:

      w  [ 0.31  -0.02  0.11 ]     scale 0.31 / 127     q  [ 127  -8  45 ]      w ~ scale * q

The scale can wait until after the product, where it is one multiplication an output.  So the
blocks' products are stored, 98% of the 13B model.  Embeddings, biases and LayerNorms stay as they
are, and so does the head, which is an embedding: the kernel's logits would have 8 bits, and ties.
Nothing is calibrated and outliers are not kept apart (arXiv:2208.07339 does that): the error is
measured instead, by `python -m benchmarks.decode RUN`.

A row that tp has cut takes its scale from all of its pieces, so that the weights are the same at
every tp.

Tests: tests/test_quantize.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nanogeex.mesh import Mesh
from nanogeex.tensor_parallel import ColumnParallelLinear, RowParallelLinear

FEW = 16        # rows up to which the CPU's int8 kernel is faster than a product of fp32


def applies_to(name: str) -> bool:
    """The top-query block's query is made a table of, from the weights as they are."""
    return name.endswith((
        "query.weight", "key.weight", "value.weight", "dense.weight", "dense_h_to_4h.weight",
        "dense_4h_to_h.weight")) and name != "top_query_layer.attention.query.weight"


def int8_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (N, I), weight (O, I) int8, scale (O) bf16 -> (N, O) in x's dtype."""
    if x.device.type == "cpu" and len(x) <= FEW:
        # bf16 in and out is what the kernel is fast with; in fp32 it takes 9 times as long
        return torch._weight_int8pack_mm(x.bfloat16(), weight, scale).to(x.dtype)
    wide = torch.float32 if x.device.type == "cpu" else x.dtype
    return (F.linear(x.to(wide), weight.to(wide)) * scale.to(wide)).to(x.dtype)


class Int8Column(ColumnParallelLinear):
    """The same layer, with another product."""

    def forward(self, x: Tensor) -> Tensor:
        return int8_product(x, self.weight, self.scale).add_(self.bias)


class Int8Row(RowParallelLinear):
    def partial(self, x: Tensor) -> Tensor:
        return int8_product(x, self.weight, self.scale)


@torch.no_grad()
def fill(linear: ColumnParallelLinear | RowParallelLinear, weight: Tensor, mesh: Mesh) -> None:
    """Make `linear` an int8 layer with this weight, of which no other copy stays."""
    peak = weight.abs().amax(1).float()                                     # (O)
    cut = isinstance(linear, RowParallelLinear)
    if cut and mesh.tp > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=mesh.tp_group)
    scale = (peak / 127).clamp(min=1e-30).bfloat16()                # as the kernel takes it
    rounded = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    linear.__class__ = Int8Row if cut else Int8Column
    linear.weight = nn.Parameter(rounded, requires_grad=False)
    linear.scale = nn.Parameter(scale, requires_grad=False)
