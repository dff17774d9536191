"""Decoding against whole forwards, one by one and in batches; sampling; how it ends."""

import pytest
import torch
import torch.distributed as dist

from nanogeex.config import UsageError
from nanogeex.decoder import Decoder
from nanogeex.generate import Sample, Sampling, choose, generate
from nanogeex.mesh import Mesh
from nanogeex.streaming import TextStream
from tests.ranks import build, on_ranks, small_config
from tests.test_tokenizer import TOKENIZERS

PROMPT = [5, 17, 300, 2]
PROMPTS = [PROMPT, [9], list(range(40, 55)), [3, 3, 3], [9], [9]]
NUCLEUS = Sampling(0.9, 50, 0.9)


def ready(mesh, **changes):
    return Decoder(build(small_config(**changes), mesh)[0].requires_grad_(False))


def continued(mesh, sampling, prompts, count=12, end=-1, lookup=0):
    """(ids, finish) a prompt, all in one batch."""
    samples = [Sample(prompt, count, seed) for seed, prompt in enumerate(prompts)]
    for _ in generate(ready(mesh), samples, sampling, end, mesh, lookup):
        pass
    return [(sample.ids, sample.finish) for sample in samples]


def without_cache(prompt, count):
    model, ids = build(small_config(), Mesh())[0], list(prompt)
    for _ in range(min(count, 16 - len(prompt))):
        ids.append(model(torch.tensor([ids]))[0, -1, :320].argmax().item())
    return ids[len(prompt):]


@pytest.mark.parametrize("lookup", [0, 5])
def test_greedy_equals_whole_forwards_to_the_end_of_the_context(lookup):
    for prompt, (ids, finish) in zip(PROMPTS, continued(Mesh(), Sampling(), PROMPTS, 100,
                                                        lookup=lookup), strict=True):
        assert (ids, finish) == (without_cache(prompt, 100), "context")
        assert len(prompt) + len(ids) == 16


@pytest.mark.parametrize("sampling", [Sampling(), NUCLEUS], ids=["greedy", "sampled"])
def test_a_batch_gives_what_each_gives_alone(sampling):
    batch = continued(Mesh(), sampling, PROMPTS, 9, end=7)
    for seed, prompt in enumerate(PROMPTS):
        alone = Sample(prompt, 9, seed)
        list(generate(ready(Mesh()), [alone], sampling, 7, Mesh()))
        assert batch[seed] == (alone.ids, alone.finish)


@pytest.mark.parametrize("sampling", [Sampling(), NUCLEUS], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lookup", [0, 4])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_same_ids_at_every_tp(tp, sampling, lookup):
    expected = continued(Mesh(), sampling, PROMPTS)
    assert on_ranks(tp, tp, continued, sampling, PROMPTS, 12, -1, lookup) == [expected] * tp


def test_samples_of_a_prompt_differ_and_are_prefilled_once():
    model, lengths = ready(Mesh()), []
    model.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape))
    samples = [Sample(PROMPT, 3, seed) for seed in range(5)]
    list(generate(model, samples, Sampling(1.0), -1, Mesh()))
    assert lengths == [(1, 4), (5, 1), (5, 1)]
    assert len({tuple(sample.ids) for sample in samples}) == 5


def test_who_has_ended_leaves_the_batch():
    model, rows = ready(Mesh()), []
    model.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    samples = [Sample(PROMPT, limit, 0) for limit in (0, 2, 5, 3)]
    list(generate(model, samples, Sampling(), -1, Mesh()))
    assert rows == [1, 3, 2, 1, 1]
    assert [(len(sample.ids), sample.finish) for sample in samples] == [
        (limit, "length") for limit in (0, 2, 5, 3)]
    assert samples[2].ids[:3] == samples[3].ids


def strays(mesh, seeds):
    """Each rank has a seed of its own."""
    sample = Sample(PROMPT, 12, seeds[mesh.rank])
    list(generate(ready(mesh), [sample], Sampling(1.0), -1, mesh))
    return sample.ids


def test_the_choice_of_rank0_is_everyones():
    alone = strays(Mesh(), [0])
    assert on_ranks(2, 2, strays, [0, 1]) == [alone, alone] and strays(Mesh(), [1]) != alone


def collectives(mesh):
    """all-reduces, gathers and broadcasts of one step of decoding."""
    counts = {}

    def counted(name, true):
        def call(*arguments, **keywords):
            counts[name] = counts.get(name, 0) + 1
            return true(*arguments, **keywords)
        return call

    for name in ("all_reduce", "gather", "broadcast"):
        setattr(dist, name, counted(name, getattr(dist, name)))
    steps = generate(ready(mesh), [Sample(PROMPT, 12, 0)], Sampling(), -1, mesh)
    next(steps)
    counts.clear()
    next(steps)
    return counts


