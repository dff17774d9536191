"""The model against a plain reference, and its tp shares against the model."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanogeex.attention import SHORT, Attention, slow_backward
from nanogeex.config import PRESETS, TrainConfig
from nanogeex.layernorm import LayerNorm
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX
from nanogeex.parameters import initial_weight, piece, split_table
from nanogeex.tensor_parallel import own_randomness
from tests.ranks import batch, build, on_ranks, random_weight, small_config


def reference(config, weight, ids):
    """Logits, one head and one formula at a time."""
    def linear(x, name):
        return x @ weight[name + ".weight"].T + weight[name + ".bias"]

    def layernorm(x, name):
        variance = x.var(-1, correction=0, keepdim=True)
        normal = (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()
        return normal * weight[name + ".weight"] + weight[name + ".bias"]

    def block(x, name, query=None):
        y = layernorm(x, name + ".input_layernorm")
        q = linear(y if query is None else query, name + ".attention.query")
        k, v = linear(y, name + ".attention.key"), linear(y, name + ".attention.value")
        size, heads = config.hidden_size // config.num_attention_heads, []
        future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        for head in range(config.num_attention_heads):
            part = slice(head * size, (head + 1) * size)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / size**0.5
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[..., part])
        x = x + linear(torch.cat(heads, -1), name + ".attention.dense")
        y = linear(layernorm(x, name + ".post_attention_layernorm"), name + ".mlp.dense_h_to_4h")
        return x + linear(y * torch.sigmoid(1.702 * y), name + ".mlp.dense_4h_to_h")

    positions = slice(0, ids.shape[1])
    x = weight["word_embeddings.weight"][ids] + weight["position_embeddings.weight"][positions]
    for layer in range(config.num_layers):
        x = block(x, f"layers.{layer}")
    query = weight["top_query_embeddings.weight"][positions].expand_as(x)       # un-normalised
    x = block(layernorm(x, "final_layernorm"), "top_query_layer", query)    # also its residual
    return x @ weight["word_embeddings.weight"].T


WEIGHTS = torch.tensor([[1.0], [0.0], [2.0]]).repeat(1, 16)


def loss_and_gradients(mesh, recompute, dropout=0.0):
    config = small_config(recompute=recompute, hidden_dropout=dropout, attention_dropout=dropout)
    model, compute, _, _ = build(config, mesh)
    ids, targets = batch(config, 3)
    torch.manual_seed(5)
    loss = compute(ids, targets, WEIGHTS)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_logits_loss_and_gradients_equal_the_reference():
    config = small_config()
    model, _, _, table = build(config, Mesh())
    weight = {name: random_weight(name, shape, config).requires_grad_()
              for name, (shape, _) in table.items()}
    ids, targets = batch(config, 3)
    logits = reference(config, weight, ids)
    torch.testing.assert_close(model(ids), logits, rtol=1e-4, atol=1e-4)
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    expected = (losses * WEIGHTS).sum()
    expected.backward()
    loss, gradients = loss_and_gradients(Mesh(), "none")
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, weight[name].grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_shares_equal_the_whole(tp, recompute):
    loss, gradients = loss_and_gradients(Mesh(), "none")
    table = build(small_config(), Mesh())[3]
    ranks = on_ranks(tp, tp, loss_and_gradients, recompute)
    for rank, (its_loss, its_gradients) in enumerate(ranks):
        assert its_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in its_gradients.items():
            expected = piece(gradients[name], table[name].dim, Mesh(rank=rank, tp=tp))
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("tp", [1, 2])
def test_recompute_gives_the_same_gradients(recompute, dropout, tp):
    """Bit for bit, and so with the same masks."""
    for mine, true in zip(on_ranks(tp, tp, loss_and_gradients, recompute, dropout),
                          on_ranks(tp, tp, loss_and_gradients, "none", dropout), strict=True):
        assert mine[0] == true[0]
        for name, gradient in mine[1].items():
            assert torch.equal(gradient, true[1][name]), name


def test_recompute_keeps_less():
    def kept(recompute):
        model, sizes = build(small_config(recompute=recompute), Mesh())[0], []
        with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor):
            model(batch(small_config(), 3)[0])
        return sum(sizes)
    assert kept("full") < kept("selective") < 0.5 * kept("none")


def all_reduces(mesh, recompute):
    """Of a forward and a backward."""
    model = build(small_config(recompute=recompute), mesh)[0]
    counts, true = [0], dist.all_reduce

    def counted(*arguments, **keywords):
        counts[0] += 1
        return true(*arguments, **keywords)
    dist.all_reduce = counted
    ids, targets = batch(small_config(), 3)
    loss = model(ids, targets, WEIGHTS)
    forward = counts[0]
    loss.backward()
    return forward, counts[0] - forward


@pytest.mark.parametrize("recompute, again", [("none", 0), ("selective", 0), ("full", 1)])
def test_all_reduces_of_a_step(recompute, again):
    """3 blocks of 2 and 2, and 1 that full recomputation runs again; word and top-query
    embeddings and two of the loss; backward, the head's f and the top query's."""
    assert on_ranks(2, 2, all_reduces, recompute)[0] == (3 * 2 + 2 + 2, 3 * (2 + again) + 2)


def masks(mesh):
    """With dropout: the residual stream, in training and in eval; numbers for own heads; others."""
    config = small_config(hidden_dropout=0.3, attention_dropout=0.3)
    model, seen = build(config, mesh)[0], []
    model.layers[0].register_forward_hook(lambda module, inputs, x: seen.append(x.detach()))
    torch.manual_seed(11)
    model(batch(config, 3)[0])
    model.eval()
    model(batch(config, 3)[0])
    with own_randomness(mesh):
        own = torch.rand(8)
    return seen[0], seen[1], own, torch.rand(8)


def test_dropout_is_shared_where_activations_are_and_own_where_heads_are():
    first, second = on_ranks(2, 2, masks)
    assert torch.equal(first[0], second[0])                 # same masks on what all hold
    assert not torch.allclose(first[0], first[1])           # there were masks, and none in eval
    assert not torch.equal(first[2], second[2])             # own ones for own heads
    assert torch.equal(first[3], second[3])                 # and the shared stream goes on alike
    alone = build(small_config(), Mesh())[0]
    assert torch.equal(masks(Mesh())[1], alone.layers[0](  # eval is the model without dropout
        alone.word_embeddings(batch(small_config(), 3)[0].flatten())
        + alone.position_embeddings(torch.arange(16).repeat(3)), 3))


def losses_with_dropout(mesh):
    config = small_config(hidden_dropout=0.2, attention_dropout=0.2)
    model = build(config, mesh)[0]
    ids, targets = batch(config, 3)
    torch.manual_seed(3)
    with torch.no_grad():
        return torch.stack([model(ids, targets, torch.ones(3, 16)) / 48 for _ in range(200)])


def test_dropout_agrees_between_tp_1_and_2_in_distribution():
    """The masks are others; mean and spread of the loss are not."""
    one, two = losses_with_dropout(Mesh()), on_ranks(2, 2, losses_with_dropout)[0]
    assert not torch.equal(one, two)
    assert abs(one.mean() - two.mean()) < 4 * (one.var() / 200 + two.var() / 200).sqrt()
    assert 0.7 < one.std() / two.std() < 1.4


@pytest.mark.parametrize("dtype, precise", [(torch.float16, 1e-3), (torch.bfloat16, 5e-3)])
def test_layernorm_of_16_bits_is_as_good_as_16_bits_can_be(dtype, precise):
    """Weights' gradients too, which are sums over all tokens; with low_precision they are not."""
    torch.manual_seed(0)
    x, up = (torch.randn(10_000, 32) + 3).to(dtype), torch.randn(10_000, 32).to(dtype)

    def results(layer, x):
        layer.weight.data.copy_(torch.arange(32) / 32 + 0.5)
        layer.bias.data.copy_(torch.arange(32) / 16 - 1)
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(up.to(x.dtype))
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]

    def error(low_precision):
        found = results(LayerNorm(32, low_precision).to(dtype), x)
        right = results(LayerNorm(32, False).to(dtype).double(), x.double())
        return [(f.double() - r).norm() / r.norm() for f, r in zip(found, right, strict=True)]

    assert all(part < precise for part in error(False))
    assert error(True)[2] > 4 * precise


