"""Parts are upstream's, byte for byte; any way there and back gives the same bytes; and what fails
leaves nothing behind."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch

import shard
from nanogeex.config import ModelConfig, UsageError
from nanogeex.convert import convert
from nanogeex.released_layout import PART, nest
from nanogeex.sources import find, open_weights
from tests.programs import run
from tests.released import ODD, TINY, flat, tensors, write
from tests.small_disk import small_disk


def made(source, destination, tp, **keywords):
    convert(open_weights(find(str(source))), destination, tp, **keywords)
    return destination


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def content(path):
    """path in the file -> shape, dtype, bytes; in order."""
    return [(name, list(tensor.shape), tensor.dtype, raw(tensor))
            for name, tensor in flat(torch.load(path, weights_only=True)).items()]


@pytest.mark.parametrize("tp", [2, 8])
def test_parts_are_upstreams(tmp_path, tp):
    directory = made(TINY, tmp_path / "parts", tp)
    true = json.loads((TINY.parent / f"tiny_tp{tp}_parts.json").read_text())
    assert sorted(os.listdir(directory)) == sorted(true)
    for file, its in true.items():
        mine = [(name, [shape, str(dtype).removeprefix("torch."),
                        hashlib.sha256(data).hexdigest()[:16]])
                for name, shape, dtype, data in content(directory / file)]
        assert mine == list(its.items())                        # in this order


MODELS = {"tiny": None,
          "wide": ModelConfig(1, 48, 48, 24, 1000, 1000),
          "deep": ModelConfig(7, 16, 16, 8, 320, 320)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path, name, dtype):
    source = tmp_path / "source.pt"
    if MODELS[name]:
        write(source, MODELS[name], dtype)
    else:
        made(TINY, source, 1, dtype=dtype)
    eight = made(source, tmp_path / "8", 8)
    at = eight
    for step, tp in enumerate([1, 4, 2, 8]):
        at = made(at, tmp_path / f"{step}.pt" if tp == 1 else tmp_path / str(step), tp)
        if tp == 1:
            assert content(at) == content(source)
    for file in os.listdir(eight):
        assert content(eight / file) == content(at / file), file
    assert content(made(at, tmp_path / "last.pt", 1)) == content(source)


def test_odd_sizes(tmp_path):
    source = write(tmp_path / "source.pt", ODD)
    at = made(made(source, tmp_path / "5", 5), tmp_path / "1.pt", 1)
    assert content(at) == content(source)


def test_mixed_dtypes_stay_or_are_converted(tmp_path):
    whole = tensors(ODD, torch.float16)
    whole |= {name: tensor.float() for name, tensor in whole.items() if "layernorm" in name}
    torch.save(nest(whole, 1), tmp_path / "mixed.pt")
    parts = made(tmp_path / "mixed.pt", tmp_path / "5", 5)
    assert content(made(parts, tmp_path / "same.pt", 1)) == content(tmp_path / "mixed.pt")
    for _, _, dtype, _ in content(made(parts, tmp_path / "bf16.pt", 1, dtype=torch.bfloat16)):
        assert dtype == torch.bfloat16


def test_vocabulary_is_made_to_fit_and_said(tmp_path):
    source = write(tmp_path / "source.pt", ModelConfig(1, 16, 16, 8, 317, 317))
    words = "module/language_model/embedding/word_embeddings/weight"
    true = flat(torch.load(source, weights_only=True))[words]
    for rows, expected, says in ((None, 320, "317 rows, 3 rows of zeros added"),
                                 (384, 384, "317 rows, 67 rows of zeros added"),
                                 (304, 304, "317 rows, the last 13 left out")):
        weights = open_weights(source)
        convert(weights, tmp_path / str(rows), 8, rows=rows)
        assert [note for note in weights.notes if says in note] == weights.notes != []
        whole = torch.cat([flat(torch.load(tmp_path / str(rows) / PART.format(i)))[words]
                           for i in range(8)])
        assert len(whole) == expected and torch.equal(whole[:317], true[:expected])
        assert not whole[317:].any()


def test_program(tmp_path):
    ended = run("shard.py", TINY, "parts", cwd=tmp_path)
    assert len(os.listdir(tmp_path / "parts")) == 8 and ended.stdout == ""
    assert "parts: tp 8, 457,344 bytes in" in ended.stderr
    told = run("shard.py", "parts", cwd=tmp_path).stdout
    for fact in ("parts", "2 + 1 top-query", "512 rows", "191,040", "float16 (53 tensors)",
                 "457,344", "21, the same bits in all parts"):
        assert fact in told


# What can go wrong: one line, code 2, and nothing under a final name.


def refused(folder, *argv, says):
    before = sorted(folder.rglob("*"))
    with contextlib.chdir(folder), pytest.raises(UsageError) as caught:
        shard.main([str(word) for word in argv])
    assert "\n" not in str(caught.value)
    for each in says:
        assert each in str(caught.value)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("tp", [3, 7])
def test_tp_that_does_not_divide(tmp_path, tp):
    refused(tmp_path, TINY, "parts", "--tp", tp, says=[
        f"--tp {tp}: does not divide", "layers.0.attention.query.weight of", "tiny.pt, 64",
        "choose one of 1, 2, 4, 8"])


def test_one_line_and_code_2(tmp_path):
    ended = run("shard.py", TINY, "parts", "--tp", 7, cwd=tmp_path, check=False)
    assert ended.returncode == 2 and ended.stdout == "" and os.listdir(tmp_path) == []
    assert ended.stderr.startswith("shard.py: --tp 7: ") and ended.stderr.count("\n") == 1


@pytest.fixture
def parts(tmp_path):
    return made(TINY, tmp_path / "parts", 8)


def change(file, key, change):
    whole = torch.load(file, weights_only=True)
    change(whole["module"]["language_model"]["transformer"][key])
    torch.save(whole, file)


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_missing_part(parts, number):
    (parts / PART.format(number)).unlink()
    refused(parts.parent, "parts", "new", says=[f"{PART.format(number)}: missing", "7 parts"])


def test_a_part_too_many_and_one_alone(parts):
    (parts / PART.format(8)).write_bytes((parts / PART.format(7)).read_bytes())
    refused(parts.parent, "parts", "new", says=[f"{PART.format(8)}: not one of the 8 parts"])
    refused(parts.parent, parts / PART.format(1), "new", says=[f"{PART.format(1)}: one of 8 parts"])


def test_parts_of_two_models(parts, tmp_path):
    other = made(write(tmp_path / "a.pt", ModelConfig(2, 64, 64, 64, 512, 512)), tmp_path / "b", 8)
    (parts / PART.format(5)).write_bytes((other / PART.format(5)).read_bytes())
    refused(tmp_path, "parts", "new", says=[
        f"{PART.format(5)}: embedding.position_embeddings.weight differs from {PART.format(0)}"])


def test_a_layernorm_changed_by_one_bit(parts):
    key = "layers.1.post_attention_layernorm.weight"
    change(parts / PART.format(6), key, lambda tensor: tensor.view(torch.int16)[17].bitwise_xor_(1))
    says = [f"{PART.format(6)}: transformer.{key} differs from {PART.format(0)}"]
    refused(parts.parent, "parts", "new", says=says)
    refused(parts.parent, "parts", says=says)


def test_a_truncated_part(parts):
    file = parts / PART.format(2)
    file.write_bytes(file.read_bytes()[:-1000])
    refused(parts.parent, "parts", "new", says=[f"{file.name}: cannot be read safely"])


def test_destination_that_is_there(parts, tmp_path):
    (tmp_path / "file.pt").write_text("mine")
    refused(tmp_path, TINY, "parts", "--tp", 2, says=["parts: exists and is not empty"])
    refused(tmp_path, TINY, "parts", "--tp", 1, says=["parts: exists and is not empty"])
    refused(tmp_path, TINY, "file.pt", "--tp", 1, says=["file.pt: exists"])
    refused(tmp_path, TINY, "new.pt", "--tp", 2, says=["new.pt: a file"])
    (tmp_path / "empty").mkdir()
    refused(tmp_path, TINY, "empty", "--tp", 1, says=["empty: exists"])
    (tmp_path / "empty" / (PART.format(0) + ".tmp")).write_text("of a run that was killed")
    refused(tmp_path, TINY, "empty", says=["empty: exists and is not empty"])
    (tmp_path / "z.pt.tmp").write_bytes(TINY.read_bytes())              # be it the source itself
    refused(tmp_path, "z.pt.tmp", "z.pt", "--tp", 1, says=["z.pt.tmp: exists"])


def test_values_that_fp16_cannot_hold(tmp_path):
    whole = tensors(ODD, torch.float32)
    whole["layers.0.mlp.dense_h_to_4h.weight"] *= 1e30
    torch.save(nest(whole, 1), tmp_path / "huge.pt")
    refused(tmp_path, "huge.pt", "half.pt", "--tp", 1, "--dtype", "fp16", says=[
        "--dtype fp16: cannot hold the values of transformer.layers.0.mlp.dense_h_to_4h.weight"])


def test_a_disk_that_fills(tmp_path):
    with small_disk(tmp_path / "disk", "256k"):
        for argv in (["disk/parts"], ["disk/whole.pt", "--tp", 1], ["disk"]):
            refused(tmp_path, TINY, *argv, says=["disk/", "No space left on device; give a DST"])


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    filled = []

    def fill(*arguments):
        filled.append(arguments)
        if len(filled) == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr("nanogeex.convert.fill", fill)
    with pytest.raises(KeyboardInterrupt):
        made(TINY, tmp_path / "parts", 8)
    assert os.listdir(tmp_path) == []


def test_little_memory(tmp_path):
    """128 MB are split within what the process holds anyway and 16 MB."""
    code = """
import sys, torch
from pathlib import Path
from nanogeex.convert import convert
from nanogeex.sources import find, open_weights
def own():
    lines = open("/proc/self/status").read().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("RssAnon")][0]
import nanogeex.convert as module
fill, most, before = module.fill, [0], own()
def measured(*arguments):
    fill(*arguments)
    most[0] = max(most[0], own())
module.fill = measured
convert(open_weights(find("a.pt")), Path("parts"), 8)
print((most[0] - before) // 1024)
"""
    write(tmp_path / "a.pt", ModelConfig(8, 768, 768, 1024, 8000, 8000))
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                           text=True, check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert int(ended.stdout) < 16
