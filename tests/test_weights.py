"""Loading: upstream's logits and tokens, at every tp, from a file or from any parts; fine-tuning
and exporting give what went in."""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import infer
import shard
import train
from nanogeex.config import ModelConfig, UsageError
from nanogeex.convert import convert
from nanogeex.decoder import Decoder
from nanogeex.generate import Sample, Sampling, generate
from nanogeex.mesh import Mesh
from nanogeex.released_layout import nest
from nanogeex.sources import find, open_weights
from nanogeex.weights import load_model, overlap
from tests.programs import metrics, run
from tests.ranks import on_ranks
from tests.released import ODD, TINY, tensors, write
from tests.test_data import source

LOGITS = np.load(TINY.parent / "tiny_logits.npz")
GREEDY = json.loads((TINY.parent / "tiny_greedy.json").read_text())
PROMPT, CONTINUED = np.split(np.array(GREEDY["tokens"][0]), [GREEDY["n_prompt"]])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for tp in (2, 4, 8):
        convert(open_weights(TINY), folder / str(tp), tp)
    return {1: TINY} | {tp: folder / str(tp) for tp in (2, 4, 8)}


def logits_and_greedy(mesh, path):
    model = load_model(path, 8, torch.float32, mesh)
    logits = model(torch.from_numpy(LOGITS["ids"]))
    sample = Sample(PROMPT.tolist(), len(CONTINUED), 0)
    list(generate(Decoder(model), [sample], Sampling(), 0, mesh))
    return logits, sample.ids


@pytest.mark.parametrize("tp, parts", [(1, 1), (1, 2), (1, 8), (2, 1), (2, 8), (4, 1), (4, 2),
                                       (4, 4), (8, 1), (8, 2), (8, 8)])
def test_upstreams_logits_and_tokens(sources, tp, parts):
    ranks = (on_ranks(tp, tp, logits_and_greedy, sources[parts]) if tp > 1
             else [logits_and_greedy(Mesh(), sources[parts])])
    whole = torch.cat([logits for logits, _ in ranks], -1).numpy()
    assert np.abs(whole - LOGITS["logits"]).max() < 1e-4
    assert all(chosen == CONTINUED.tolist() for _, chosen in ranks)


def test_boxes():
    """Any box from any other, against slices of the whole."""
    generator, whole = np.random.default_rng(0), torch.arange(70.0).view(7, 10)
    for _ in range(300):
        a, b = np.sort(generator.integers(0, 8, (2, 2))), np.sort(generator.integers(0, 11, (2, 2)))
        (r0, r1), (c0, c1), (s0, s1), (d0, d1) = a[0], b[0], a[1], b[1]
        target, true = torch.full((r1 - r0, c1 - c0), -1.0), torch.full((7, 10), -1.0)
        true[s0:s1, d0:d1] = whole[s0:s1, d0:d1]
        found = overlap((r0, c0), target.shape, whole[s0:s1, d0:d1], (s0, d0))
        if found:
            target[found[0]] = found[1]
        assert torch.equal(target, true[r0:r1, c0:c1])


def test_dtypes(tmp_path):
    model = load_model(TINY, 8)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}      # on a CPU
    model = load_model(TINY, 8, "fp16")
    assert {weight.dtype for weight in model.parameters()} == {torch.float16}
    whole = tensors(ODD, torch.float32)
    torch.save(nest(whole, 1), tmp_path / "a.pt")
    model = load_model(tmp_path / "a.pt", 5, torch.bfloat16)
    for name, weight in model.named_parameters():
        wider = "layernorm" in name                             # fp32 in the file: it computes so
        assert weight.dtype == (torch.float32 if wider else torch.bfloat16)
        assert torch.equal(weight, whole[name].to(weight.dtype))


def test_rows_of_padding_are_added_and_never_chosen(tmp_path):
    path = write(tmp_path / "a.pt", ModelConfig(1, 16, 16, 8, 317, 317))
    model = load_model(path, 4, vocab_size=310)
    assert model.config.vocab_size == 310 and model.config.padded_vocab_size == 317
    ranks = on_ranks(2, 2, words, path)
    assert torch.equal(torch.cat(ranks)[:317], model.word_embeddings.weight)
    assert torch.cat(ranks).shape[0] == 318 and not torch.cat(ranks)[317:].any()


def words(mesh, path):
    return load_model(path, 4, mesh=mesh).word_embeddings.weight.data


def test_heads():
    with pytest.raises(UsageError, match="--num-attention-heads: not in .* 64 is not a multiple"):
        load_model(TINY)
    with pytest.raises(UsageError, match="not a multiple of --num-attention-heads 7"):
        load_model(TINY, 7)
    with pytest.raises(UsageError, match="--tokenizer: has 513 ids"):
        load_model(TINY, 8, vocab_size=513)


def test_heads_of_128_are_assumed(tmp_path):
    path = write(tmp_path / "a.pt", ModelConfig(1, 256, 256, 8, 320, 320))
    assert load_model(path).config.num_attention_heads == 2


