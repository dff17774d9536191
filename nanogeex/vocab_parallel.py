"""The vocabulary on `tp` ranks: the embedding, and a loss that never holds its logits.

A rank owns V/tp rows of the word embedding.  Looking up, it finds its own ids and g adds up the
rest.  The head is the same table: its logits would be the largest tensor of all, 32,768 tokens of
CodeGeeX by 52,224 ids, 6.4 GiB in fp32.  But a token's loss needs three numbers,

      loss = log(sum of exp(logits - peak)) + peak - logit of the target

so the logits are made for CHUNK tokens at a time, reduced to these, and dropped; over tp they are
joined by two all-reduces, of N and 2N numbers, whatever the number of chunks.  Backward makes each
chunk again: softmax - onehot, times the incoming gradient, which carries the loss scale, so that
nothing small is ever rounded to 16 bits.

Tests: tests/test_tensor_parallel.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from nanogeex.mesh import Mesh
from nanogeex.tensor_parallel import leave_tp, split

CHUNK = 1024                            # tokens: 204 MiB of CodeGeeX's logits at tp 1, 26 at tp 8


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


class _HeadCrossEntropy(Function):
    @staticmethod
    def forward(ctx, x, weight, targets, mesh, chunk):
        local, elsewhere = local_ids(targets, weight.shape[0], mesh)
        peak = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)            # (N)
        sums = peak.new_empty(2, x.shape[0])                # exponentials; logit of the target
        for part in _chunks(x, chunk):
            logits = F.linear(x[part], weight).float()                                  # (n, V/tp)
            sums[1, part] = logits.gather(1, local[part, None]).squeeze(1)
            peak[part] = logits.amax(-1)
            sums[0, part] = logits.sub_(peak[part, None]).exp_().sum(-1)    # cannot overflow
            del logits                                      # before the next chunk's are there
        sums[1].masked_fill_(elsewhere, 0.0)
        if mesh.tp > 1:                                     # over all of V
            own = peak.clone()
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=mesh.tp_group)
            sums[0] *= (own - peak).exp()
            dist.all_reduce(sums, group=mesh.tp_group)
        normalizer = sums[0].log() + peak                                               # (N)
        ctx.save_for_backward(x, weight, local, elsewhere, normalizer)
        ctx.chunk = chunk
        return normalizer - sums[1]                                                     # (N)

    @staticmethod
    def backward(ctx, gradient):                                                        # (N)
        x, weight, local, elsewhere, normalizer = ctx.saved_tensors
        dx = torch.empty_like(x)                                                        # partial
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
        one = (~elsewhere).float()
        for part in _chunks(x, ctx.chunk):
            d = F.linear(x[part], weight).float().sub_(normalizer[part, None]).exp_()   # softmax
            d.scatter_add_(1, local[part, None], -one[part, None])
            d = d.mul_(gradient[part, None]).to(x.dtype)                                # (n, V/tp)
            dx[part] = d @ weight
            dweight += d.T @ x[part]
            del d
        return dx, dweight.to(weight.dtype), None, None, None


def _chunks(x: Tensor, chunk: int) -> list[slice]:
    return [slice(i, i + chunk) for i in range(0, x.shape[0], chunk)]


def head_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, mesh: Mesh,
                       chunk: int = CHUNK) -> Tensor:
    """-log softmax(x W^T)[target] in fp32: x (N, H) of all tokens, inside f; weight (V/tp, H);
    targets (N) -> losses (N), repeated.  A target outside the vocabulary raises on every rank."""
    return _HeadCrossEntropy.apply(x, weight, targets, mesh, chunk)
