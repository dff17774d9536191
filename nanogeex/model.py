"""CodeGeeX (arXiv:2303.17568): a GPT whose last block asks by position.

      ids -> word + position embeddings
          -> num_layers x  [ x + attention(LN(x)) ;  x + ffn(LN(x)) ]         pre-LN blocks
          -> final LayerNorm
          -> top-query block: as above, but its queries come from a table of positions, the same for
             every sequence: "what is the next token here?"
          -> logits through the word embedding (tied)

Module names are those of the released checkpoint.  Under tensor parallelism a rank holds heads/tp
heads, 4H/tp columns of the FFN and V/tp rows of the vocabulary; the residual stream is repeated.
D is the size of a head.

Dropout follows what is split: on the residual stream all tp ranks draw the same mask, on their own
heads each draws its own.  Recomputation gets the random stream's state back, and so the masks.

Tests: tests/test_model.py.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanogeex.config import ModelConfig, TrainConfig
from nanogeex.mesh import Mesh
from nanogeex.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tp,
    own_randomness,
    vocab_parallel_cross_entropy,
)


class KeysValues(NamedTuple):
    """A block's cache.  Rows of a batch end together; shorter ones begin with padding."""

    keys: Tensor                            # (B, heads/tp, T_max, D)
    values: Tensor                          # (B, heads/tp, T_max, D)
    seen: Tensor | None = None              # (B, 1, 1, T_max), False is padding; None: no padding


def fast_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), by way of silu: one kernel forward and one backward."""
    return F.silu(1.702 * x) / 1.702


class LayerNorm(nn.Module):
    """Over the last dimension, eps 1e-5, in fp32 unless `low_precision`: (..., H) -> (..., H)."""

    TP_DIM = {"weight": None, "bias": None}

    def __init__(self, width: int, low_precision: bool):
        super().__init__()
        self.low_precision = low_precision
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype if self.low_precision else torch.float32
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, 1e-5).to(x.dtype)


class PositionEmbedding(nn.Module):
    """One row a position, repeated on all ranks: positions (..., T) -> (..., T, H)."""

    TP_DIM = {"weight": None}

    def __init__(self, positions: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, width))

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.weight)


class Attention(nn.Module):
    """(B, T, H) -> (B, T, H), a summand of each rank: the caller finishes `dense`."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dropout: float):
        super().__init__()
        self.dropout = dropout
        hidden = config.hidden_size
        self.mesh, self.head_size = mesh, hidden // config.num_attention_heads
        self.query = ColumnParallelLinear(hidden, hidden, mesh)
        self.key = ColumnParallelLinear(hidden, hidden, mesh)
        self.value = ColumnParallelLinear(hidden, hidden, mesh)
        self.dense = RowParallelLinear(hidden, hidden, mesh)
        self.joined = None                  # key, value and query in one, see inference_form.py

    def heads(self, x: Tensor) -> Tensor:               # (B, T, H/tp) -> (B, heads/tp, T, D)
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def forward(self, x: Tensor, query: Tensor | None, cache: KeysValues | None,
                start: int) -> Tensor:
        x = copy_to_tp(x, self.mesh)                                    # f, once for q, k and v
        asks = x if query is None else copy_to_tp(query, self.mesh)     # (B or 1, T, H)
        if self.joined is None:
            k, v, q = self.key(x), self.value(x), self.query(asks)
        else:
            k, v, *q = self.joined(x).split(self.dense.weight.shape[1], -1)
            q = q[0] if q else self.query(asks)
        q, k, v = self.heads(q), self.heads(k), self.heads(v)
        q = q.expand(x.shape[0], -1, -1, -1)                            # (B, heads/tp, T, D)
        stop = start + x.shape[1]
        if cache is not None:
            cache.keys[:, :, start:stop], cache.values[:, :, start:stop] = k, v
            k, v = cache.keys[:, :, :stop], cache.values[:, :, :stop]   # (B, heads/tp, stop, D)
        mask = None
        if 0 < start < stop - 1:                                        # token i sees start + i + 1
            mask = torch.ones(stop - start, stop, dtype=torch.bool, device=x.device).tril(start)
        elif start and cache.seen is not None:                          # a token a row
            mask = cache.seen[..., :stop]
        dropout = self.dropout if self.training else 0.0
        with own_randomness(self.mesh) if dropout else nullcontext():
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=start == 0)
        return self.dense.partial(y.transpose(1, 2).flatten(2))         # (B, T, H/tp) -> (B, T, H)


class MLP(nn.Module):
    """(B, T, H) -> (B, T, H), a summand of each rank: the caller finishes `dense_4h_to_h`."""

    def __init__(self, config: ModelConfig, mesh: Mesh):
        super().__init__()
        self.mesh = mesh
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, 4 * config.hidden_size, mesh)
        self.dense_4h_to_h = RowParallelLinear(4 * config.hidden_size, config.hidden_size, mesh)

    def forward(self, x: Tensor) -> Tensor:             # (B, T, H) -> (B, T, 4H/tp) -> (B, T, H)
        y = fast_gelu(self.dense_h_to_4h(copy_to_tp(x, self.mesh)))
        return self.dense_4h_to_h.partial(y)


