"""CodeGeeX (arXiv:2303.17568): a GPT whose last block asks by position.

      ids -> word + position embeddings
          -> num_layers x  [ x + attention(LN(x)) ;  x + ffn(LN(x)) ]         pre-LN blocks
          -> final LayerNorm
          -> top-query block: as above, but its queries come from a table of positions, the same for
             every sequence: "what is the next token here?"
          -> logits through the word embedding (tied)

Module names are those of the released checkpoint.  Under tensor parallelism a rank holds heads/tp
heads, 4H/tp columns of the FFN and V/tp rows of the vocabulary.  The residual stream is a list of
N = B * T tokens, (N, H), the same on all tp ranks or, under sequence parallelism, (N/tp, H), a rank
its own.

Dropout follows what is split: where all tp ranks hold the same they draw the same mask, on heads
and tokens of their own each draws its own.  Recomputation gets the random stream's state back, and
so the masks.

Tests: tests/test_model.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanogeex.attention import Attention
from nanogeex.config import ModelConfig, TrainConfig
from nanogeex.layernorm import LayerNorm
from nanogeex.mesh import Mesh
from nanogeex.mlp import MLP
from nanogeex.tensor_parallel import RowParallelLinear, dropout, enter_tp
from nanogeex.vocab_parallel import VocabParallelEmbedding, head_loss


class PositionEmbedding(nn.Module):
    """One row a position, repeated on all ranks: positions (N) -> (N, H)."""

    TP_DIM = {"weight": None}

    def __init__(self, positions: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, width))

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.weight)


@dataclass(frozen=True)
class Options:
    """How a model runs, not what it is: TrainConfig's fields of the same names."""

    ln_fp16: bool = False
    recompute: str = "none"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    sequence_parallel: bool = False

    @classmethod
    def of(cls, config: TrainConfig) -> "Options":
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


class Block(nn.Module):
    """(N or N/tp, H) -> the same, N tokens of `batch` sequences; a `query` (T, H), repeated on all
    tp ranks, makes it top-query.

    What recomputation keeps, and the all-reduces that it runs again (arXiv:2205.05198, where
    selective is the middle of attention only):

          x -> [ LN, attention ] -> g, +b, +x -> [ LN, FFN ] -> g, +b, +x ->
      full       |------------------ one region -----------------------|     x; the first g
      selective  |--- region ---|               |- region -|                 two inputs; none,
                                                  but f's gathers under sequence parallelism
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, options: Options):
        super().__init__()
        self.mesh, self.sequence_parallel = mesh, options.sequence_parallel
        self.recompute, self.dropout = options.recompute, options.hidden_dropout
        self.draws = options.hidden_dropout > 0 or options.attention_dropout > 0
        ln_fp16 = options.ln_fp16
        self.input_layernorm = LayerNorm(config.hidden_size, ln_fp16)
        self.attention = Attention(
            config.hidden_size, config.num_attention_heads, mesh, options.sequence_parallel,
            options.attention_dropout)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, ln_fp16)
        self.mlp = MLP(config.hidden_size, mesh, options.sequence_parallel,
                       again=options.recompute == "none")

    def forward(self, x: Tensor, batch: int, query: Tensor | None = None) -> Tensor:
        return self.region("full", self.block, x, batch, query)

    def region(self, kind: str, run: Callable[..., Tensor], *inputs) -> Tensor:
        """run(*inputs), and once more in backward if this kind of recomputation is asked for."""
        if self.recompute != kind or not torch.is_grad_enabled():
            return run(*inputs)
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=self.draws)

    def block(self, x: Tensor, batch: int, query: Tensor | None) -> Tensor:
        x = self.add(x, self.attention.dense, self.region(
            "selective", self.attend, x, batch, query))
        return self.add(x, self.mlp.dense_4h_to_h, self.region("selective", self.feed_forward, x))

    def add(self, x: Tensor, layer: RowParallelLinear, summands: Tensor) -> Tensor:
        """The residual: x + dropout(g(summands) + b).  In y's memory: x may be kept
        for a gradient."""
        probability = self.dropout if self.training else 0.0
        y = layer.finish(summands)
        return dropout(y, probability, self.mesh, self.sequence_parallel).add_(x)

    def attend(self, x: Tensor, batch: int, query: Tensor | None) -> Tensor:
        return self.attention(self.input_layernorm(x), batch, query)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))


class CodeGeeX(nn.Module):
    """One tp rank's share of the model.  Built on the meta device, then filled in place."""

    def __init__(self, config: ModelConfig, mesh: Mesh, options: Options | None = None):
        super().__init__()
        options = options or Options()
        self.config, self.mesh, self.dropout = config, mesh, options.hidden_dropout
        self.sequence_parallel = options.sequence_parallel and mesh.tp > 1
        hidden, positions = config.hidden_size, config.seq_length
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size, hidden, mesh, self.sequence_parallel)
        self.position_embeddings = PositionEmbedding(positions, hidden)
        self.layers = nn.ModuleList(
            Block(config, mesh, options) for _ in range(config.num_layers))
        self.final_layernorm = LayerNorm(hidden, options.ln_fp16)
        self.top_query_embeddings = VocabParallelEmbedding(positions, hidden, mesh)
        self.top_query_layer = Block(config, mesh, options)

    def forward(self, ids: Tensor, targets: Tensor | None = None,
                weights: Tensor | None = None) -> Tensor:
        """ids (B, T) -> logits (B, T, V/tp), this rank's rows of the vocabulary.

        With `targets` and `weights` (B, T): the sum over all tokens of weight times loss, a scalar
        in fp32, repeated on all tp ranks; weight 0 masks a target."""
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device)                         # (T)
        mine = positions.repeat(batch)                  # (N), of the tokens of this rank's stream
        if self.sequence_parallel:
            mine = mine.chunk(self.mesh.tp)[self.mesh.tp_rank]                      # (N/tp)
        x = self.word_embeddings(ids.flatten()) + self.position_embeddings(mine)
        probability = self.dropout if self.training else 0.0
        x = dropout(x, probability, self.mesh, self.sequence_parallel)
        for layer in self.layers:
            x = layer(x, batch)
        query = self.top_query_embeddings(positions)                                # (T, H)
        x = self.top_query_layer(self.final_layernorm(x), batch, query)
        x = enter_tp(x, self.mesh, self.sequence_parallel)                          # (N, H)
        if targets is None:
            return self.word_embeddings.logits(x).unflatten(0, (batch, length))
        return head_loss(x, self.word_embeddings.weight, targets.flatten(), weights.flatten(),
                         self.mesh)
