"""Tensor parallelism: one layer on `tp` ranks (Megatron-LM, arXiv:1909.08053).

A pair of products is cut so that one sum is all that is left to do:

      x --f--> [ x W1' ] -> gelu -> [ . W2' ] --g--> + b2        rank 0 holds W1', W2'
        --f--> [ x W1" ] -> gelu -> [ . W2" ] --g--> + b2        rank 1 holds W1", W2"
               column-parallel       row-parallel
               (H) -> (4H/tp)        (4H/tp) -> (H)

x is repeated on all ranks; between the products a rank holds its own columns, or heads, and gelu or
attention needs no others; the last products are partial sums.  g adds them up: all-reduce forward,
identity backward.  f is its mirror: identity forward, all-reduce backward, since a rank's dL/dx
comes from its own columns only.  The row bias is added after g: before, it would count tp times.

Sequence parallelism (arXiv:2205.05198): an all-reduce is a reduce-scatter and an all-gather, and
what lies between g and the next f, LayerNorm, dropout, residual, works token by token.  So g leaves
each rank its own N/tp tokens and f brings all N together: the same bytes, and between them 1/tp of
the activations.  The x that f gathered is kept whole, for the weights' gradients; --recompute
selective keeps none of it, and gathers it again.

               f                                g
      forward  copy, or all-gather              all-reduce, or reduce-scatter
      backward all-reduce, or reduce-scatter    copy, or all-gather

The traffic does not shrink with tp: four sums of (N, H) a block, two forward, two backward;
--recompute full repeats one.  CodeGeeX-13B with 16 x 2,048 tokens in fp16 adds up 320 MiB 5 x 40
times, and twice more for embedding and head: 63 GiB a micro-batch.  Sizes are those of the whole
tensors: a rank of n sends (n-1)/n of that in a gather or reduce-scatter, twice it in an all-reduce.

Weights are plain local tensors.  A layer's TP_DIM says along which dimension of the whole tensor a
rank's piece is cut; None is a tensor that every rank holds whole, and whose gradient is, under
sequence parallelism, a summand: from this rank's tokens.  Letters: N tokens of a micro-batch, H
hidden, I inputs, O outputs.

Tests: tests/test_tensor_parallel.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from nanogeex.mesh import Mesh


def _all_gather(x: Tensor, mesh: Mesh) -> Tensor:          # (N/tp, H) -> (N, H)
    whole = x.new_empty(x.shape[0] * mesh.tp, *x.shape[1:])
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)    # since torch 2.13
    gather(whole, x.contiguous(), group=mesh.tp_group)
    return whole


def _start_sum(x: Tensor, mesh: Mesh, sequence_parallel: bool) -> tuple[Tensor, dist.Work]:
    """Begin to add up (N, H) over tp: into x itself or, for this rank's tokens, (N/tp, H)."""
    x = x.contiguous()
    if not sequence_parallel:
        return x, dist.all_reduce(x, group=mesh.tp_group, async_op=True)
    part = x.new_empty(x.shape[0] // mesh.tp, *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)    # since 2.13
    return part, scatter(part, x, group=mesh.tp_group, async_op=True)


def _sum(x: Tensor, mesh: Mesh, sequence_parallel: bool) -> Tensor:
    total, work = _start_sum(x, mesh, sequence_parallel)
    work.wait()
    return total


class _EnterTP(Function):
    @staticmethod
    def forward(ctx, x, mesh, sequence_parallel):
        ctx.mesh, ctx.sequence_parallel = mesh, sequence_parallel
        return _all_gather(x, mesh) if sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):                        # partial on each rank
        return _sum(gradient, ctx.mesh, ctx.sequence_parallel), None, None


class _LeaveTP(Function):
    @staticmethod
    def forward(ctx, x, mesh, sequence_parallel):       # partial on each rank
        ctx.mesh, ctx.sequence_parallel = mesh, sequence_parallel
        total = _sum(x, mesh, sequence_parallel)
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return _all_gather(gradient, ctx.mesh) if ctx.sequence_parallel else gradient, None, None


def enter_tp(x: Tensor, mesh: Mesh, sequence_parallel: bool = False) -> Tensor:
    """f: into the region where a rank holds its own columns of all tokens."""
    return x if mesh.tp == 1 else _EnterTP.apply(x, mesh, sequence_parallel)


def leave_tp(x: Tensor, mesh: Mesh, sequence_parallel: bool = False) -> Tensor:
    """g: out of it again, the partial sums added up."""
    return x if mesh.tp == 1 else _LeaveTP.apply(x, mesh, sequence_parallel)


