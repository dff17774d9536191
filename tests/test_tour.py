"""The tour shows the collectives that the dry run counts, and what the ranks hold."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from nanogeex.config import UsageError
from nanogeex.tour import PARTS, TourConfig, small_config
from tests.programs import ROOT
from tests.test_plan import predicted

# Blocks: two and the top-query block.  Forward: two all-reduces each; one for either embedding that
# is split; two for the loss.  Backward: two each; one for the head, one for the top queries.  FSDP2
# gathers and reduces blocks and root, each as one.  Then come loss, norm and, with sequence
# parallelism, the gradients of what all ranks hold.
COUNTS = {"tp": {"all-reduce": (0, 2 * 3 + 2 + 2, 2 * 3 + 2, 2)},
          "sequence": {"all-reduce": (0, 1 + 2, 1, 3), "all-gather": (0, 2 * 3 + 1, 2 * 3 + 1, 0),
                       "reduce-scatter": (0, 2 * 3 + 1, 2 * 3 + 1, 0)},
          "zero-2": {"all-reduce": (0, 0, 0, 2), "all-gather": (0, 4, 0, 0),
                     "reduce-scatter": (0, 0, 4, 0)},
          "zero-3": {"all-reduce": (0, 0, 0, 2), "all-gather": (0, 4, 3, 0),
                     "reduce-scatter": (0, 0, 4, 0)}}


def shown(*argv):
    ended = subprocess.run([sys.executable, "-m", "nanogeex.tour", *argv], cwd=ROOT, text=True,
                           capture_output=True, timeout=120)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    assert max(map(len, ended.stdout.splitlines())) <= 100
    return ended.stdout


def check(text, counts, config):
    """The tour `text` of `config`, against counts by part and the dry run."""
    parts = re.split("|".join(f"\n{part}: " for part in PARTS), text)[1:]
    calls, sent, found = Counter(), Counter(), {kind: [0] * 4 for kind in counts}
    for number, part in enumerate(parts):
        for kind, group, dtype, size in re.findall(
                r"^ {6}(\S+) +(tp|dp|world) +\(.*\) +(\w+) +([\d,]+) bytes$", part, re.M):
            found[kind][number] += 1
            calls[kind, group, dtype] += 1
            sent[kind, group, dtype] += int(size.replace(",", ""))
    assert {kind: tuple(number) for kind, number in found.items()} == counts
    expected = predicted(config, 2)
    assert calls == expected.calls and sent == expected.sent
    held = [re.findall(r"^ +rank \d +(.*)$", part, re.M) for part in parts]
    assert all(len(rows) == 2 for rows in held)                         # of both ranks
    weights, gathered, gradients, optimizer = (
        [int(rows[0].replace(",", "").split()[column]) for rows in held] for column in range(4))
    assert weights == [expected.at_rest["weights"]] * 4
    assert optimizer == [expected.at_rest["optimizer"]] * 4
    assert gradients == [0, 0, weights[0], 0]
    return gathered


def test_two_tours():
    text = shown()
    one, two = text.index("TENSOR PARALLEL"), text.index("ZERO-2")
    assert check(text[one:two], COUNTS["tp"], small_config(2)) == [0] * 4
    in_16_bits = 2 * small_config(1).num_parameters
    assert check(text[two:], COUNTS["zero-2"], small_config(1)) == [0, in_16_bits, 0, 0]
    for line in ("y = layer.finish(summands)",
                 "dx, work = _start_sum(dx, ctx.mesh, ctx.sequence_parallel)",
                 "x = layer(x, batch)",
                 "part.backward()", "dist.all_reduce(squared)"):
        assert f"  {line}\n" in text


def test_sequence_parallel():
    config = small_config(2, sequence_parallel=True)
    check(shown("--sequence-parallel"), COUNTS["sequence"], config)


def test_zero_3_holds_few_weights():
    config = small_config(1, reshard_after_forward=True)
    gathered = check(shown("--tp", "1", "--reshard-after-forward"), COUNTS["zero-3"], config)
    assert 0 < gathered[1] < 2 * config.num_parameters / 5 and gathered[2] == 0


@pytest.mark.parametrize("flags, tp", [
    (dict(sequence_parallel=True, tensor_model_parallel_size=1), 2),
    (dict(reshard_after_forward=True, tensor_model_parallel_size=2), 1),
    (dict(sequence_parallel=True, reshard_after_forward=True), 1)])
def test_flags_of_another_tour(flags, tp):
    with pytest.raises(UsageError, match=f"is of the tour of --tp {tp}; leave out"):
        TourConfig(**flags)
