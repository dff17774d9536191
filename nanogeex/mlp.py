"""The feed-forward half of a block: (H) -> (4H/tp) -> gelu -> (H).

Its middle is the widest tensor of a block, and autograd would keep it twice: before the gelu, for
the gelu's gradient, and after it, for the second weight's.  The second is quickly made from the
first, so backward makes it again: a fifth less to keep, for 1% of the time.  Not so where whole
blocks are made again: that ends at the last tensor that is kept, which here is before the product.

CodeGeeX's gelu is x * sigmoid(1.702 x) = silu(1.702 x) / 1.702, and its derivative silu'(1.702 x).

Tests: tests/test_model.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from nanogeex.mesh import Mesh
from nanogeex.tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_products


def gelu_(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), which leaves 1.702 x in x's memory."""
    return F.silu(x.mul_(1.702)).div_(1.702)


class _Gelu(Function):
    """Takes over x's memory: nobody else keeps x."""

    @staticmethod
    def forward(ctx, x):
        y = gelu_(x)
        ctx.save_for_backward(x)                                        # 1.702 x
        return y

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.aten.silu_backward(gradient, *ctx.saved_tensors)


class _GeluProduct(Function):
    """gelu(x) W^T, (N, 4H/tp) -> (N, H), of which only x is kept."""

    @staticmethod
    def forward(ctx, x, weight):
        y = F.linear(gelu_(x), weight)
        ctx.save_for_backward(x, weight)                                # 1.702 x
        return y

    @staticmethod
    def backward(ctx, gradient):                                        # (N, H)
        x, weight = ctx.saved_tensors
        dweight = gradient.T @ F.silu(x).div_(1.702)
        dx = gradient @ weight                                          # of the gelu, then of x
        return torch.ops.aten.silu_backward.grad_input(dx, x, grad_input=dx), dweight


class MLP(nn.Module):
    """(N or N/tp, H) -> (N, H), a summand of each rank: the caller finishes `dense_4h_to_h`.
    `again`: backward makes the gelu again."""

    def __init__(self, hidden: int, mesh: Mesh, sequence_parallel: bool, again: bool):
        super().__init__()
        self.mesh, self.sequence_parallel, self.again = mesh, sequence_parallel, again
        self.dense_h_to_4h = ColumnParallelLinear(hidden, 4 * hidden, mesh)
        self.dense_4h_to_h = RowParallelLinear(4 * hidden, hidden, mesh, sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:             # (N, H) -> (N, 4H/tp) -> (N, H)
        x, = column_products(x, [self.dense_h_to_4h], self.mesh, self.sequence_parallel)
        if x.requires_grad and self.again:
            return _GeluProduct.apply(x, self.dense_4h_to_h.weight)
        return self.dense_4h_to_h.partial(_Gelu.apply(x))
