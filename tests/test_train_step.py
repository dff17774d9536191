"""Whole steps at every topology against one process: losses, norms, gradients and weights."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from nanogeex import zero
from nanogeex.mesh import Mesh, all_reduce_sum
from nanogeex.optim import adamw, loss_scaler, optimizer_step, sum_over_tp
from nanogeex.parameters import piece
from nanogeex.samples import Windows, micro_batches, permuted, shares
from tests.memory import peak
from tests.ranks import batch, build, on_ranks, small_config

WINDOWS = torch.randint(0, 320, (64, 17), generator=torch.Generator().manual_seed(3)).numpy()


def train(mesh, changes, steps, masked=()):
    """Per step: loss, norm, gradients; at the end this rank's weights.  `masked`: first tokens of
    the windows of which no target counts."""
    config = small_config(**changes)
    model, compute, shards, table = build(config, mesh)
    optimizer, scaler = adamw(shards, config), loss_scaler(config)
    history, count = [], config.global_batch_size
    torch.manual_seed(config.seed)                          # for dropout
    for step in range(steps):
        scale = scaler.scale if scaler else 1.0
        samples = permuted(torch.arange(step * count, (step + 1) * count).numpy(), len(WINDOWS), 1)
        number = shares(count, mesh.dp, config.micro_batch_size)[1]
        sums = torch.zeros(2, dtype=torch.float64)
        window = micro_batches(Windows(WINDOWS, 0, 0), samples, mesh.dp, mesh.dp_rank,
                               config.micro_batch_size, mesh.device)
        for i, (ids, targets, weights) in enumerate(window):
            zero.micro_batch(model, compute, i == 0, i == number - 1)
            weights[torch.isin(ids[:, 0], torch.tensor(masked, dtype=torch.long))] = 0.0
            part = compute(ids, targets, weights * (scale / config.seq_length))
            part.backward()
            sums += torch.stack([part.detach() * config.seq_length / scale, weights.sum()])
        loss, tokens = all_reduce_sum(sums, mesh.dp_group).tolist()
        unscale = mesh.dp * config.seq_length / (scale * tokens)
        gradients = {name: zero.local(weight.grad) for name, weight in model.named_parameters()}
        if config.sequence_parallel:
            sum_over_tp(gradients, table, mesh)
        held = {name: gradient * unscale for name, gradient in gradients.items()}
        norm, taken = optimizer_step(
            optimizer, shards, gradients, table, mesh, unscale, config.clip_grad)
        assert taken
        model.zero_grad()
        history.append((loss / tokens, norm, held))
    return history, {name: shard.clone() for name, shard in shards.items()}, table


def compare(world, tp, changes, steps, loss, norm, weight, masked=(), **more):
    expected, weights, table = train(Mesh(), changes, steps, masked)
    assert expected[0][1] > 2 * small_config(**changes).clip_grad            # clipping is at work
    ranks = on_ranks(world, tp, train, changes | more, steps, masked)
    for rank, (history, shards, _) in enumerate(ranks):
        place = Mesh(rank=rank, dp=world // tp, tp=tp)
        for its, true_step in zip(history, expected, strict=True):
            assert its[0] == pytest.approx(true_step[0], abs=loss)
            assert its[1] == pytest.approx(true_step[1], rel=norm)
            for name, gradient in its[2].items():           # Adam would hide a constant factor
                true = piece(true_step[2][name], table[name].dim, place)
                torch.testing.assert_close(gradient, true, rtol=10 * norm, atol=norm, msg=name)
        for name, shard in shards.items():
            true = piece(weights[name], table[name].dim, place)
            torch.testing.assert_close(shard, true, rtol=0, atol=weight, msg=name)


@pytest.mark.parametrize("world, tp", [(4, 2), (2, 1), (2, 2), (3, 1), (5, 1)])
def test_steps_equal_one_process(world, tp):
    """7 samples in micro-batches of 2: uneven shares, and on 5 ranks some with nothing left."""
    changes = dict(global_batch_size=7, micro_batch_size=2, clip_grad=0.1, lr=1e-3, adam_eps=1e-4)
    recompute = {2: "none", 4: "full"}.get(world, "selective")
    compare(world, tp, changes, 3, loss=2e-5, norm=1e-4, weight=1e-5, recompute=recompute)


@pytest.mark.parametrize("world, tp", [(3, 1), (4, 2)])
def test_masked_targets_are_not_counted(world, tp):
    """Of 7 samples 5 are masked: some data rank has nothing that counts.  Two steps see 14."""
    first = permuted(torch.arange(14).numpy(), len(WINDOWS), 1)
    masked = tuple(WINDOWS[first[[0, 1, 2, 3, 6, 7, 9, 10, 11]], 0].tolist())
    changes = dict(global_batch_size=7, micro_batch_size=2, clip_grad=0.1, lr=1e-3, adam_eps=1e-4)
    compare(world, tp, changes, 2, loss=2e-5, norm=1e-4, weight=1e-5, masked=masked)
    assert train(Mesh(), changes, 1, masked)[0][0][0] != train(Mesh(), changes, 1)[0][0][0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world, tp", [(4, 2), (2, 2)])
def test_low_precision_steps_equal_one_process(world, tp, precision):
    changes = dict(global_batch_size=8, micro_batch_size=2, clip_grad=0.1, lr=1e-3, adam_eps=1e-4,
                   precision=precision)
    compare(world, tp, changes, 3, loss=2e-2, norm=3e-2, weight=2e-3)


@pytest.mark.parametrize("world, tp, more", [
    (2, 2, dict(sequence_parallel=True, recompute="selective")),
    (2, 1, dict(reshard_after_forward=True)),
    (1, 1, dict(hidden_dropout=0.1, attention_dropout=0.1))])
def test_compiled_steps_equal_plain_ones(world, tp, more):
    changes = dict(global_batch_size=4, micro_batch_size=2, clip_grad=0.1, lr=1e-3, adam_eps=1e-4)
    compare(world, tp, changes | more, 2, loss=2e-5, norm=1e-4, weight=1e-5, compile=True)


def test_accumulation_equals_one_large_micro_batch():
    one, whole = (train(Mesh(), dict(global_batch_size=8, micro_batch_size=size, adam_eps=1e-4), 2)
                  for size in (1, 8))
    for name in one[1]:
        torch.testing.assert_close(one[1][name], whole[1][name], rtol=0, atol=1e-6, msg=name)


def test_accumulated_gradients_stay_sharded():
    one, eight = (on_ranks(2, 1, peak, "full", 8 // number, number)[0] for number in (1, 8))
    half = one["weights"] / 3                               # weights: this rank's half, and all
    assert eight["gradients"] == pytest.approx(half, rel=0.01)
    assert eight["activations"] < 0.35 * one["activations"]


def test_low_precision_is_near_fp32():
    """And is not fp32 in disguise."""
    losses = {precision: train(Mesh(), dict(precision=precision), 3)[0][-1][0]
              for precision in ("fp32", "bf16", "fp16")}
    for precision in ("bf16", "fp16"):
        assert 0 < abs(losses[precision] - losses["fp32"]) < 2e-2


def reduced(mesh, reduce_dtype):
    """In bf16: this rank's reduced gradients, and its own before the reduction."""
    config = small_config(precision="bf16", grad_reduce_dtype=reduce_dtype)
    ids = batch(config, mesh.dp)[0][mesh.dp_rank:mesh.dp_rank + 1]
    gradients = []
    for place in (mesh, Mesh()):
        model, compute, _, table = build(config, place)
        zero.micro_batch(model, compute, True, True)
        compute(ids, ids, torch.ones(1, 16)).backward()
        gradients.append({name: zero.local(w.grad) for name, w in model.named_parameters()})
    return *gradients, table


