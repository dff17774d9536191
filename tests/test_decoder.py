"""The form for decoding computes what the model computes."""

import pytest
import torch

from nanogeex.decoder import Decoder, place, product
from nanogeex.mesh import Mesh
from nanogeex.precision import cpu_multiplies_bf16
from nanogeex.tensor_parallel import ColumnParallelLinear
from tests.ranks import batch, build, on_ranks, small_config


def decoder(mesh, **changes):
    model, ids = build(small_config(**changes), mesh)[0].requires_grad_(False), batch(
        small_config(), 3)[0]
    whole = model(ids)
    return Decoder(model), ids, whole


def parts(mesh):
    """Logits of the model; and of the decoder, all at once, the last, and in parts."""
    made, ids, whole = decoder(mesh)
    cache = made.empty_cache(3, 16)
    pieces = [made(ids[:, start:stop], cache, start)
              for start, stop in ((0, 7), (7, 8), (8, 9), (9, 14), (14, 16))]
    return whole, made(ids, cache), made(ids, cache, last=True), torch.cat(pieces, 1)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_same_logits(tp):
    for whole, same, last, pieces in on_ranks(tp, tp, parts):
        for mine, its in ((same, whole), (last, whole[:, -1:]), (pieces, whole)):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


def test_rows_that_begin_with_padding():
    made, ids, whole = decoder(Mesh())
    cache, padding = made.empty_cache(3, 16), torch.tensor([[0], [5], [8]])
    for i, width in enumerate(padding.flatten()):
        made(ids[i:i + 1, :9 - width], cache[:, :, i:i + 1, :, width:])
    for start in range(9, 12):
        rows = start - padding
        logits = made(ids.gather(1, rows), cache, start, padding)[:, 0]
        torch.testing.assert_close(logits, whole[torch.arange(3), rows[:, 0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_16_bits(dtype, wide):
    """LayerNorms of a released file may be fp32."""
    model = build(small_config(), Mesh())[0].requires_grad_(False).to(dtype)
    for name, weight in model.named_parameters():
        if wide and "layernorm" in name:
            weight.data = weight.data.float()
    ids = batch(small_config(), 3)[0]
    whole = model(ids)
    made = Decoder(model)
    mine = made(ids, made.empty_cache(3, 16))
    assert mine.dtype == whole.dtype == dtype
    torch.testing.assert_close(mine, whole, rtol=0.02, atol=0.1)


def test_weights_are_there_once():
    """Nothing of the top-query projection is computed for a token; but for the head's placed copy
    no weight is there twice."""
    model = build(small_config(), Mesh())[0].requires_grad_(False)
    made = Decoder(model)
    assert made.queries.shape == (16, 32)
    assert model.top_query_embeddings is None and model.top_query_layer.attention.query is None
    placed = [module for module in model.modules() if hasattr(module, "placed")]
    assert len(placed) == 3 * 4 + 1
    assert all(module.weight is None for module in placed if module is not model.word_embeddings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [16, 256, 640, 257])
def test_placed_products(dtype, outputs):
    """In panels, in oneDNN's layout, or left as they are: fp16, and what has no panels, a prime."""
    linear = ColumnParallelLinear(32, outputs, Mesh()).to(dtype).requires_grad_(False)
    weight, bias = (part.normal_(0, 0.1) for part in linear.parameters())
    place(linear)
    left = type(linear) is ColumnParallelLinear
    assert left == (outputs == 257 if dtype == torch.float32 else
                    dtype == torch.float16 or not cpu_multiplies_bf16())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for rows in (1, 3):
        x = torch.randn(rows, 32).to(dtype)
        whole = x.float() @ weight.float().T + bias.float()
        torch.testing.assert_close(linear(x).float(), whole, rtol=tolerance, atol=tolerance)
        if not left:
            torch.testing.assert_close(product(x, linear.placed, None).float(),
                                       whole - bias.float(), rtol=tolerance, atol=tolerance)


def test_a_row_is_the_same_in_any_batch():
    made, ids, _ = decoder(Mesh())
    together = made(ids, made.empty_cache(3, 16))
    for i in range(3):
        alone = made(ids[i:i + 1], made.empty_cache(1, 16))
        torch.testing.assert_close(alone, together[i:i + 1], rtol=1e-6, atol=1e-6)
