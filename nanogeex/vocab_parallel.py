"""The vocabulary on `tp` ranks: the embedding, and a loss that never holds its logits.

A rank owns V/tp rows of the word embedding.  Looking up, it gives zeros for ids of other ranks, and
g adds up.  The head is the same table: its logits would be the largest tensor of all, 32,768 tokens
of CodeGeeX by 52,224 ids, 6.4 GiB in fp32.  But a token's loss needs three numbers,

      loss = log(sum of exp(logits - peak)) + peak - logit of the target

so the logits are made for some thousand tokens at a time, reduced to these, and dropped.  The
gradient, (softmax - onehot) times the token's weight, is ready where the softmax is: forward makes
it, too, in the logits' place, and backward only hands it on.  A token's weight has the loss scale
in it, so that its gradient is not too small when it is rounded to 16 bits.  Over tp the three
numbers of all tokens are joined first, the peaks by their maximum, then the two others by their
sums: two all-reduces, of N and 2N numbers, whatever the number of chunks.  Then the logits are made
once more.

Tests: tests/test_tensor_parallel.py.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from nanogeex.mesh import Mesh
from nanogeex.tensor_parallel import leave_tp, split

CHUNK = 4096                            # bytes of an id's logits: 1,024 tokens, 2,048 in 16 bits
ROWS = 256                              # of these in fp32 at a time, near to a CPU
# MKL chooses exp's kernel at the first call, and a second thread in that call may get one that is
# only near (pytorch issue 188792; one first loss was 1e-6 off): here the first is made, by one.
torch.ones(1).exp()


class VocabParallelEmbedding(nn.Module):
    """A table's rows by id, the rows split: ids (N) -> (N, H), repeated on all ranks, or (N/tp, H),
    this rank's tokens."""

    TP_DIM = {"weight": 0}

    def __init__(self, rows: int, width: int, mesh: Mesh, sequence_parallel: bool = False):
        super().__init__()
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        self.weight = nn.Parameter(torch.empty(split(rows, mesh), width))       # (V/tp, H)

    def forward(self, ids: Tensor) -> Tensor:
        if self.mesh.tp == 1:
            return F.embedding(ids, self.weight)
        local, elsewhere = local_ids(ids, self.weight.shape[0], self.mesh)
        mine = F.embedding(local, self.weight).masked_fill(elsewhere[..., None], 0.0)
        return leave_tp(mine, self.mesh, self.sequence_parallel)    # one rank's row is not zero

    def logits(self, x: Tensor) -> Tensor:
        """The tied head, inside f: (N, H) -> (N, V/tp)."""
        return F.linear(x, self.weight)


def local_ids(ids: Tensor, rows: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """ids -> this rank's row numbers, and which ids other ranks hold; those get row 0.  An id that
    no rank holds stays out of range on every rank, and the look-up that follows raises."""
    local = ids - mesh.tp_rank * rows
    elsewhere = ((local < 0) | (local >= rows)) & (ids >= 0) & (ids < rows * mesh.tp)
    return local.masked_fill(elsewhere, 0), elsewhere


class _HeadLoss(Function):
    @staticmethod
    def forward(ctx, x, weight, targets, weights, mesh, chunk, gradients):
        local, elsewhere = local_ids(targets, weight.shape[0], mesh)
        one, total = (~elsewhere).float(), torch.zeros((), dtype=torch.float32, device=x.device)
        numbers = _over_tp(x, weight, local, one, mesh, chunk) if mesh.tp > 1 else None
        if gradients:
            dx = torch.empty_like(x)                                            # partial over tp
            wide = torch.float32 if len(x) > chunk else None                    # to add up in
            dweight = torch.zeros_like(weight, dtype=wide)
        for part in _slices(0, len(x), chunk):
            logits = F.linear(x[part], weight)                                  # (n, V/tp)
            for some, rows in _rows(part, logits):
                e, ids = rows.float(), local[some, None]
                if mesh.tp > 1:
                    peak, sums, target = numbers[:, some]
                    e.sub_(peak[:, None]).exp_()
                else:
                    peak, sums, target = _three_numbers(e, ids)
                total += weights[some].dot(sums.log() + peak - target)
                if gradients:
                    e.mul_((weights[some] / sums)[:, None])                     # softmax
                    rows.copy_(e.scatter_add_(1, ids, -(weights * one)[some, None]))
            if gradients:                                                       # logits is dlogits
                dx[part] = logits @ weight
                dweight += logits.T @ x[part]
            del logits, rows, e                             # before the next chunk's are there
        ctx.gradients = (dx, dweight) if gradients else None
        return total

    @staticmethod
    def backward(ctx, gradient):                            # of a scalar: 1, as a rule
        (dx, dweight), ctx.gradients = ctx.gradients, None
        dweight = dweight.mul_(gradient).to(dx.dtype)
        return dx.mul_(gradient), dweight, None, None, None, None, None


def _three_numbers(e: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits (n, V/tp), which become exp(logits - peak): peak, sum of these, the target's."""
    peak, target = e.amax(-1), e.gather(1, ids).squeeze(1)
    return peak, e.sub_(peak[:, None]).exp_().sum(-1), target                   # cannot overflow


def _over_tp(x: Tensor, weight: Tensor, local: Tensor, one: Tensor, mesh: Mesh,
             chunk: int) -> Tensor:
    """The three numbers of each token, over all of V: (3, N)."""
    numbers = torch.empty(3, len(x), dtype=torch.float32, device=x.device)
    for part in _slices(0, len(x), chunk):
        for some, rows in _rows(part, F.linear(x[part], weight)):               # (ROWS, V/tp)
            torch.stack(_three_numbers(rows.float(), local[some, None]), out=numbers[:, some])
    numbers[2] *= one
    own = numbers[0].clone()
    dist.all_reduce(numbers[0], dist.ReduceOp.MAX, group=mesh.tp_group)
    numbers[1] *= (own - numbers[0]).exp()
    dist.all_reduce(numbers[1:], group=mesh.tp_group)
    return numbers


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def _rows(part: slice, logits: Tensor) -> Iterable[tuple[slice, Tensor]]:
    """The tokens `part`, ROWS at a time: which, and their logits."""
    return zip(_slices(part.start, part.stop, ROWS), logits.split(ROWS), strict=True)


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, mesh: Mesh,
              chunk: int | None = None) -> Tensor:
    """Sum over tokens of weights times -log softmax(x W^T)[target], a scalar in fp32, repeated:
    x (N, H) of all tokens, inside f; weight (V/tp, H); targets and weights (N).  A target outside
    the vocabulary raises on every rank."""
    gradients, chunk = torch.is_grad_enabled() and x.requires_grad, chunk or CHUNK // x.itemsize
    return _HeadLoss.apply(x, weight, targets, weights, mesh, chunk, gradients)
