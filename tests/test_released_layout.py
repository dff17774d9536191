"""Every form in which the layout is met gives the same tensors; a pickle runs nothing."""

import argparse
import os

import numpy as np
import pytest
import torch

from nanogeex.config import UsageError
from nanogeex.released_layout import nest, our_name, read_part, released_name
from nanogeex.sources import open_weights
from tests.released import TINY, flat


def content():
    return torch.load(TINY, weights_only=True)


def dotted(prefix=""):
    return {prefix + path.replace("/", "."): tensor for path, tensor in flat(content()).items()}


def fused():
    made = content()
    flat_keys = made["module"]["language_model"]["transformer"]
    q, kv = "query", ["key", "value"]
    for block, names in (("layers.0", [q, *kv]), ("layers.1", [q, *kv]), ("topQueryLayer", kv)):
        for kind in ("weight", "bias"):
            rows = [flat_keys.pop(f"{block}.attention.{name}.{kind}") for name in names]
            flat_keys[f"{block}.attention.{'_'.join(names)}.{kind}"] = torch.cat(rows)
    return made


VARIANTS = {
    "as released": content,
    "no module": lambda: content()["module"],
    "no language_model": lambda: content()["module"]["language_model"],
    "two modules": lambda: {"module": content()},
    "dotted": dotted,
    "dotted without module": lambda: {
        key.removeprefix("module."): tensor for key, tensor in dotted().items()},
    "fused": fused,
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path, name, legacy):
    torch.save(VARIANTS[name](), tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    weights = open_weights(tmp_path / "a.pt")
    true, _ = read_part(TINY)
    assert weights.parts[0].keys() == true.keys() and weights.notes == []
    for name, tensor in true.items():
        assert torch.equal(tensor, weights.parts[0][name]), name


def test_names_and_order_there_and_back():
    tensors, _ = read_part(TINY)
    assert [our_name(released_name(name)) for name in tensors] == list(tensors)
    shuffled = dict(reversed(tensors.items()))
    assert flat(nest(shuffled, 1)).keys() == flat(content()).keys()
    assert list(flat(nest(tensors, 1))) == list(flat(content()))


class Settings:
    """Of a package that is neither Python's nor torch's."""

    def __init__(self):
        self.scale = torch.ones(3)


def test_what_else_is_there_is_left_out_and_named(tmp_path):
    extra = content() | {
        "args": argparse.Namespace(hidden_size=64), "iteration": 7, "rng": np.random.get_state(),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "scaler": Settings()}
    extra["module"]["language_model"]["rotary"] = torch.ones(2)
    torch.save(extra, tmp_path / "a.pt")
    weights = open_weights(tmp_path / "a.pt")
    assert weights.notes == ["left out, as no weights of the model: module.language_model.rotary, "
                             "args, iteration, rng, optimizer, scaler"]
    assert len(weights.parts[0]) == 53


class Hostile:
    def __init__(self, function, argument):
        self.does = function, (argument,)

    def __reduce__(self):
        return self.does


@pytest.mark.parametrize("function, named", [
    (os.system, "posix.system"), (exec, "builtins.exec"), (getattr, "builtins.getattr"),
    (os.makedirs, "os.makedirs")])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_hostile_pickle_runs_nothing(tmp_path, function, named, legacy):
    argument = {exec: f"open({str(tmp_path / 'ran')!r}, 'w')", os.makedirs: str(tmp_path / "ran"),
                os.system: f"touch {tmp_path}/ran"}.get(function, "x")
    path = tmp_path / "a.pt"
    torch.save(content() | {"args": Hostile(function, argument)}, path,
               _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UsageError) as caught:
        open_weights(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert named.split(".")[1] in str(caught.value) and not (tmp_path / "ran").exists()


def other_function(argument):
    open(argument, "w")


def test_a_function_of_another_package_is_not_called(tmp_path):
    torch.save(content() | {"args": Hostile(other_function, str(tmp_path / "ran"))},
               tmp_path / "a.pt")
    weights = open_weights(tmp_path / "a.pt")
    assert "args" in weights.notes[0] and not (tmp_path / "ran").exists()


def without(key):
    made = content()
    del made["module"]["language_model"]["transformer"][key]
    return made


def replaced(key, tensor):
    made = content()
    made["module"]["language_model"]["transformer"][key] = tensor
    return made


@pytest.mark.parametrize("made, says", [
    ({"a": torch.ones(3)}, "topQueryLayer.attention.query.weight is missing"),
    ("text", "topQueryLayer.attention.query.weight is missing"),
    (without("layers.0.mlp.dense_h_to_4h.bias"), "layers.0.mlp.dense_h_to_4h.bias is missing"),
    (replaced("layers.0.mlp.dense_h_to_4h.bias", torch.ones(3)), "dense_h_to_4h.bias is [3]"),
    (replaced("final_layernorm.bias", torch.ones(64, dtype=torch.int8)), "bias is torch.int8")])
def test_files_that_are_no_codegeex(tmp_path, made, says):
    torch.save(made, tmp_path / "a.pt")
    with pytest.raises(UsageError) as caught:
        open_weights(tmp_path / "a.pt")
    assert f"{tmp_path / 'a.pt'}: " in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 1000, 200_000, -1])
def test_truncated(tmp_path, size):
    (tmp_path / "a.pt").write_bytes(TINY.read_bytes()[:size])
    with pytest.raises(UsageError, match="cannot be read safely") as caught:
        open_weights(tmp_path / "a.pt")
    assert "\n" not in str(caught.value)