@dataclass(frozen=True)
class Options:
    """How a model runs, not what it is: TrainConfig's fields of the same names."""

    ln_fp16: bool = False
    recompute: str = "none"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig) -> "Options":
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


class Block(nn.Module):
    """(B, T, H) -> (B, T, H), repeated on all tp ranks; a `query` (1, T, H) makes it top-query.

    What recomputation keeps (arXiv:2205.05198), and the all-reduces that it runs again:

          x -> [ LN, attention ] -> g, +b, +x -> [ LN, FFN ] -> g, +b, +x ->
      full       |------------------ one region -----------------------|     x; the first g
      selective  |--- region ---|               |- region -|                 two inputs; none
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, options: Options):
        super().__init__()
        self.recompute, self.dropout = options.recompute, options.hidden_dropout
        self.draws = options.hidden_dropout > 0 or options.attention_dropout > 0
        ln_fp16 = options.ln_fp16
        self.input_layernorm = LayerNorm(config.hidden_size, ln_fp16)
        self.attention = Attention(config, mesh, options.attention_dropout)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, ln_fp16)
        self.mlp = MLP(config, mesh)

    def forward(self, x: Tensor, query: Tensor | None = None, cache: KeysValues | None = None,
                start: int = 0) -> Tensor:
        return self.region("full", self.block, x, query, cache, start)

    def region(self, kind: str, run: Callable[..., Tensor], *inputs) -> Tensor:
        """run(*inputs), and once more in backward if this kind of recomputation is asked for."""
        if self.recompute != kind or not torch.is_grad_enabled():
            return run(*inputs)
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=self.draws)

    def block(self, x: Tensor, query: Tensor | None, cache: KeysValues | None,
              start: int) -> Tensor:
        y = self.region("selective", self.attend, x, query, cache, start)           # summands
        x = x + F.dropout(self.attention.dense.finish(y), self.dropout, self.training)
        y = self.region("selective", self.feed_forward, x)                          # summands
        return x + F.dropout(self.mlp.dense_4h_to_h.finish(y), self.dropout, self.training)

    def attend(self, x: Tensor, query: Tensor | None, cache: KeysValues | None,
               start: int) -> Tensor:
        return self.attention(self.input_layernorm(x), query, cache, start)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))


class CodeGeeX(nn.Module):
    """One tp rank's share of the model.  Built on the meta device, then filled in place."""

    def __init__(self, config: ModelConfig, mesh: Mesh, options: Options | None = None):
        super().__init__()
        options = options or Options()
        self.config, self.mesh, self.dropout = config, mesh, options.hidden_dropout
        hidden, positions = config.hidden_size, config.seq_length
        self.word_embeddings = VocabParallelEmbedding(config.padded_vocab_size, hidden, mesh)
        self.position_embeddings = PositionEmbedding(positions, hidden)
        self.layers = nn.ModuleList(
            Block(config, mesh, options) for _ in range(config.num_layers))
        self.final_layernorm = LayerNorm(hidden, options.ln_fp16)
        self.top_query_embeddings = VocabParallelEmbedding(positions, hidden, mesh)
        self.top_query_layer = Block(config, mesh, options)

    def forward(self, ids: Tensor, targets: Tensor | None = None, weights: Tensor | None = None,
                cache: list[KeysValues] | None = None, start: int = 0,
                positions: Tensor | None = None, last: bool = False) -> Tensor:
        """ids (B, T) -> logits (B, T, V/tp), this rank's rows of the vocabulary; with `last`, those
        of the last token alone, (B, 1, V/tp).

        With `targets` and `weights` (B, T): the sum over all tokens of weight times loss, a scalar
        in fp32, repeated on all tp ranks; weight 0 masks a target.  With a `cache` that holds
        `start` tokens, ids are the tokens from there on, and join them; where rows begin with
        padding, `positions` (B, T) tells theirs."""
        if positions is None:
            positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        caches = cache or [None] * (len(self.layers) + 1)
        x = self.word_embeddings(ids) + self.position_embeddings(positions)         # (B, T, H)
        x = F.dropout(x, self.dropout, self.training)
        for i, layer in enumerate(self.layers):
            x = layer(x, cache=caches[i], start=start)
        query = self.top_query_embeddings(positions)                        # (B or 1, T, H)
        x = self.top_query_layer(self.final_layernorm(x), query, caches[-1], start)
        x = x[:, -1:] if last else x
        logits = F.linear(copy_to_tp(x, self.mesh), self.word_embeddings.weight)    # (B, T, V/tp)
        if targets is None:
            return logits
        losses = vocab_parallel_cross_entropy(logits.flatten(0, 1), targets.flatten(), self.mesh)
        return (losses * weights.flatten()).sum()                                   # (B T) -> ()

    def empty_cache(self, batch: int, length: int, dtype: torch.dtype) -> list[KeysValues]:
        """Room for the keys and values of `length` tokens, a pair a block."""
        heads = self.config.num_attention_heads
        shape = (batch, heads // self.mesh.tp, length, self.config.hidden_size // heads)
        return [KeysValues(*torch.zeros(2, *shape, dtype=dtype, device=self.mesh.device))
                for _ in range(len(self.layers) + 1)]
