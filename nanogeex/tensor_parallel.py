"""Tensor parallelism: one layer on `tp` ranks (Megatron-LM, arXiv:1909.08053).

A pair of products is cut so that one sum is all that is left to do:

      x --f--> [ x W1' ] -> gelu -> [ . W2' ] --g--> + b2        rank 0 holds W1', W2'
        --f--> [ x W1" ] -> gelu -> [ . W2" ] --g--> + b2        rank 1 holds W1", W2"
               column-parallel       row-parallel
               (H) -> (4H/tp)        (4H/tp) -> (H)

x is repeated on all ranks; between the products a rank holds its own columns; the last products are
partial sums.  g adds them up: all-reduce forward, identity backward.  f is its mirror: identity
forward, all-reduce backward, since a rank's dL/dx comes from its own columns only.  The row bias is
added after g: before it, it would be added tp times.

Weights are plain local tensors.  A layer's TP_DIM says along which dimension of the whole tensor a
rank's piece is cut; None is a tensor that every rank holds whole.  Letters: B batch, T tokens, H
hidden, V vocabulary, N = B * T.

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


class _CopyToTP(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):                        # partial on each rank
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)      # whole, repeated
        return gradient, None


class _ReduceFromTP(Function):
    @staticmethod
    def forward(ctx, x, group):                         # partial on each rank
        x = x.contiguous()
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)                 # whole, repeated
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def copy_to_tp(x: Tensor, mesh: Mesh) -> Tensor:
    """f: into the region where a rank holds its own columns; once for all products of an input."""
    return x if mesh.tp == 1 else _CopyToTP.apply(x, mesh.tp_group)


def reduce_from_tp(x: Tensor, mesh: Mesh) -> Tensor:
    """g: out of it again, the partial sums added up."""
    return x if mesh.tp == 1 else _ReduceFromTP.apply(x, mesh.tp_group)


@contextmanager
def own_randomness(mesh: Mesh) -> Iterator[None]:
    """Random numbers drawn inside differ between the tp ranks; the stream outside stays the same
    on all.  The inner seed comes from the outer stream, so that recomputation, which is given the
    outer stream's state again, repeats both."""
    seed = torch.randint(2**62, ()).item()
    with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else []):
        torch.manual_seed(seed + mesh.tp_rank)
        yield


def split(size: int, mesh: Mesh) -> int:
    assert size % mesh.tp == 0, f"{size} does not divide by tp {mesh.tp}: check_shape comes first"
    return size // mesh.tp


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, the outputs split: (..., I) -> (..., O/tp).  The caller applies f to x."""

    TP_DIM = {"weight": 0, "bias": 0}

    def __init__(self, inputs: int, outputs: int, mesh: Mesh):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(split(outputs, mesh), inputs))   # (O/tp, I)
        self.bias = nn.Parameter(torch.empty(split(outputs, mesh)))             # (O/tp)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = g(x W^T) + b, the inputs split: (..., I/tp) -> (..., O), repeated on all ranks.

    In two halves, so that recomputation can end between them, before the all-reduce."""

    TP_DIM = {"weight": 1, "bias": None}

    def __init__(self, inputs: int, outputs: int, mesh: Mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(torch.empty(outputs, split(inputs, mesh)))   # (O, I/tp)
        self.bias = nn.Parameter(torch.empty(outputs))                          # (O)

    def partial(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)                     # (..., I/tp) -> (..., O), a summand

    def finish(self, partial: Tensor) -> Tensor:
        return reduce_from_tp(partial, self.mesh) + self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.partial(x))


class VocabParallelEmbedding(nn.Module):
    """A table's rows by id, the rows split: ids (...) -> (..., H), repeated on all ranks."""

    TP_DIM = {"weight": 0}

    def __init__(self, rows: int, width: int, mesh: Mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(torch.empty(split(rows, mesh), width))       # (V/tp, H)

    def forward(self, ids: Tensor) -> Tensor:
        if self.mesh.tp == 1:
            return F.embedding(ids, self.weight)
        local, elsewhere = local_ids(ids, self.weight.shape[0], self.mesh)
        mine = F.embedding(local, self.weight).masked_fill(elsewhere[..., None], 0.0)
        return reduce_from_tp(mine, self.mesh)          # of each id, one rank's row is not zero


def local_ids(ids: Tensor, rows: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """ids -> this rank's row numbers, and which ids other ranks hold; those get row 0.  An id that
    no rank holds stays out of range on every rank, and the look-up that follows raises."""
    local = ids - mesh.tp_rank * rows
    elsewhere = ((local < 0) | (local >= rows)) & (ids >= 0) & (ids < rows * mesh.tp)
    return local.masked_fill(elsewhere, 0), elsewhere


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, targets, mesh):
        logits = logits.float()                                             # (N, V/tp)
        peak = logits.amax(-1)                                              # (N)
        if mesh.tp > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=mesh.tp_group)   # over all of V
        logits = logits - peak[:, None]                                     # exp() cannot overflow
        local, elsewhere = local_ids(targets, logits.shape[1], mesh)
        at_target = logits.gather(1, local[:, None]).squeeze(1).masked_fill(elsewhere, 0.0)
        exponentials = logits.exp_()                                        # (N, V/tp)
        sums = torch.stack([at_target, exponentials.sum(-1)])               # (2, N), partial
        if mesh.tp > 1:
            dist.all_reduce(sums, group=mesh.tp_group)                      # over all of V
        at_target, total = sums
        softmax = exponentials.div_(total[:, None])                         # (N, V/tp)
        ctx.save_for_backward(softmax, local, elsewhere)
        return total.log() - at_target                                      # (N), repeated

    @staticmethod
    def backward(ctx, gradient):                                            # (N), repeated
        softmax, local, elsewhere = ctx.saved_tensors
        one = (~elsewhere).to(softmax.dtype)
        softmax.scatter_add_(1, local[:, None], -one[:, None])              # softmax - onehot
        return softmax.mul_(gradient[:, None]), None, None                  # in place: runs once


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, mesh: Mesh) -> Tensor:
    """-log softmax(logits)[target] in fp32, the logits split over the vocabulary, never gathered:
    two all-reduces, of N and 2N numbers.  logits (N, V/tp), targets (N) -> losses (N), repeated.
    A target outside the vocabulary raises on every rank."""
    return _VocabParallelCrossEntropy.apply(logits, targets, mesh)