def test_collectives_of_a_token():
    """Two all-reduces a block, one of the word embeddings; the logits; the choice."""
    assert on_ranks(2, 2, collectives) == [
        {"all_reduce": 3 * 2 + 1, "gather": 1, "broadcast": 1}] * 2


def test_where_it_stops():
    [(whole, _)] = continued(Mesh(), Sampling(), [PROMPT], 100)
    assert continued(Mesh(), Sampling(), [PROMPT], 3) == [(whole[:3], "length")]
    assert continued(Mesh(), Sampling(), [PROMPT], 0) == [([], "length")]
    first = whole.index(whole[5])
    for lookup in (0, 3):
        assert continued(Mesh(), Sampling(), [PROMPT], 100, whole[5], lookup) == [
            (whole[:first], "end")]


@pytest.mark.parametrize("lookup", [0, 3])
def test_stop_strings(lookup):
    tokenizer, prompt = TOKENIZERS[0], TOKENIZERS[0].encode("x = ")

    def finished(stops):
        sample = Sample(prompt, 10, 0, TextStream(tokenizer, prompt, stops))
        list(generate(model, [sample], Sampling(), -1, Mesh(), lookup))
        return "".join(sample.parts), sample.finish, len(sample.ids)

    model = ready(Mesh(), vocab_size=400)
    whole, finish, count = finished([])
    assert finish == "length" and len(whole) > 6
    stop = whole[3:6]
    text, finish, fewer = finished(["never", stop])
    assert (text, finish) == (whole[:whole.index(stop)], "stop") and fewer < count


def test_padding_of_the_vocabulary_is_never_chosen():
    """The model's rows beyond vocab_size are made the likeliest."""
    model = ready(Mesh(), vocab_size=310)                           # padded to 320
    bias = torch.zeros(320)
    bias[310:] = 1e4
    model.register_forward_hook(lambda module, inputs, logits: logits + bias)
    for sampling in (Sampling(), Sampling(1.0)):
        sample = Sample(PROMPT, 12, 0)
        list(generate(model, [sample], sampling, -1, Mesh()))
        assert max(sample.ids) < 310


def chosen(sampling, count=300):
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.06, 0.04]]).log()
    return [choose(logits, sampling, [generator]).item() for _ in range(count)]


def test_sampling():
    for likeliest in (Sampling(), Sampling(1.0, 1), Sampling(1.0, 0, 1e-9), Sampling(1e-9)):
        assert set(chosen(likeliest)) == {1}
    assert set(chosen(Sampling(1.0, 2))) == {1, 2}
    assert set(chosen(Sampling(1.0, 0, 0.85))) == {0, 1, 2}         # 0.5 + 0.3 < 0.85
    assert set(chosen(Sampling(1.0, 2, 0.6))) == {1}                # 0.5 / 0.8 holds it alone
    for off in (Sampling(1.0, 10**6, 0.0), Sampling(1.0, 0, 1.0)):
        assert set(chosen(off)) == {0, 1, 2, 3, 4}
    assert chosen(Sampling(1.0)).count(1) == pytest.approx(150, abs=40)
    assert chosen(Sampling(0.1)).count(1) > 295


def test_rows_draw_from_generators_of_their_own():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    def seeded():
        return [torch.Generator().manual_seed(seed) for seed in range(3)]
    together = choose(logits, NUCLEUS, seeded()).tolist()
    assert together == [choose(logits[i:i + 1], NUCLEUS, [generator]).item()
                        for i, generator in enumerate(seeded())]


def test_equal_logits_are_taken_in_order():
    """Greedy, top-k 1 and temperature near 0 agree on them, too."""
    for sampling in (Sampling(), Sampling(1.0, 1)):
        assert choose(torch.tensor([[1.0, 2.0, 2.0]]), sampling, [torch.Generator()]).item() == 1


def of_weights_that_are_not_finite(mesh, sampling, lookup):
    model = ready(mesh)
    model.model.final_layernorm.weight.fill_(torch.nan)
    with pytest.raises(UsageError, match="not finite"):
        list(generate(model, [Sample(PROMPT, 5, 0)], sampling, -1, mesh, lookup))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 5, 0.9)])
@pytest.mark.parametrize("lookup", [0, 4])
def test_logits_that_are_not_finite_end_it_on_every_rank(sampling, lookup):
    of_weights_that_are_not_finite(Mesh(), sampling, lookup)
    on_ranks(2, 2, of_weights_that_are_not_finite, sampling, lookup)
