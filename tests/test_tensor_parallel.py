"""Each parallel layer and the loss against their dense twins: values and gradients, 16 tokens."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanogeex import vocab_parallel
from nanogeex.mesh import Mesh, all_reduce_sum
from nanogeex.parameters import piece
from nanogeex.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_products,
    enter_tp,
)
from nanogeex.vocab_parallel import VocabParallelEmbedding, head_loss
from tests.ranks import on_ranks

N, H, OUT, V = 16, 16, 24, 40
TP = pytest.mark.parametrize("tp", [1, 2, 4])


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def filled(layer, mesh, **whole):
    """The layer with this rank's pieces of the given whole tensors."""
    layer.double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(piece(whole[name], layer.TP_DIM[name], mesh))
    return layer


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def slice_of(mesh, whole, dim):
    return whole.chunk(mesh.tp, dim)[mesh.tp_rank]


def tokens(mesh, whole, sequence_parallel):
    """What this rank holds of the stream: all tokens, or its own."""
    return slice_of(mesh, whole, 0) if sequence_parallel else whole


def summed(mesh, gradient, sequence_parallel):
    return all_reduce_sum(gradient, mesh.tp_group) if sequence_parallel else gradient


def column(mesh, sequence_parallel):
    """Two products of one input."""
    x, w1, b1, w2, b2, d1, d2 = tensors(
        (N, H), (OUT, H), (OUT,), (V, H), (V,), (N, OUT), (N, V))
    layers = [filled(ColumnParallelLinear(H, outputs, mesh), mesh, weight=weight, bias=bias)
              for outputs, weight, bias in ((OUT, w1, b1), (V, w2, b2))]
    mine = tokens(mesh, x, sequence_parallel).clone().requires_grad_()
    with torch.no_grad():
        unrecorded = column_products(mine, layers, mesh, sequence_parallel)
    y1, y2 = column_products(mine, layers, mesh, sequence_parallel)
    torch.autograd.backward([y1, y2], [slice_of(mesh, d1, -1), slice_of(mesh, d2, -1)])
    for tensor in (x, w1, b1, w2, b2):
        tensor.requires_grad_()
    e1, e2 = F.linear(x, w1, b1), F.linear(x, w2, b2)
    torch.autograd.backward([e1, e2], [d1, d2])
    same(mine.grad, tokens(mesh, x.grad, sequence_parallel))        # needs f's reduction
    for y, again, expected, layer, weight, bias in (
            (y1, unrecorded[0], e1, layers[0], w1, b1), (y2, unrecorded[1], e2, layers[1], w2, b2)):
        same(y, slice_of(mesh, expected, -1))
        same(again, y)
        same(layer.weight.grad, slice_of(mesh, weight.grad, 0))
        same(layer.bias.grad, slice_of(mesh, bias.grad, 0))


def row(mesh, sequence_parallel):
    x, weight, bias, seed = tensors((N, H), (OUT, H), (OUT,), (N, OUT))
    layer = filled(RowParallelLinear(H, OUT, mesh, sequence_parallel), mesh,
                   weight=weight, bias=bias)
    mine = slice_of(mesh, x, -1).clone().requires_grad_()
    y = layer(mine)
    y.backward(tokens(mesh, seed, sequence_parallel))
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    expected = F.linear(x, weight, bias)
    expected.backward(seed)
    same(y, tokens(mesh, expected, sequence_parallel))      # the bias once, not tp times
    same(mine.grad, slice_of(mesh, x.grad, -1))
    same(layer.weight.grad, slice_of(mesh, weight.grad, 1))
    same(summed(mesh, layer.bias.grad, sequence_parallel), bias.grad)


def embedding(mesh, sequence_parallel):
    weight, seed = tensors((V, H), (N, H))
    ids = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    layer = filled(VocabParallelEmbedding(V, H, mesh, sequence_parallel), mesh, weight=weight)
    y = layer(ids)
    y.backward(tokens(mesh, seed, sequence_parallel))
    expected = F.embedding(ids, weight.requires_grad_())
    expected.backward(seed)
    same(y, tokens(mesh, expected, sequence_parallel))
    same(layer.weight.grad, slice_of(mesh, weight.grad, 0))


