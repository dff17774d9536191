"""LayerNorm of 16-bit tokens, in fp32.

torch's own kernel computes forward in fp32 whatever it is given.  Backward, it adds up the
gradients of weight and bias over all tokens in the input's 16 bits: off by 4% after 2,000 tokens of
bf16, on a CPU.  So backward is done here, in fp32, some tokens at a time: copies of all of them
would be the largest tensors of a block.

Tests: tests/test_model.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

EPS = 1e-5
TOKENS = 4096                           # in fp32 at a time


class LayerNorm(nn.Module):
    """Over the last dimension, EPS, in fp32 unless `low_precision`: (..., H) -> (..., H)."""

    TP_DIM = {"weight": None, "bias": None}

    def __init__(self, width: int, low_precision: bool):
        super().__init__()
        self.low_precision = low_precision
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.low_precision or x.dtype == torch.float32:
            return layernorm(x, self.weight, self.bias)
        return _LayerNormInFP32.apply(x, self.weight, self.bias)


class _LayerNormInFP32(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return layernorm(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        weight, bias = (parameter.float() for parameter in parameters)
        dx, totals = torch.empty_like(gradient), [torch.zeros_like(weight), torch.zeros_like(bias)]
        pieces = (tensor.split(TOKENS) for tensor in (x, gradient, dx))
        for part, d, out in zip(*pieces, strict=True):
            part, d, width = part.float(), d.float(), part.shape[-1:]
            _, mean, rstd = torch.native_layer_norm(part, width, weight, bias, EPS)
            found, *more = torch.ops.aten.native_layer_norm_backward(
                d, part, width, mean, rstd, weight, bias, [True, True, True])
            out.copy_(found)
            torch._foreach_add_(totals, more)
        return dx, *(total.to(x.dtype) for total in totals)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.dtype != x.dtype:                             # a file's, in fp32
        return layernorm(x.float(), weight.float(), bias.float()).to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