@pytest.mark.parametrize("dtype, precise", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("length", [1, 37, SHORT, SHORT + 1])
def test_attention_of_16_bits_on_a_cpu(length, dtype, precise):
    """Also of the top-query block, whose query is the same for both samples."""
    attention = Attention(12, 3, Mesh(), False, 0.0)
    torch.manual_seed(0)
    tokens = torch.randn(3, 2, length, 12).to(dtype).requires_grad_()
    query, *keys, seed = tokens[0, :1], *tokens[1:], torch.randn(2, 3, length, 4).to(dtype)
    q = attention.heads(query.flatten(0, 1), 1).expand(2, -1, -1, -1)
    y = attention.attend(q, *(attention.heads(key.flatten(0, 1), 2) for key in keys))
    assert slow_backward(q) == (length <= SHORT)
    assert ("ShortAttention" in type(y.grad_fn).__name__) == (length <= SHORT)
    found, = torch.autograd.grad(y, tokens, seed)
    with torch.no_grad():
        true = tokens.double()
    true.requires_grad_()
    q, k, v = (true[i].unflatten(-1, (3, 4)).transpose(1, 2) for i in range(3))
    scores = q[:1] @ k.mT / 2
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected, = torch.autograd.grad(scores.softmax(-1) @ v, true, seed.double())
    assert (found - expected).norm() < precise * expected.norm()


def test_released_size():
    config = TrainConfig(**PRESETS["codegeex-13b"])
    with torch.device("meta"):
        model = CodeGeeX(config, Mesh())
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters == 12_873_943_040
    assert sum(p.numel() for p in model.layers[0].parameters()) == 314_639_360
    assert config.flops_per_token() == pytest.approx(82.1e9, rel=1e-3)


def test_initial_weights():
    config = small_config(hidden_size=64, num_layers=8, seed=7)
    with torch.device("meta"):
        table = split_table(CodeGeeX(config, Mesh()))
    weights = {name: initial_weight(name, shape, config) for name, (shape, _) in table.items()}
    assert weights["layers.0.mlp.dense_h_to_4h.weight"].std() == pytest.approx(0.02, rel=0.05)
    for name in ("layers.3.attention.dense.weight", "top_query_layer.mlp.dense_4h_to_h.weight"):
        assert weights[name].std() == pytest.approx(0.02 / 4, rel=0.05), name     # 1/sqrt(2 * 8)
    assert weights["layers.0.input_layernorm.weight"].eq(1).all()
    assert weights["layers.0.attention.dense.bias"].eq(0).all()
    name = "layers.0.attention.query.weight"
    assert torch.equal(weights[name], initial_weight(name, table[name].shape, config))
    assert not torch.equal(weights[name], weights["layers.1.attention.query.weight"])
    config.seed = 8
    assert not torch.equal(weights[name], initial_weight(name, table[name].shape, config))