def head(mesh, sequence_parallel, spread=1.0, chunk=5, dtype=torch.float64):
    """16 tokens in chunks of 5, 2 of them in fp32 at a time: the last ones are short."""
    vocab_parallel.ROWS = 2                                 # in this process alone
    x, weight, seed = tensors((N, H), (V, H), (N,))
    x, weight = (x * spread).to(dtype), weight.to(dtype)
    targets = torch.arange(N) * 7 % V                       # some on every rank
    mine = tokens(mesh, x, sequence_parallel).clone().requires_grad_()
    rows = slice_of(mesh, weight, 0).clone().requires_grad_()
    inside = enter_tp(mine, mesh, sequence_parallel)
    loss = head_loss(inside, rows, targets, seed.float(), mesh, chunk)
    assert loss == head_loss(inside.detach(), rows, targets, seed.float(), mesh, chunk)
    loss.backward()
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.cross_entropy(x @ weight.T, targets, reduction="none") @ seed
    expected.backward()
    tolerance = 1e-2 if dtype == torch.float16 else 1e-5 * spread       # the loss computes in fp32
    close = dict(rtol=tolerance, atol=tolerance, check_dtype=False)
    torch.testing.assert_close(loss, expected, **close)
    torch.testing.assert_close(mine.grad, tokens(mesh, x.grad, sequence_parallel), **close)
    torch.testing.assert_close(rows.grad, slice_of(mesh, weight.grad, 0), **close)


@TP
@pytest.mark.parametrize("work", [column, row, embedding, head])
def test_layer_equals_dense(work, tp):
    on_ranks(tp, tp, work, False)


@pytest.mark.parametrize("work", [column, row, embedding, head])
def test_split_tokens_equal_dense(work):
    on_ranks(4, 4, work, True)


@TP
def test_large_logits(tp):
    on_ranks(tp, tp, head, False, 300.0)                    # exp() of them would overflow


@pytest.mark.parametrize("chunk", [5, N])
def test_head_in_fp16(chunk):
    on_ranks(2, 2, head, False, 1.0, chunk, torch.float16)


def small_gradients(scale):
    """Of the head in fp16, of one loss in a long step, with the loss scaled and then unscaled."""
    x, weight = (tensor.half().requires_grad_() for tensor in tensors((N, H), (V, H)))
    weights = torch.full((N,), 1e-7 * scale)
    head_loss(x * 1.0, weight, torch.arange(N), weights, Mesh(), 5).backward()
    return x.grad.float() / scale, weight.grad.float() / scale


def test_the_loss_scale_keeps_fp16_gradients_in_range():
    for scaled, lost, true in zip(small_gradients(2.0**20), small_gradients(1.0),
                                  small_gradients(2.0**23), strict=True):
        assert (lost == 0).float().mean() > 0.1
        torch.testing.assert_close(scaled, true, rtol=0.02, atol=1e-10)


def chunked(mesh, chunk):
    """Collectives of a loss, and the largest tensor that its forward and backward make."""
    x, weight = (tensor.float().requires_grad_() for tensor in tensors((N, H), (V, H)))
    rows, sizes, counts, true = slice_of(mesh, weight, 0), [], [], dist.all_reduce

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is not torch.ops.aten.t.default and getattr(out, "shape", ())[1:] == (V // 2,):
                sizes.append(out.shape[0])
            return out

    dist.all_reduce = lambda *args, **keywords: counts.append(1) or true(*args, **keywords)
    with Largest():
        head_loss(x, rows, torch.arange(N), torch.ones(N), mesh, chunk).backward()
    return len(counts), max(sizes)


@pytest.mark.parametrize("chunk", [3, 16])
def test_chunks_bound_the_logits_and_not_the_collectives(chunk):
    assert on_ranks(2, 2, chunked, chunk) == [(2, chunk)] * 2


def outside(mesh, id_):
    layer = filled(VocabParallelEmbedding(V, H, mesh), mesh, weight=torch.zeros(V, H))
    with pytest.raises((IndexError, RuntimeError)):
        layer(torch.tensor([0, id_]))
    with pytest.raises((IndexError, RuntimeError)):
        head_loss(torch.zeros(2, H), torch.zeros(V // mesh.tp, H), torch.tensor([0, id_]),
                  torch.ones(2), mesh)


@TP
@pytest.mark.parametrize("id_", [-1, V, 10 * V])
def test_id_outside_vocabulary_raises_on_every_rank(tp, id_):
    on_ranks(tp, tp, outside, id_)
