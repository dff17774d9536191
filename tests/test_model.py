"""The model against a plain reference, and its tp shares against the model."""

import pytest
import torch
import torch.nn.functional as F

from nanogeex.config import PRESETS, TrainConfig
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX, LayerNorm, initial_weight, split_table
from nanogeex.zero import piece
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


def loss_and_gradients(mesh, recompute):
    config = small_config()
    model, compute, _, _ = build(config, mesh, recompute)
    ids, targets = batch(config, 3)
    loss = compute(ids, targets, torch.tensor([1.0, 0.0, 2.0]))
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
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
    expected = (losses * torch.tensor([1.0, 0.0, 2.0])).sum()
    expected.backward()
    loss, gradients = loss_and_gradients(Mesh(), recompute=False)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, weight[name].grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_shares_equal_the_whole(tp, recompute):
    loss, gradients = loss_and_gradients(Mesh(), recompute=False)
    table = build(small_config(), Mesh())[3]
    ranks = on_ranks(tp, tp, loss_and_gradients, recompute)
    for rank, (its_loss, its_gradients) in enumerate(ranks):
        assert its_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in its_gradients.items():
            expected = piece(gradients[name], table[name].dim, Mesh(rank=rank, tp=tp))
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4, msg=name)


def test_recompute_gives_the_same_gradients():
    loss, gradients = loss_and_gradients(Mesh(), recompute=False)
    its_loss, its_gradients = loss_and_gradients(Mesh(), recompute=True)
    assert its_loss == loss
    for name, gradient in its_gradients.items():
        assert torch.equal(gradient, gradients[name]), name


def test_recompute_keeps_less():
    def kept(recompute):
        model, sizes = build(small_config(), Mesh(), recompute)[0], []
        with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor):
            model(batch(small_config(), 3)[0])
        return sum(sizes)
    assert kept(recompute=True) < 0.5 * kept(recompute=False)


@pytest.mark.parametrize("low_precision, computes", [(False, torch.float32), (True, torch.float16)])
def test_layernorm_in_fp32_unless_told_otherwise(monkeypatch, low_precision, computes):
    seen, true = [], F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda x, shape, weight, *rest: seen.extend(
        [x.dtype, weight.dtype]) or true(x, shape, weight, *rest))
    y = LayerNorm(8, low_precision).half()(torch.ones(2, 8, dtype=torch.float16))
    assert seen == [computes, computes] and y.dtype == torch.float16


def test_cached_forward_equals_whole_forward():
    config = small_config()
    model = build(config, Mesh())[0]
    ids, _ = batch(config, 3)
    whole = model(ids)
    cache = model.empty_cache(3, config.seq_length, torch.float32)
    with torch.no_grad():
        parts = [model(ids[:, start:stop], cache=cache, start=start)
                 for start, stop in ((0, 7), (7, 8), (8, 9), (9, 14), (14, 16))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


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
