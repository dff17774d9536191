"""Decoding against whole forwards, sampling, and text that streams."""

import pytest
import torch

from nanogeex.generate import Sampling, choose, generate, stream_text
from nanogeex.mesh import Mesh
from tests.ranks import build, on_ranks, small_config
from tests.test_tokenizer import TOKENIZERS

PROMPT = [5, 17, 300, 2]


def continued(mesh, sampling, count=12, end=-1, prompt=PROMPT):
    model = build(small_config(), mesh)[0]
    return list(generate(model, prompt, count, end, sampling, 0, mesh))


def without_cache(count):
    model, ids = build(small_config(), Mesh())[0], list(PROMPT)
    for _ in range(count):
        ids.append(model(torch.tensor([ids]))[0, -1, :320].argmax().item())
    return ids[len(PROMPT):]


def test_greedy_equals_whole_forwards_to_the_end_of_the_context():
    assert continued(Mesh(), Sampling()) == without_cache(12)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 50, 0.9)],
                         ids=["greedy", "sampled"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_same_ids_at_every_tp(tp, sampling):
    expected = continued(Mesh(), sampling)
    assert on_ranks(tp, tp, continued, sampling) == [expected] * tp


def strays(mesh, seeds):
    """Each rank has a seed of its own."""
    model = build(small_config(), mesh)[0]
    return list(generate(model, PROMPT, 12, -1, Sampling(1.0), seeds[mesh.rank], mesh))


def test_the_choice_of_rank0_is_everyones():
    alone = strays(Mesh(), [0])
    assert on_ranks(2, 2, strays, [0, 1]) == [alone, alone] and strays(Mesh(), [1]) != alone


def test_where_it_stops():
    whole = continued(Mesh(), Sampling(), 100)
    assert len(whole) == 16 - len(PROMPT)                           # the context is full
    assert continued(Mesh(), Sampling(), 3) == whole[:3]
    assert continued(Mesh(), Sampling(), 0) == []
    first = whole.index(whole[5])
    assert continued(Mesh(), Sampling(), 100, end=whole[5]) == whole[:first]


def test_padding_of_the_vocabulary_is_never_chosen():
    """The model's rows beyond vocab_size are made the likeliest."""
    config = small_config(vocab_size=310)                           # padded to 320
    model = build(config, Mesh())[0]
    bias = torch.zeros(320)
    bias[310:] = 1e4
    model.register_forward_hook(lambda module, inputs, logits: logits + bias)
    assert max(generate(model, PROMPT, 12, -1, Sampling(), 0, Mesh())) < 310


def chosen(sampling, count=300):
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.1, 0.5, 0.3, 0.06, 0.04]).log()
    return [choose(logits, sampling, generator) for _ in range(count)]


def test_sampling():
    for likeliest in (Sampling(), Sampling(1.0, 1), Sampling(1.0, 0, 1e-9), Sampling(1e-9)):
        assert set(chosen(likeliest)) == {1}
    assert set(chosen(Sampling(1.0, 2))) == {1, 2}
    assert set(chosen(Sampling(1.0, 0, 0.85))) == {0, 1, 2}         # 0.5 + 0.3 < 0.85
    for off in (Sampling(1.0, 10**6, 0.0), Sampling(1.0, 0, 1.0)):
        assert set(chosen(off)) == {0, 1, 2, 3, 4}
    assert chosen(Sampling(1.0)).count(1) == pytest.approx(150, abs=40)
    assert chosen(Sampling(0.1)).count(1) > 295


@pytest.mark.parametrize("text", ["def f(x):\n    return '中文 é 😀' # \u2581 \ue000\n",
                                  "\ufffd\ue000"])
def test_stream_shows_whole_characters_and_all_of_the_text(text):
    tokenizer = TOKENIZERS[0]
    prompt = tokenizer.encode("# ")
    pieces = list(stream_text(tokenizer, prompt, iter(tokenizer.encode(text))))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces) and len(pieces) > 10
