"""Schedule, loss scale, norm: what every rank must agree on."""

import math

import pytest
import torch

from nanogeex.mesh import Mesh
from nanogeex.optim import (
    LossScaler,
    adamw,
    first_not_finite,
    gradient_norm,
    lr_at,
    optimizer_step,
)
from nanogeex.parameters import Split, piece
from tests.ranks import on_ranks, small_config

TABLE = {"split0.weight": Split((8, 6), 0), "split1.weight": Split((6, 8), 1),
         "repeated.weight": Split((5,), None)}


def whole_gradients():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in TABLE.items()}


def test_lr_schedule():
    config = small_config(lr=1.0, min_lr=0.1, lr_warmup_iters=4, lr_decay_iters=14, train_iters=20)
    assert [lr_at(step, config) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert lr_at(9, config) == pytest.approx(0.55)                      # half of the cosine
    assert lr_at(14, config) == lr_at(19, config) == 0.1
    rates = [lr_at(step, config) for step in range(3, 15)]
    assert rates == sorted(rates, reverse=True)
    assert lr_at(0, small_config(lr=1.0, lr_warmup_iters=0, lr_decay_iters=5)) == 1.0


def test_loss_scale_falls_at_the_second_overflow_and_rises_after_a_window():
    scaler = LossScaler(scale=2.0**12, minimum=2.0**10, window=3, hysteresis=2)
    scales = []
    for overflow in (True, True, True, True, False, False, False, True, True):
        scaler.update(overflow)
        scales.append(math.log2(scaler.scale))
    assert scales == [12, 11, 10, 10, 10, 10, 11, 11, 10]


def pieces(mesh):
    return {name: piece(tensor, TABLE[name].dim, mesh).clone()
            for name, tensor in whole_gradients().items()}


def norms(mesh):
    return gradient_norm(pieces(mesh), TABLE, mesh)


def update(mesh, clip):
    """Norms of gradient and update, both whole, of a step of SGD: it adds the gradient itself."""
    gradients = {name: gradient * 8 for name, gradient in pieces(mesh).items()}
    shards = {name: torch.zeros_like(tensor) for name, tensor in gradients.items()}
    sgd = torch.optim.SGD(shards.values(), lr=1.0)
    norm, _ = optimizer_step(sgd, shards, gradients, TABLE, mesh, 1 / 8, clip)
    return norm, gradient_norm(shards, TABLE, mesh)


@pytest.mark.parametrize("world, tp", [(1, 1), (2, 2), (2, 1), (4, 2), (8, 2), (6, 2)])
def test_norm_is_that_of_the_whole_gradient(world, tp):
    expected = torch.cat([tensor.flatten() for tensor in whole_gradients().values()]).norm().item()
    for norm in on_ranks(world, tp, norms) if world > 1 else [norms(Mesh())]:
        assert norm == pytest.approx(expected, rel=1e-6)


def overflow_on_one_rank(mesh, bad_rank):
    gradients = pieces(mesh)
    if mesh.rank == bad_rank:
        gradients["split1.weight"].view(-1)[0] = math.inf
    shards = {name: torch.zeros_like(tensor) for name, tensor in gradients.items()}
    optimizer = adamw(shards, small_config())
    _, taken = optimizer_step(optimizer, shards, gradients, TABLE, mesh, 1.0, 1.0)
    return taken, all(shard.eq(0).all().item() for shard in shards.values())


def test_overflow_on_one_rank_is_skipped_by_all():
    assert on_ranks(4, 2, overflow_on_one_rank, 1) == [(False, True)] * 4
    assert on_ranks(4, 2, overflow_on_one_rank, None) == [(True, False)] * 4


def named(mesh):
    gradients = pieces(mesh)
    nothing = first_not_finite(gradients, mesh)
    gradients["repeated.weight"][:] = math.nan
    if mesh.rank == 2:
        gradients["split1.weight"].view(-1)[0] = math.inf
    return nothing, first_not_finite(gradients, mesh)


def test_first_not_finite_is_named_on_all_ranks():
    assert on_ranks(4, 2, named) == [(None, "split1.weight")] * 4


def test_scale_is_exhausted_where_an_overflow_could_not_lower_it():
    scaler = LossScaler(scale=2.0, minimum=1.0, window=3, hysteresis=2)
    seen = []
    for _ in range(3):
        seen.append(scaler.exhausted)
        scaler.update(overflow=True)
    assert seen == [False, False, True]


@pytest.mark.parametrize("clip, world, tp", [(0.0, 1, 1), (0.5, 1, 1), (100.0, 1, 1), (0.5, 4, 2),
                                             (0.5, 3, 1), (100.0, 2, 2)])
def test_the_update_has_the_clipped_norm(clip, world, tp):
    true = torch.cat([tensor.flatten() for tensor in whole_gradients().values()]).norm().item()
    for norm, moved in on_ranks(world, tp, update, clip) if world > 1 else [update(Mesh(), clip)]:
        assert norm == pytest.approx(true, rel=1e-6)
        assert moved == pytest.approx(min(true, clip) if clip else true, rel=1e-5)


def test_key_biases_are_not_trained():
    names = ["layers.0.attention.key.bias", "layers.0.attention.key.weight"]
    optimizer = adamw({name: torch.zeros(2) for name in names}, small_config())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]


def test_no_weight_decay_on_biases_and_layernorms():
    names = ["layers.0.mlp.dense_h_to_4h.weight", "layers.0.mlp.dense_h_to_4h.bias",
             "final_layernorm.weight"]
    optimizer = adamw({name: torch.zeros(2) for name in names}, small_config(weight_decay=0.3))
    decayed, plain = optimizer.param_groups
    assert (len(decayed["params"]), decayed["weight_decay"]) == (1, 0.3)
    assert (len(plain["params"]), plain["weight_decay"]) == (2, 0.0)


def test_adam_has_the_flags():
    config = small_config(adam_beta1=0.8, adam_beta2=0.7, adam_eps=1e-3)
    optimizer = adamw({"x": torch.zeros(2)}, config)
    assert optimizer.defaults["betas"] == (0.8, 0.7) and optimizer.defaults["eps"] == 1e-3