class _ColumnProducts(Function):
    """f and the products that share it.  By hand, since autograd would hold a whole input gradient
    for each product, and would send their sum only when the weights' gradients are done, too."""

    @staticmethod
    def forward(ctx, x, mesh, sequence_parallel, *parameters):
        x = _all_gather(x, mesh) if sequence_parallel else x                    # (N, I)
        weights, biases = parameters[::2], parameters[1::2]
        ctx.mesh, ctx.sequence_parallel = mesh, sequence_parallel
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *gradients):                                              # (N, O/tp) each
        x, *weights = ctx.saved_tensors
        dx, work = gradients[0] @ weights[0], None                              # (N, I), partial
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx.addmm_(gradient, weight)
        if ctx.mesh.tp > 1:
            dx, work = _start_sum(dx, ctx.mesh, ctx.sequence_parallel)
        parameters = [part for gradient in gradients for part in (gradient.T @ x, gradient.sum(0))]
        if work is not None:
            work.wait()                                 # it went on beside the weights' products
        return dx, None, None, *parameters


def column_products(x: Tensor, layers: list["ColumnParallelLinear"], mesh: Mesh,
                    sequence_parallel: bool = False) -> tuple[Tensor, ...]:
    """f, once, and the products of several layers: (N or N/tp, I) -> (N, O/tp) each."""
    sequence_parallel = sequence_parallel and mesh.tp > 1
    if not x.requires_grad:                             # inference: layers may be of another class
        x = enter_tp(x, mesh, sequence_parallel)
        return tuple(layer(x) for layer in layers)
    parameters = [part for layer in layers for part in (layer.weight, layer.bias)]
    return _ColumnProducts.apply(x, mesh, sequence_parallel, *parameters)


class _Dropout(Function):
    """Keeps a seed, not a mask of (N, H): backward draws the mask again."""

    @staticmethod
    def forward(ctx, x, probability, seed):
        ctx.probability, ctx.seed = probability, seed
        return _mask(x, probability, seed).mul_(x)

    @staticmethod
    def backward(ctx, gradient):
        return _mask(gradient, ctx.probability, ctx.seed).mul_(gradient), None, None


def _mask(x: Tensor, probability: float, seed: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(seed)
    kept = torch.empty_like(x).bernoulli_(1 - probability, generator=generator)
    return kept.div_(1 - probability)


@torch.compiler.disable         # a number cannot be part of its graph, and it would warn of that
def drawn_seed() -> int:
    """The next number of the stream that all tp ranks share."""
    return torch.randint(2**62, ()).item()


def dropout(x: Tensor, probability: float, mesh: Mesh, sequence_parallel: bool) -> Tensor:
    """The same mask on all tp ranks where x is repeated; where each has tokens of its own, others.
    """
    if probability == 0:
        return x
    rank = mesh.tp_rank if sequence_parallel else 0
    return _Dropout.apply(x, probability, drawn_seed() + rank)


@contextmanager
def own_randomness(mesh: Mesh) -> Iterator[None]:
    """Random numbers drawn inside differ between the tp ranks; the stream outside stays the same
    on all.  The inner seed comes from the outer stream, so that recomputation, which is given the
    outer stream's state again, repeats both."""
    seed = drawn_seed()
    with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else []):
        torch.manual_seed(seed + mesh.tp_rank)
        yield


def split(size: int, mesh: Mesh) -> int:
    assert size % mesh.tp == 0, f"{size} does not divide by tp {mesh.tp}: check_shape comes first"
    return size // mesh.tp


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, the outputs split: (..., I) -> (..., O/tp).  `column_products` runs it."""

    TP_DIM = {"weight": 0, "bias": 0}

    def __init__(self, inputs: int, outputs: int, mesh: Mesh):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(split(outputs, mesh), inputs))   # (O/tp, I)
        self.bias = nn.Parameter(torch.empty(split(outputs, mesh)))             # (O/tp)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = g(x W^T) + b, the inputs split: (N, I/tp) -> (N, O), repeated on all ranks, or (N/tp, O).

    In two halves, so that recomputation can end between them, before the all-reduce."""

    TP_DIM = {"weight": 1, "bias": None}

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, sequence_parallel: bool = False):
        super().__init__()
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        self.weight = nn.Parameter(torch.empty(outputs, split(inputs, mesh)))   # (O, I/tp)
        self.bias = nn.Parameter(torch.empty(outputs))                          # (O)

    def partial(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)                     # (N, I/tp) -> (N, O), a summand

    def finish(self, partial: Tensor) -> Tensor:
        return leave_tp(partial, self.mesh, self.sequence_parallel).add_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.partial(x))
