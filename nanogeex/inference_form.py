"""A model made ready to decode: the same numbers, from fewer and better placed reads.

Each new token reads every weight once, and little is computed with it: speed is the bandwidth of
the memory.  What can be known or joined before the first token is:

      top-query block   its queries see positions only: a table of them, (positions, H/tp), takes
                        the place of the embeddings and of the query projection
      query|key|value   one product of a block's input instead of three
      fp32 on a CPU     a product with one row goes along the weight's longer side in memory: for
                        1 x 512 by 512 x 2048, 20 GB/s instead of 11

The form is for generation; weights are no longer found by their checkpoint's names.

Tests: tests/test_inference_form.py.
"""

import torch
from torch import Tensor, nn

from nanogeex.model import Attention, CodeGeeX, PositionEmbedding
from nanogeex.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from nanogeex.vocab_parallel import VocabParallelEmbedding


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
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            module.weight = _kept(longer_side_first(module.weight.data))
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


def longer_side_first(weight: Tensor) -> Tensor:
    """(O, I), stored column by column where columns are longer.  Other dtypes gain nothing."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or (
            weight.shape[0] <= weight.shape[1]):
        return weight
    return weight.t().contiguous().t()


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
