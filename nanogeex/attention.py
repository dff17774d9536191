"""The attention half of a block: (H) -> heads/tp of D -> softmax(q k^T / sqrt(D), causal) v -> (H).

The middle is torch's kernel, which never holds a whole (T, T).  On a CPU its backward works, in 16
bits, on 32 or 64 queries of a head at a time, unless there are 768, and it is a fifth of a training
step.  Up to SHORT tokens the plain formula, for all heads of a sample at once, is faster: 0.4 of
the time, forward and backward, for 128 tokens, 0.7 for 256, 0.85 for 512.

      s = q k^T / sqrt(D)             dv = p^T dy
      p = softmax(s)                  ds = p (dp - sum over keys of p dp),    dp = dy v^T
      y = p v                         dq = ds k / sqrt(D),    dk = ds^T q / sqrt(D)

Tests: tests/test_model.py.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from nanogeex.mesh import Mesh
from nanogeex.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_products,
    own_randomness,
)

SHORT = 512                             # tokens


class _ShortAttention(Function):
    """Causal, of q, k, v (B, heads, T, D)."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def backward(ctx, gradient):
        inputs = ctx.saved_tensors
        found = tuple(torch.empty_like(tensor) for tensor in inputs)
        length, scale = inputs[0].shape[-2], inputs[0].shape[-1]**-0.5
        future = torch.full((length, length), float("-inf")).triu_(1)
        for q, k, v, d, dq, dk, dv in zip(*inputs, gradient, *found, strict=True):  # (heads, T, D)
            scores = torch.baddbmm(future, q.float(), k.float().mT, alpha=scale)    # (heads, T, T)
            p = scores.softmax(-1).to(q.dtype)
            dscores = torch.ops.aten._softmax_backward_data(d @ v.mT, p, -1, p.dtype)
            torch.mul(dscores @ k, scale, out=dq)
            torch.mul(dscores.mT @ q, scale, out=dk)
            dv.copy_(p.mT @ d)
        return found


class Attention(nn.Module):
    """`batch` sequences, (N or N/tp, H) -> (N, H), a summand: the caller finishes `dense`."""

    def __init__(self, hidden: int, heads: int, mesh: Mesh, sequence_parallel: bool,
                 dropout: float):
        super().__init__()
        self.mesh, self.sequence_parallel, self.dropout = mesh, sequence_parallel, dropout
        self.head_size = hidden // heads
        self.query = ColumnParallelLinear(hidden, hidden, mesh)
        self.key = ColumnParallelLinear(hidden, hidden, mesh)
        self.value = ColumnParallelLinear(hidden, hidden, mesh)
        self.dense = RowParallelLinear(hidden, hidden, mesh, sequence_parallel)

    def heads(self, x: Tensor, batch: int) -> Tensor:   # (B T, H/tp) -> (B, heads/tp, T, D)
        return x.unflatten(-1, (-1, self.head_size)).unflatten(0, (batch, -1)).transpose(1, 2)

    def forward(self, x: Tensor, batch: int, query: Tensor | None) -> Tensor:
        layers = [self.query, self.key, self.value] if query is None else [self.key, self.value]
        *q, k, v = column_products(x, layers, self.mesh, self.sequence_parallel)
        if query is None:
            q = self.heads(q[0], batch)                                 # (B, heads/tp, T, D)
        else:                                                           # once for all sequences
            q = self.heads(*column_products(query, [self.query], self.mesh), 1)
            q = q.expand(batch, -1, -1, -1)
        y = self.attend(q, self.heads(k, batch), self.heads(v, batch))
        return self.dense.partial(y.transpose(1, 2).flatten(2).flatten(0, 1))   # of (N, H/tp)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:        # (B, heads/tp, T, D) each
        probability = self.dropout if self.training else 0.0
        if probability == 0 and slow_backward(q):
            return _ShortAttention.apply(q, k, v)
        with own_randomness(self.mesh) if probability else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, dropout_p=probability, is_causal=True)


def slow_backward(q: Tensor) -> bool:
    """Whether torch's kernel would be.  A dry run's fake tensors stand for those of a GPU."""
    return (type(q) is Tensor and q.device.type == "cpu" and q.itemsize == 2
            and q.shape[-2] <= SHORT and not torch.compiler.is_compiling())