@pytest.mark.parametrize("reduce_dtype, low, high", [("fp32", 0, 1e-6), ("fp16", 1e-5, 2e-3),
                                                     ("bf16", 1e-4, 2e-2)])
def test_gradients_are_reduced_in_the_precision_asked_for(reduce_dtype, low, high):
    ranks = on_ranks(4, 1, reduced, reduce_dtype)
    table, error, size = ranks[0][2], 0.0, 0.0
    for rank, (mine, _, _) in enumerate(ranks):
        for name, gradient in mine.items():
            mean = sum(own[name] for _, own, _ in ranks) / 4
            true = piece(mean, table[name].dim, Mesh(rank=rank, dp=4))
            assert gradient.dtype == torch.float32          # shards are, whatever was sent
            error += (gradient - true).square().sum().item()
            size += true.square().sum().item()
    assert low <= (error / size) ** 0.5 <= high


def count_collectives(mesh, micro):
    """Gathers and reductions of one window of `micro` micro-batches; gradients stay sharded."""
    model, compute, shards, _ = build(small_config(), mesh)
    counts = {"gather": 0, "reduce": 0}

    def counted(kind, call):
        def count(*args, **keywords):
            counts[kind] += 1
            return call(*args, **keywords)
        return count

    for kind, name in (("gather", "all_gather_into_tensor"), ("gather", "all_gather_single"),
                       ("reduce", "reduce_scatter_tensor"), ("reduce", "reduce_scatter_single")):
        if hasattr(dist, name):                             # torch 2.13 renames them
            setattr(dist, name, counted(kind, getattr(dist, name)))
    ids = torch.zeros(1, 16, dtype=torch.long)
    for i in range(micro):
        zero.micro_batch(model, compute, i == 0, i == micro - 1)
        compute(ids, ids, torch.ones(1, 16)).backward()
        for name, weight in model.named_parameters():       # whole weights have no gradient
            assert i < micro - 1 and weight.grad is None or (
                zero.local(weight.grad).shape == shards[name].shape)
    return counts, sum(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize("micro", [1, 4])
def test_one_gather_a_window_and_one_reduction_a_micro_batch(micro):
    counts, groups = on_ranks(2, 1, count_collectives, micro)[0]
    assert groups == 4                                  # 2 blocks, the top-query block, the root
    assert counts == {"gather": groups, "reduce": groups * micro}
