"""int8 against the weights that it stands for: values, memory, every tp, and the kernel's paths."""

import pytest
import torch
import torch.nn.functional as F

from nanogeex import quantize
from nanogeex.config import ModelConfig
from nanogeex.decoder import Decoder
from nanogeex.generate import Sample, Sampling, generate
from nanogeex.mesh import Mesh
from nanogeex.quantize import FEW, Int8Column, Int8Row, int8_product
from nanogeex.weights import load_model
from tests.ranks import on_ranks
from tests.released import TINY, write


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("dtype, off", [(torch.float32, 1e-2), (torch.bfloat16, 2e-2)])
def test_product(rows, dtype, off):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (48, 64), generator=generator, dtype=torch.int8)
    scale = (torch.rand(48, generator=generator) / 100).bfloat16()
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    true = F.linear(x.float(), weight.float() * scale[:, None])
    mine = int8_product(x, weight, scale)
    assert mine.dtype == dtype and mine.shape == (rows, 48)
    assert (mine - true).abs().max() < off * true.abs().max()


def test_weights_are_within_half_a_step_of_the_true_ones():
    true, mine = load_model(TINY, 8), load_model(TINY, 8, int8=True)
    for name, module in mine.named_modules():
        if isinstance(module, Int8Column | Int8Row):
            weight = true.get_submodule(name).weight
            scale = module.scale.float()[:, None]
            off = (module.weight * scale - weight).abs()
            assert (off <= 0.51 * scale).all(), name                       # scales are rounded
            assert module.weight.dtype == torch.int8
            assert torch.equal(module.bias, true.get_submodule(name).bias)
    kinds = [type(module) for module in mine.modules()]
    assert (kinds.count(Int8Column), kinds.count(Int8Row)) == (3 * 4 - 1, 3 * 2)


def test_a_row_of_zeros():
    model = load_model(TINY, 8, int8=True)
    linear = model.layers[0].mlp.dense_h_to_4h
    quantize.fill(linear, torch.zeros(linear.weight.shape), Mesh())
    assert not linear.weight.any() and linear(torch.ones(1, 64)).isfinite().all()


def weights(mesh):
    model = load_model(TINY, 8, mesh=mesh, int8=True)
    return {name: weight.data for name, weight in model.named_parameters()}


@pytest.mark.parametrize("tp", [2, 8])
def test_the_same_weights_at_every_tp(tp):
    whole = weights(Mesh())
    ranks = on_ranks(tp, tp, weights)
    for name in whole:
        parts = [rank[name] for rank in ranks]
        dim = next((d for d in range(whole[name].dim())
                    if parts[0].shape[d] != whole[name].shape[d]), None)
        joined = parts[0] if dim is None else torch.cat(parts, dim)
        assert torch.equal(joined, whole[name]), name


def text(mesh, int8):
    model = Decoder(load_model(TINY, 8, mesh=mesh, int8=int8))
    samples = [Sample(prompt, 16, 0) for prompt in ([5, 17, 300], [9])]
    list(generate(model, samples, Sampling(), -1, mesh))
    return [sample.ids for sample in samples]


def test_text_is_nearly_that_of_the_true_weights():
    """The first choices agree: the cases are not close calls."""
    true, mine = text(Mesh(), False), text(Mesh(), True)
    assert [ids[:4] for ids in mine] == [ids[:4] for ids in true]


def test_half_of_fp16(tmp_path):
    path = write(tmp_path / "a.pt", ModelConfig(8, 256, 2, 64, 512, 512))
    def size(**how):
        return sum(weight.nbytes for weight in load_model(path, 2, "fp16", **how).parameters())
    assert size(int8=True) < 0.56 * size()
