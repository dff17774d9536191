"""Saved at one topology, loaded at another: the same whole tensors, moments included."""

import json

import pytest
import torch

from nanogeex import checkpoint, integrity
from nanogeex.config import UsageError
from nanogeex.mesh import Mesh
from nanogeex.optim import adamw
from nanogeex.parameters import piece
from nanogeex.saver import Saver
from tests.ranks import build, on_ranks, small_config


def value(name, shape, kind):
    generator = torch.Generator().manual_seed(len(name) + 1000 * kind)
    return torch.randn(shape, generator=generator)


def fill(shards, optimizer, table, mesh, scale):
    for name, shard in shards.items():
        shape, dim = table[name]
        optimizer.state[shard] = {"step": torch.tensor(7.0 * scale)}
        for kind, target in enumerate(("weight", "exp_avg", "exp_avg_sq")):
            mine = piece(value(name, shape, kind), dim, mesh).contiguous() * scale
            if kind == 0:
                shard.copy_(mine)
            else:
                optimizer.state[shard][target] = mine


def save(mesh, folder):
    _, _, shards, table = build(small_config(), mesh)
    optimizer = adamw(shards, small_config())
    fill(shards, optimizer, table, mesh, 1.0)
    meta = dict(step=7, config={}, optimizer_steps=7.0)
    checkpoint.write(folder, meta, checkpoint.pieces(shards, optimizer), table, 3, mesh,
                     mesh.world_group)


def load(mesh, folder, stepped):
    """Everything equals what was saved, bit for bit."""
    _, _, shards, table = build(small_config(), mesh)
    optimizer = adamw(shards, small_config())
    if stepped:
        fill(shards, optimizer, table, mesh, 2.0)
    path = integrity.find(folder, mesh, pytest.fail)
    checkpoint.load(path, shards, optimizer, table, mesh)
    for name, shard in shards.items():
        shape, dim = table[name]
        held = [shard]
        if not name.endswith("key.bias"):                   # not trained
            state = optimizer.state[shard]
            held += [state["exp_avg"], state["exp_avg_sq"]]
            assert state["step"].item() == 7
        for kind, tensor in enumerate(held):
            true = piece(value(name, shape, kind), dim, mesh)
            assert torch.equal(tensor, true), (name, kind)


def test_a_step_saved_again_replaces_what_is_there(tmp_path):
    for left_over in ("step-00000007", "step-00000007.tmp", "step-00000007.old"):
        (tmp_path / left_over).mkdir()
        (tmp_path / left_over / "__9_0.distcp").write_text("of a run that died")
    save(Mesh(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert not (tmp_path / "step-00000007/__9_0.distcp").exists()
    load(Mesh(), tmp_path, stepped=False)


@pytest.mark.parametrize("world, tp", [(4, 2), (1, 1), (3, 1)])
def test_any_topology_to_any(tmp_path, world, tp):
    on_ranks(world, tp, save, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    meta = json.loads((tmp_path / "step-00000007/meta.json").read_text())
    assert meta["topology"] == {"dp": world // tp, "tp": tp}
    load(Mesh(), tmp_path, stepped=False)
    for its_world, its_tp in ((4, 2), (4, 1), (4, 4), (6, 2), (8, 8)):
        on_ranks(its_world, its_tp, load, tmp_path, its_world == 4)


def torn(mesh, folder):
    _, _, shards, table = build(small_config(), mesh)
    checkpoint.check_replicas(shards, table, mesh)
    if mesh.rank == 1:                                      # one bit, on one tp rank
        shards["layers.0.mlp.dense_4h_to_h.bias"].view(torch.int32)[3] ^= 1
    with pytest.raises(RuntimeError, match="layers.0.mlp.dense_4h_to_h.bias: not the same"):
        Saver(folder, table, 3, False, mesh, print).save(
            dict(step=7, config={}), shards, adamw(shards, small_config()))


def test_replicas_that_differ_are_not_saved(tmp_path):
    on_ranks(4, 2, torn, tmp_path)
    assert integrity.find(tmp_path, Mesh(), print) is None


def test_unreadable_meta(tmp_path):
    for content in (None, "{", "{}"):
        if content:
            (tmp_path / "meta.json").write_text(content)
        with pytest.raises(UsageError, match="meta.json cannot be read"):
            integrity.read_meta(tmp_path)
