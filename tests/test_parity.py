"""The parity report's own figures, at a few topologies: losses and final weights after 30 steps."""

import pytest

from nanogeex import data
from tests import parity
from tests.test_data import source


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    (folder / "source").mkdir()
    for number in range(60):
        (folder / f"source/{number}.py").write_text(source(number))
    return data.prepare([str(folder / "source")], folder / "data", 1000, 1)


@pytest.mark.parametrize("precision, topologies, loss, weight", [
    ("fp32", ["1x2", "3x1", "5x1", "2x2", "1x4sp", "3x2spz3"], 2e-5, 1e-4),
    ("bf16", ["2x2", "2x2sp"], 2e-2, 1), ("fp16", ["2x2", "2x2sp"], 2e-2, 1)])
def test_same_losses_and_weights(prepared, tmp_path, precision, topologies, loss, weight):
    """A global batch of 7, and the default learning rate: nothing is loosened to compare."""
    argv = [*parity.SHAPE, "--train-iters", "30", "--data", str(prepared), "--lr", "6e-3",
            "--precision", precision]
    true = parity.run(1, 1, argv, tmp_path / "1x1")
    assert true[0][30]["loss"] < true[0][1]["loss"] - 0.5
    for topology in topologies:
        mine = parity.run(*parity.place(topology, argv), tmp_path / topology)
        its_loss, _, its_weight, name = parity.differences(mine, true)
        assert its_loss < loss and its_weight < weight, (topology, its_loss, its_weight, name)
