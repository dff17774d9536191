"""The model made ready to generate: the same numbers, from fewer and better placed reads.

Each new token reads every weight once, and little is computed with it: speed is the bandwidth of
the memory, and what Python and torch take to start 150 operations.  So the forward here is flat,
and what can be known or joined before the first token is:

      top-query block   its queries see positions only: a table of them, (positions, H/tp), takes
                        the place of the embeddings and of the query projection
      query|key|value   one product of a block's input instead of three
      gelu              silu(1.702 x) / 1.702, whose factors fp32 weights take over
      on a CPU          weights lie as their product reads them: fp32 in panels of some outputs,
                        input after input; bf16, where the CPU multiplies it, in oneDNN's layout.
                        BLAS makes such a layout anew for each product of more than a row

The head's placed weight is a copy, for looking up needs the rows.  Rows of a batch end in the same
column of the cache, (blocks, 2, B, heads/tp, T_max, D); shorter ones begin with padding, which they
do not see and which their positions do not count.

Tests: tests/test_decoder.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nanogeex.attention import Attention
from nanogeex.layernorm import LayerNorm, layernorm
from nanogeex.mlp import MLP, gelu_
from nanogeex.model import Block, CodeGeeX
from nanogeex.precision import cpu_multiplies_bf16
from nanogeex.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from nanogeex.vocab_parallel import VocabParallelEmbedding

PANEL = 256             # outputs, at most


class Parts(NamedTuple):
    """Of a block, without the way through its modules."""

    norm1: tuple[Tensor, Tensor]
    joined: Callable[[Tensor], Tensor]          # (N, H) -> (N, 3 or 2 times H/tp)
    dense: Callable[[Tensor], Tensor]           # (N, H/tp) -> (N, H), a summand
    dense_bias: Tensor
    norm2: tuple[Tensor, Tensor]
    up: Callable[[Tensor], Tensor]              # (N, H) -> (N, 4H/tp)
    gelu: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]            # (N, 4H/tp) -> (N, H), a summand
    down_bias: Tensor


class Decoder(nn.Module):
    """Takes over the weights of `model`, one at a time: it is of no other use after that."""

    @torch.no_grad()
    def __init__(self, model: CodeGeeX):
        super().__init__()
        self.config, self.mesh = model.config, model.mesh
        self.dtype = model.word_embeddings.weight.dtype
        heads = model.config.num_attention_heads
        self.heads, self.head_size = heads // model.mesh.tp, model.config.hidden_size // heads
        top = model.top_query_layer.attention
        positions = torch.arange(model.config.seq_length, device=model.mesh.device)
        self.queries = top.query(model.top_query_embeddings(positions))         # (positions, H/tp)
        model.top_query_embeddings = top.query = None
        blocks = [*model.layers, model.top_query_layer]
        for block in blocks:
            join(block.attention)
        gelus = [fold(block.mlp) for block in blocks]
        if model.mesh.device.type == "cpu":
            for module in model.modules():
                place(module)
        self.model = model
        self.blocks = [parts(block, gelu) for block, gelu in zip(blocks, gelus, strict=True)]

    def empty_cache(self, batch: int, length: int) -> Tensor:
        """Room for the keys and values of `length` tokens."""
        shape = len(self.blocks), 2, batch, self.heads, length, self.head_size
        return torch.zeros(shape, dtype=self.dtype, device=self.mesh.device)

    def forward(self, ids: Tensor, cache: Tensor, start: int = 0, padding: Tensor | None = None,
                last: bool = False) -> Tensor:
        """ids (B, T), the tokens after `start` ones that the cache holds, and which join them ->
        logits (B, T, V/tp) or, with `last`, (B, 1, V/tp).  `padding` (B, 1), with T = 1: how many
        of a row's columns come before its prompt."""
        batch, length = ids.shape
        stop, mask = start + length, None
        positions = torch.arange(start, stop, device=ids.device)                # (T)
        if padding is not None:
            mask = (torch.arange(stop, device=ids.device) >= padding)[:, None, None]
            positions = (positions - padding).flatten()                         # (B)
        elif start and length > 1:                                  # token i sees start + i + 1
            mask = torch.ones(length, stop, dtype=torch.bool, device=ids.device).tril(start)
        x = self.model.word_embeddings(ids.flatten())                           # (N, H)
        x = x + F.embedding(positions, self.model.position_embeddings.weight).repeat(
            len(x) // len(positions), 1)
        query = F.embedding(positions, self.queries)                            # (T or N, H/tp)
        for block, kept in zip(self.blocks, cache[..., :stop, :], strict=True):
            if block is self.blocks[-1]:
                x = layernorm(x, *weights_of(self.model.final_layernorm))
            y = block.joined(layernorm(x, *block.norm1))
            y = y.view(batch, length, -1, self.heads, self.head_size).permute(2, 0, 3, 1, 4)
            kept[..., start:, :] = y[-2:]                           # (2, B, heads/tp, T, D)
            q = y[0]
            if block is self.blocks[-1]:                            # of all rows, or a row each
                q = query.view(-1, length, self.heads, self.head_size).transpose(1, 2)
                q = q.expand(batch, -1, -1, -1)
            y = F.scaled_dot_product_attention(
                q, kept[0], kept[1], attn_mask=mask, is_causal=start == 0 and length > 1)
            y = block.dense(y.transpose(1, 2).reshape(len(x), -1))
            x = self.summed(y).add_(block.dense_bias).add_(x)
            y = block.down(block.gelu(block.up(layernorm(x, *block.norm2))))
            x = self.summed(y).add_(block.down_bias).add_(x)
        if last:
            x = x.unflatten(0, (batch, length))[:, -1]                          # (B, H)
        return self.model.word_embeddings.logits(x).unflatten(0, (batch, -1))

    def summed(self, y: Tensor) -> Tensor:
        if self.mesh.tp > 1:
            dist.all_reduce(y, group=self.mesh.tp_group)
        return y


def parts(block: Block, gelu: Callable[[Tensor], Tensor]) -> Parts:
    attention, mlp = block.attention, block.mlp
    return Parts(
        weights_of(block.input_layernorm), attention.joined.forward, attention.dense.partial,
        attention.dense.bias, weights_of(block.post_attention_layernorm),
        mlp.dense_h_to_4h.forward, gelu, mlp.dense_4h_to_h.partial, mlp.dense_4h_to_h.bias)


def weights_of(norm: LayerNorm) -> tuple[Tensor, Tensor]:
    return norm.weight, norm.bias


def join(attention: Attention) -> None:
    """query, unless it is a table, key and value become one."""
    linears = [linear for linear in (attention.query, attention.key, attention.value) if linear]
    attention.query = attention.key = attention.value = None
    joined = linears[0]                         # of whatever class; it becomes all of them
    for name, _ in list(joined.named_parameters()):
        whole = torch.cat([getattr(linear, name).data for linear in linears])
        setattr(joined, name, nn.Parameter(whole, requires_grad=False))
    attention.joined = joined


def fold(mlp: MLP) -> Callable[[Tensor], Tensor]:
    """Returns what is left to do between the products.  16 bits would round the factors."""
    up, down = mlp.dense_h_to_4h, mlp.dense_4h_to_h
    if up.weight.dtype != torch.float32:
        return gelu_
    for tensor in (up.weight, up.bias):
        tensor.mul_(1.702)
    down.weight.div_(1.702)
    return partial(F.silu, inplace=True)


def place(module: nn.Module) -> None:
    if type(module) not in PLACED:
        return
    weight = module.weight.data                                 # (O, I)
    width = max(n for n in range(1, PANEL + 1) if len(weight) % n == 0)
    if weight.dtype == torch.float32 and width >= PANEL // 16:  # (O, I) -> (panels, I, width)
        module.placed = weight.view(-1, width, weight.shape[1]).transpose(1, 2).contiguous()
    elif weight.dtype == torch.bfloat16 and cpu_multiplies_bf16():
        module.placed = torch.ops.mkldnn._reorder_linear_weight(weight)
    else:
        return
    module.__class__ = PLACED[type(module)]
    if not isinstance(module, PlacedHead):
        module.weight = None


def product(x: Tensor, placed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, (N, I) -> (N, O)."""
    if placed.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, placed, bias, "none", [], "")
    panels, _, width = placed.shape
    x = x.expand(panels, -1, -1)
    if bias is None:
        y = torch.bmm(x, placed)                                # (panels, N, width)
    else:
        y = torch.baddbmm(bias.view(panels, 1, width), x, placed)
    return y.transpose(0, 1).flatten(1)


class PlacedColumn(ColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.placed, self.bias)


class PlacedRow(RowParallelLinear):
    def partial(self, x: Tensor) -> Tensor:
        return product(x, self.placed, None)


class PlacedHead(VocabParallelEmbedding):
    def logits(self, x: Tensor) -> Tensor:
        return product(x, self.placed, None)


PLACED = {ColumnParallelLinear: PlacedColumn, RowParallelLinear: PlacedRow,
          VocabParallelEmbedding: PlacedHead}
