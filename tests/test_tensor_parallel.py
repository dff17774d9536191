"""Each parallel layer and the loss against their dense twins: values and gradients, batch 3."""

import pytest
import torch
import torch.nn.functional as F

from nanogeex.parameters import piece
from nanogeex.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tp,
    vocab_parallel_cross_entropy,
)
from tests.ranks import on_ranks

B, T, H, OUT, V = 3, 5, 16, 24, 40
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


def column(mesh):
    x, weight, bias, seed = tensors((B, T, H), (OUT, H), (OUT,), (B, T, OUT))
    layer = filled(ColumnParallelLinear(H, OUT, mesh), mesh, weight=weight, bias=bias)
    mine = x.clone().requires_grad_()
    y = layer(copy_to_tp(mine, mesh))
    y.backward(slice_of(mesh, seed, -1))
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    expected = F.linear(x, weight, bias)
    expected.backward(seed)
    same(y, slice_of(mesh, expected, -1))
    same(mine.grad, x.grad)                                 # needs f's all-reduce
    same(layer.weight.grad, slice_of(mesh, weight.grad, 0))
    same(layer.bias.grad, slice_of(mesh, bias.grad, 0))


def row(mesh):
    x, weight, bias, seed = tensors((B, T, H), (OUT, H), (OUT,), (B, T, OUT))
    layer = filled(RowParallelLinear(H, OUT, mesh), mesh, weight=weight, bias=bias)
    mine = slice_of(mesh, x, -1).clone().requires_grad_()
    y = layer(mine)
    y.backward(seed)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    expected = F.linear(x, weight, bias)
    expected.backward(seed)
    same(y, expected)                                       # the bias once, not tp times
    same(mine.grad, slice_of(mesh, x.grad, -1))
    same(layer.weight.grad, slice_of(mesh, weight.grad, 1))
    same(layer.bias.grad, bias.grad)


def embedding(mesh):
    weight, seed = tensors((V, H), (B, T, H))
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
    layer = filled(VocabParallelEmbedding(V, H, mesh), mesh, weight=weight)
    y = layer(ids)
    y.backward(seed)
    expected = F.embedding(ids, weight.requires_grad_())
    expected.backward(seed)
    same(y, expected)
    same(layer.weight.grad, slice_of(mesh, weight.grad, 0))


def cross_entropy(mesh, spread):
    logits, seed = tensors((B * T, V), (B * T,))
    logits *= spread
    targets = torch.arange(B * T) * 7 % V                   # some on every rank
    mine = slice_of(mesh, logits, -1).clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, targets, mesh)
    losses.backward(seed.float())
    expected = F.cross_entropy(logits.requires_grad_(), targets, reduction="none")
    expected.backward(seed)
    close = dict(rtol=1e-5, atol=1e-5, check_dtype=False)   # the loss computes in fp32
    torch.testing.assert_close(losses, expected, **close)
    torch.testing.assert_close(mine.grad, slice_of(mesh, logits.grad, -1), **close)


@TP
@pytest.mark.parametrize("work", [column, row, embedding])
def test_layer_equals_dense(work, tp):
    on_ranks(tp, tp, work)


@TP
@pytest.mark.parametrize("spread", [1.0, 300.0])            # 300: exp() of it would overflow
def test_cross_entropy_equals_dense(tp, spread):
    on_ranks(tp, tp, cross_entropy, spread)


def outside(mesh, id_):
    layer = filled(VocabParallelEmbedding(V, H, mesh), mesh, weight=torch.zeros(V, H))
    with pytest.raises((IndexError, RuntimeError)):
        layer(torch.tensor([0, id_]))
    with pytest.raises((IndexError, RuntimeError)):
        vocab_parallel_cross_entropy(torch.zeros(2, V // mesh.tp), torch.tensor([0, id_]), mesh)


@TP
@pytest.mark.parametrize("id_", [-1, V, 10 * V])
def test_id_outside_vocabulary_raises_on_every_rank(tp, id_):
    on_ranks(tp, tp, outside, id_)
