"""The form for decoding computes what the model computes."""

import pytest
import torch

from nanogeex.inference_form import inference_form
from nanogeex.mesh import Mesh
from tests.ranks import batch, build, on_ranks, small_config


def before_and_after(mesh):
    model = build(small_config(), mesh)[0].requires_grad_(False)
    ids, _ = batch(small_config(), 3)
    before = model(ids)
    last = model(ids, last=True)
    return before, last, inference_form(model)(ids)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_same_logits(tp):
    for before, last, after in on_ranks(tp, tp, before_and_after):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last, before[:, -1:], rtol=1e-5, atol=1e-5)


def test_the_query_projection_is_gone():
    """Nothing of it is computed for a token; no other weight is there twice."""
    model = build(small_config(), Mesh())[0].requires_grad_(False)
    count = sum(weight.numel() for weight in model.parameters())
    inference_form(model)
    names = dict(model.named_parameters())
    names.pop("word_embeddings.packed", None)           # the head's copy
    assert model.top_query_embeddings.weight.shape == (16, 32)
    assert not any("attention.query" in name for name in names)
    assert count - sum(weight.numel() for weight in names.values()) == 32 * 32 + 32


def test_packed_weights_are_there_once():
    """But for the head's, which is the embedding's."""
    model = inference_form(build(small_config(), Mesh())[0].requires_grad_(False))
    packed = [module for module in model.modules() if hasattr(module, "packed")]
    assert len(packed) == 3 * 4 + 1 if torch.backends.mkldnn.is_available() else not packed
    assert all(module.weight is None for module in packed if module is not model.word_embeddings)


def test_a_row_is_the_same_in_any_batch():
    model = inference_form(build(small_config(), Mesh())[0].requires_grad_(False))
    ids, _ = batch(small_config(), 8)
    together = model(ids)
    for i in range(8):
        torch.testing.assert_close(model(ids[i:i + 1]), together[i:i + 1], rtol=1e-6, atol=1e-6)
