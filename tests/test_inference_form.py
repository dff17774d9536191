"""The form for decoding computes what the model computes."""

import pytest
import torch

from nanogeex.inference_form import inference_form, longer_side_first
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
    """Nothing of it is computed for a token; no weight is there twice."""
    model = build(small_config(), Mesh())[0].requires_grad_(False)
    count = sum(weight.numel() for weight in model.parameters())
    inference_form(model)
    names = dict(model.named_parameters())
    assert model.top_query_embeddings.weight.shape == (16, 32)
    assert not any("attention.query" in name for name in names)
    assert count - sum(weight.numel() for weight in names.values()) == 32 * 32 + 32


def test_longer_side_first():
    wide = torch.randn(8, 4)
    assert longer_side_first(wide).stride() == (1, 8) and longer_side_first(wide).equal(wide)
    for other in (wide.T.contiguous(), wide.bfloat16()):
        assert longer_side_first(other) is other