def test_one_copy_in_memory(tmp_path):
    """What a loaded model adds to the process' own memory is one copy of it and little more."""
    write(tmp_path / "a.pt", ModelConfig(8, 768, 768, 1024, 8000, 8000))
    code = """
import sys
from nanogeex import weights
def own():
    lines = open("/proc/self/status").read().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("RssAnon")][0]
fill, most, before = weights.fill, [0], own()
def measured(*arguments):
    fill(*arguments)
    most[0] = max(most[0], own())
weights.fill = measured
model = weights.load_model("a.pt", dtype="fp16")
size = sum(weight.nbytes for weight in model.parameters())
print((most[0] - before) * 1024 / size)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                           text=True, check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert 0.9 < float(ended.stdout) < 1.2


def test_infer_from_a_file(tmp_path):
    ended = run("infer.py", "--load", TINY, "--num-attention-heads", 8, "--greedy",
                "--prompt-ids", ",".join(map(str, PROMPT)), "5,17", "--out-seq-length",
                len(CONTINUED), "--output", "f.jsonl", "--use-cpu-initialization", cwd=tmp_path)
    first, second = map(json.loads, (tmp_path / "f.jsonl").read_text().splitlines())
    assert (first["prompt_ids"], first["ids"]) == (PROMPT.tolist(), CONTINUED.tolist())
    assert ended.stdout.splitlines()[0] == ",".join(map(str, GREEDY["tokens"][0]))
    assert second["prompt_ids"] == [5, 17] and len(second["ids"]) == len(CONTINUED)


def test_infer_from_parts_on_four(sources, tmp_path):
    run("infer.py", "--load", sources[8], "--num-attention-heads", 8, "--greedy", "--prompt-ids",
        ",".join(map(str, PROMPT)), "--out-seq-length", len(CONTINUED), "--output", "f.jsonl",
        ranks=4, cwd=tmp_path)
    assert json.loads((tmp_path / "f.jsonl").read_text())["ids"] == CONTINUED.tolist()


@pytest.mark.parametrize("argv, says", [
    (["--load", TINY, "--prompt", "x"], "tiny.pt: has no tokenizer of its own"),
    (["--load", TINY, "--prompt-ids", "5,x"], "--prompt-ids 5,x: not ids"),
    (["--load", TINY, "--prompt-ids", "512", "--num-attention-heads", "8"],
     "prompt 1: id 512, the vocabulary ends at 511"),
    (["--load", TINY, "--prompt-ids", "5"], "--num-attention-heads: not in")])
def test_infer_refuses(tmp_path, argv, says):
    with pytest.raises(UsageError, match=says), contextlib.chdir(tmp_path):
        infer.main([str(word) for word in argv])


# From a training run and back.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of no steps, which gives a tokenizer of 400 ids and data."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "src").mkdir()
    for number in range(2):
        (folder / f"src/{number}.py").write_text(source(number))
    run("train.py", "--data", "src", "--out", "run", "--vocab-size", 400, "--hidden-size", 64,
        "--seq-length", 64, "--num-layers", 2, "--train-iters", 3, cwd=folder)
    return folder


def test_a_run_is_exported_and_gives_its_logits(folder):
    with contextlib.chdir(folder):
        shard.main(["run", "exported.pt", "--tp", "1"])
        shard.main(["run", "exact", "--tp", "4", "--dtype", "fp32"])
        shard.main(["run"])
        ids = torch.tensor([[5, 17, 300, 2]])
        true = load_model("run")(ids)
        assert torch.equal(load_model("exact", 8)(ids), true)
        halves = load_model("exported.pt", 8)
        assert {tensor.dtype for tensor in open_weights(find("exported.pt")).parts[0].values()} == {
            torch.float16}
        torch.testing.assert_close(halves(ids), true, atol=5e-3, rtol=0)


@pytest.mark.parametrize("ranks, tp", [(1, 1), (4, 2), (3, 1)])
def test_fine_tuning_starts_from_the_weights(folder, sources, ranks, tp):
    """No step, then exported: the file's bytes, whatever the topology."""
    out = f"tuned-{ranks}-{tp}"
    argv = ["--init-from", sources[4 if tp == 2 else 1], "--num-attention-heads", 8, "--tokenizer",
            "run", "--data", "src", "--out", out, "--tp", tp]
    run("train.py", *argv, "--train-iters", 0, ranks=ranks, cwd=folder)
    with contextlib.chdir(folder):
        shard.main([out, f"{out}.pt", "--tp", "1"])
        mine, true = open_weights(find(f"{out}.pt")).parts[0], open_weights(TINY).parts[0]
        assert json.loads(open(f"{out}/config.json").read())["vocab_size"] == 400
        for name in true:
            assert torch.equal(mine[name], true[name]), name


def test_fine_tuning_goes_on_and_is_at_home_in_infer(folder):
    argv = ["--init-from", TINY, "--num-attention-heads", 8, "--tokenizer", "run", "--data", "src",
            "--out", "more", "--lr", "1e-4", "--lr-decay-iters", 4]
    run("train.py", *argv, "--train-iters", 2, cwd=folder)
    run("train.py", *argv, "--train-iters", 4, cwd=folder)         # the checkpoint goes before
    assert list(metrics(folder / "more")) == [1, 2, 3, 4]
    assert (folder / "more/tokenizer.model").read_bytes() == (
        folder / "run/tokenizer.model").read_bytes()
    run("infer.py", "--load", "more", "--prompt", "x =", "--out-seq-length", 3, cwd=folder)


@pytest.mark.parametrize("argv, says", [
    (["--init-from", TINY], "give --tokenizer DIR"),
    (["--init-from", TINY, "--tokenizer", "run"], "--num-attention-heads: not in"),
    (["--init-from", TINY, "--tokenizer", "run", "--num-attention-heads", "8", "--num-layers", "3"],
     "--num-layers 3: .*tiny.pt has 2"),
    (["--init-from", TINY, "--tokenizer", "run", "--num-attention-heads", "8", "--resume", "run"],
     "--init-from .*tiny.pt: starts anew"),
    (["--init-from", "nowhere", "--tokenizer", "run"], "nowhere: no released file")])
def test_fine_tuning_refuses(folder, argv, says):
    with pytest.raises(UsageError, match=says), contextlib.chdir(folder):
        train.main([str(word) for word in argv])
