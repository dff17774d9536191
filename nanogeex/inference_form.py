"""A model made ready to decode: the same numbers, from fewer and better placed reads.

Each new token reads every weight once, and little is computed with it: speed is the bandwidth of
the memory.  What can be known or joined before the first token is:

      top-query block   its queries see positions only: a table of them, (positions, H/tp), takes
                        the place of the embeddings and of the query projection
      query|key|value   one product of a block's input instead of three
      fp32 on a CPU     weights in oneDNN's packed layout: a product of a few rows reads them at the
                        memory's bandwidth, where BLAS, which packs again each time, is at half of
                        it for one row and at a fifth for three (`python -m benchmarks.decode`)

The head's packed weight is a copy, for looking up needs the rows.  The form is for generation;
weights are no longer found by their checkpoint's names.

Tests: tests/test_inference_form.py.
"""

import torch
from torch import Tensor, nn

from nanogeex.model import Attention, CodeGeeX, PositionEmbedding
from nanogeex.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from nanogeex.vocab_parallel import VocabParallelEmbedding

ROWS = 8                # that the packed layout is made for; others are nearly as fast


@torch.no_grad()
def inference_form(model: CodeGeeX) -> CodeGeeX:
    """The model itself, changed in place, one weight at a time."""
    top = model.top_query_layer.attention
    positions = torch.arange(model.config.seq_length, device=model.mesh.device)
    table = PositionEmbedding(0, 0)
    table.weight = _kept(top.query(model.top_query_embeddings(positions)))      # (positions, H/tp)
    model.top_query_embeddings, top.query = table, nn.Identity()
    for block in [*model.layers, model.top_query_layer]:
        join(block.attention)
    if torch.backends.mkldnn.is_available() and model.mesh.device.type == "cpu":
        for module in model.modules():
            if type(module) in PACKED and module.weight.dtype == torch.float32:
                module.packed = _kept(torch.ops.mkldnn._reorder_linear_weight(module.weight, ROWS))
                module.__class__ = PACKED[type(module)]
                if not isinstance(module, PackedHead):
                    module.weight = None
    return model


def join(attention: Attention) -> None:
    """query, unless it is a table, key and value: (N, H) -> (N, 3 or 2 times H/tp)."""
    parts = [attention.query, attention.key, attention.value]
    if isinstance(attention.query, nn.Identity):
        parts = parts[1:]
    else:
        attention.query = None
    joined = parts[0]                           # of whatever class; it becomes all of them
    for name, _ in list(joined.named_parameters()):
        setattr(joined, name, _kept(torch.cat([getattr(part, name).data for part in parts])))
    attention.joined, attention.key, attention.value = joined, None, None


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, (..., I) -> (..., O), of a weight in the packed layout."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedColumn(ColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return packed_product(x, self.packed, self.bias)


class PackedRow(RowParallelLinear):
    def partial(self, x: Tensor) -> Tensor:
        return packed_product(x, self.packed, None)


class PackedHead(VocabParallelEmbedding):
    def logits(self, x: Tensor) -> Tensor:
        return packed_product(x, self.packed, None)


PACKED = {ColumnParallelLinear: PackedColumn, RowParallelLinear: PackedRow,
          VocabParallelEmbedding: PackedHead}


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
