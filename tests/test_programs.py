"""train.py and infer.py end to end: the same curve everywhere, exact resume, text out."""

import json
import re

import pytest

from tests.programs import ROOT, metrics, run
from tests.test_data import source

SMALL = ["--precision", "fp32", "--num-workers", "1", "--vocab-size", "400", "--hidden-size", "64",
         "--seq-length", "64", "--global-batch-size", "7", "--micro-batch-size", "2",
         "--lr-decay-iters", "12", "--log-interval", "4", "--eval-interval", "6"]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run of 12 steps in one process that saved at step 6: its folder, data, what it said."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "source").mkdir()
    for number in range(30):
        (folder / f"source/{number}.py").write_text(source(number))
    data = ["--data", folder / "source"]
    ended = run("train.py", *SMALL, *data, "--out", folder / "out", "--train-iters", 12,
                "--save-interval", 6)
    return folder / "out", data, ended


def same(actual, expected, steps, tolerance=1e-4):
    assert sorted(actual) == list(steps)
    for step in steps:
        for key in ("loss", "grad_norm", "lr", "samples", "tokens", "loss_scale", "skipped"):
            mine, true = actual[step][key], expected[step][key]
            if true is not None:                    # the norm of a step that overflowed
                true = pytest.approx(true, rel=tolerance)
            assert mine == true, (step, key)


def test_what_a_run_leaves_and_says(one):
    out, _, ended = one
    names = {str(path.relative_to(out)) for path in out.rglob("*") if "distcp" not in path.name}
    assert names >= {"config.json", "tokenizer.model", "metrics.jsonl", "data/train.bin",
                     "data/val.bin", "data/meta.json", "checkpoints/step-00000006/meta.json",
                     "checkpoints/step-00000012/meta.json"}
    assert set(metrics(out)[1]) == {
        "step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "samples", "tokens",
        "tokens_per_s", "mfu", "step_s", "mem_gb"}
    losses = {step: record["val_loss"] for step, record in metrics(out).items()
              if "val_loss" in record}
    assert list(losses) == [6, 12] and losses[12] == pytest.approx(loss_of(ended), abs=1e-4)
    assert f"step 6 | validation loss {losses[6]:.4f}" in ended.stderr
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 64
    for part in ("Python", "step  4/12 | loss", "step 6 | validation loss", "saved", "eta 0:00:00"):
        assert part in ended.stderr
    assert ended.stdout.startswith("step 12 | validation loss") and ended.stdout.count("\n") == 1
    assert "bits per byte" in ended.stdout and "gzip -9" in ended.stdout
    assert metrics(out)[12]["loss"] < metrics(out)[1]["loss"] - 0.2
    assert "Warning" not in ended.stderr


def loss_of(ended):
    return float(re.search(r"validation loss ([0-9.]+)", ended.stdout)[1])


@pytest.mark.parametrize("ranks, tp", [(4, 2), (8, 8), (3, 1)])
def test_same_curve_at_every_topology(one, tmp_path, ranks, tp):
    out, data, alone = one
    size = ["--micro-batch-size", 7] if ranks == 8 else []          # on two cores
    ended = run("train.py", *SMALL, *data, "--out", tmp_path, "--train-iters", 12, "--tp", tp,
                *size, ranks=ranks)
    same(metrics(tmp_path), metrics(out), range(1, 13))
    assert loss_of(ended) == pytest.approx(loss_of(alone), abs=2e-4)        # four digits are shown


@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 2), (3, 1)])
def test_resume_is_exact_at_any_topology(one, tmp_path, ranks, tp):
    out, data, _ = one
    argv = [*SMALL, *data, "--out", tmp_path, "--tp", tp]
    run("train.py", *SMALL, *data, "--out", tmp_path, "--train-iters", 7)
    ended = run("train.py", *argv, "--train-iters", 12, ranks=ranks)
    same(metrics(tmp_path), metrics(out), range(1, 13), 1e-9 if ranks == 1 else 1e-4)
    assert [step for step, record in metrics(tmp_path).items() if "restart" in record] == [8]
    assert "resuming" in ended.stderr and "at step 7, --train-iters 12 (was 7)" in ended.stderr


def test_fp16_resumes_with_its_loss_scale(one, tmp_path):
    _, data, _ = one
    argv = [*SMALL, *data, "--fp16", "--initial-loss-scale", 2**22, "--loss-scale-window", 2]
    run("train.py", *argv, "--out", tmp_path / "whole", "--train-iters", 12)
    for iters in (5, 12):
        run("train.py", *argv, "--out", tmp_path / "parts", "--train-iters", iters)
    whole = metrics(tmp_path / "whole")
    same(metrics(tmp_path / "parts"), whole, range(1, 13), 1e-9)
    assert whole[12]["skipped"] > 0 and len({record["loss_scale"] for record in whole.values()}) > 2


def test_a_finished_run_is_left_as_it_is(one):
    out, data, before = one
    ended = run("train.py", *SMALL, *data, "--out", out, "--train-iters", 12)
    assert ended.stdout == before.stdout
    assert "nothing to train: step 12 of --train-iters 12 is reached" in ended.stderr
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 13                                     # the last step's, before and after


def test_bf16_evaluates_the_weights_of_the_last_step(one, tmp_path):
    """Again from its checkpoint, the same loss: the copy that computes was not a step behind."""
    _, data, _ = one
    argv = [*SMALL, *data, "--bf16", "--train-iters", 3, "--out", tmp_path]
    assert run("train.py", *argv).stdout == run("train.py", *argv).stdout


def test_resume_takes_the_flags_of_today(one, tmp_path):
    _, data, _ = one
    argv = [*SMALL, *data, "--fp16", "--out", tmp_path]
    run("train.py", *argv, "--train-iters", 2)
    run("train.py", *argv, "--train-iters", 6, "--loss-scale-window", 1)
    scales = [record["loss_scale"] for record in metrics(tmp_path).values()]
    assert scales == [2**12, 2**12, 2**12, 2**13, 2**14, 2**15]


def test_a_rank_that_dies_once_is_restarted(one, tmp_path):
    """torchrun's store is the same in the second attempt; nothing in it may be taken for new."""
    _, data, _ = one
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train, nanogeex.report\n"
        "append = nanogeex.report.append\n"
        "def once(metrics, record, board):\n"
        "    if record['step'] == 5 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os._exit(1)\n"
        "    append(metrics, record, board)\n"
        "nanogeex.report.append = once\n"
        "train.launch(train.main)\n")
    argv = [*SMALL, *data, "--out", tmp_path / "out", "--train-iters", 8, "--save-interval", 2,
            "--no-async-save"]
    ended = run(tmp_path / "program.py", *argv, ranks=2, torchrun=["--max-restarts=1"])
    assert "step-00000004 at step 4" in ended.stderr
    assert sorted(metrics(tmp_path / "out")) == list(range(1, 9))


def test_inf_on_one_rank_is_skipped_by_all(one, tmp_path):
    """One tp rank of one data rank; replicas are compared when it saves, at the end."""
    _, data, _ = one
    argv = [*SMALL, *data, "--fp16", "--hysteresis", 1, "--tp", 2, "--train-iters", 6]
    run("train.py", *argv, "--debug-inf", "3:1", "--out", tmp_path, ranks=4)
    records = metrics(tmp_path)
    assert [records[step]["skipped"] for step in range(1, 7)] == [0, 0, 1, 1, 1, 1]
    assert [records[step]["loss_scale"] for step in range(3, 7)] == [4096, 2048, 2048, 2048]
    assert records[3]["grad_norm"] is None and records[6]["loss"] < records[1]["loss"]


def test_overflow_at_the_smallest_scale_stops_the_run(one, tmp_path):
    _, data, _ = one
    argv = [*SMALL, *data, "--fp16", "--initial-loss-scale", 1, "--hysteresis", 1]
    argv += ["--save-interval", 2, "--train-iters", 6, "--debug-inf", "3:0", "--out", tmp_path]
    ended = run("train.py", *argv, check=False)
    assert ended.returncode == 2
    assert "--min-loss-scale 1: reached, and step 3 still overflows, first in final_layernorm" in (
        ended.stderr)
    assert (tmp_path / "checkpoints/step-00000002/meta.json").is_file()
    assert max(metrics(tmp_path)) == 2
    argv[argv.index("--debug-inf") + 1] = "99:0"            # and goes on from there
    run("train.py", *argv)
    assert sorted(metrics(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_dropout_resumes_exactly(one, tmp_path):
    _, data, _ = one
    argv = [*SMALL, *data, "--hidden-dropout", 0.1, "--attention-dropout", 0.1]
    run("train.py", *argv, "--out", tmp_path / "whole", "--train-iters", 8)
    for iters in (3, 8):
        run("train.py", *argv, "--out", tmp_path / "parts", "--train-iters", iters)
    same(metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), range(1, 9), 1e-9)
    assert metrics(tmp_path / "whole")[1]["loss"] != metrics(one[0])[1]["loss"]


def test_the_same_command_twice(one, tmp_path):
    """Bit for bit, over 50 steps with dropout on two ranks; saving compares the tp ranks' copies
    of what they all hold, bit for bit too."""
    _, data, _ = one
    argv = [*SMALL, *data, "--tp", 2, "--train-iters", 50, "--hidden-dropout", 0.1,
            "--attention-dropout", 0.1]
    runs = []
    for name in ("first", "second"):
        run("train.py", *argv, "--out", tmp_path / name, ranks=2)
        runs.append(metrics(tmp_path / name))
    timings = ("tokens_per_s", "step_s", "mem_gb")
    for step, record in runs[0].items():
        assert all(runs[1][step][key] == value for key, value in record.items()
                   if key not in timings), step


def test_560_samples_in_micro_batches_of_10_on_3_ranks(one, tmp_path):
    out, data, _ = one
    argv = [*SMALL, "--data", out / "data", "--seq-length", 8, "--train-iters", 2,
            "--global-batch-size", 560, "--micro-batch-size", 10]
    ended = run("train.py", *argv, "--out", tmp_path / "three", ranks=3)
    assert "shares of 186 and 187" in ended.stderr and "data rank: 19" in ended.stderr
    run("train.py", *argv, "--out", tmp_path / "one")
    same(metrics(tmp_path / "three"), metrics(tmp_path / "one"), [1, 2])


def test_micro_batches_larger_than_a_share(one, tmp_path):
    out, data, _ = one
    ended = run("train.py", *SMALL, *data, "--micro-batch-size", 99, "--out", tmp_path,
                "--train-iters", 12)
    assert "--micro-batch-size 99 is more than a data rank's share of a step, 7" in ended.stderr
    same(metrics(tmp_path), metrics(out), range(1, 13), 1e-6)


def test_resume_from_a_path(one, tmp_path):
    out, data, _ = one
    run("train.py", *SMALL, *data, "--out", tmp_path, "--train-iters", 12,
        "--resume", out / "checkpoints/step-00000006")
    same(metrics(tmp_path), metrics(out), range(7, 13), 1e-9)


def test_infer_continues_at_every_tp(one):
    out, _, _ = one
    greedy = ["--load", out, "--greedy", "--out-seq-length", 30]
    alone = run("infer.py", *greedy, "--prompt", "def function_1", "class").stdout
    assert alone.startswith("def function_1") and "\n\nclass" in alone and len(alone) > 40
    assert run("infer.py", *greedy, "--prompt", "def function_1", "class", ranks=2).stdout == alone
    piped = run("infer.py", *greedy, input="def function_1").stdout
    assert alone.startswith(piped.removesuffix("\n"))


def test_weights_of_another_run_bring_their_tokenizer(one, tmp_path):
    out, _, _ = one
    (tmp_path / "other").mkdir()
    for number in range(9):
        (tmp_path / f"other/{number}.c").write_text(source(900 + number, "c"))
    run("train.py", *SMALL, "--data", tmp_path / "other", "--out", tmp_path / "tuned",
        "--resume", out, "--train-iters", 14)
    mine, its = (folder / "tokenizer.model" for folder in (tmp_path / "tuned", out))
    assert mine.read_bytes() == its.read_bytes()


def test_a_run_that_diverges_says_so(one, tmp_path):
    _, data, _ = one
    ended = run("train.py", *SMALL, *data, "--out", tmp_path, "--train-iters", 4, "--lr", "1e30")
    assert "validation loss nan, nan bits per byte" in ended.stdout


def test_infer_from_a_checkpoint_itself(one):
    out, _, _ = one
    argv = ["--greedy", "--out-seq-length", 5, "--prompt", "x"]
    newest = run("infer.py", "--load", out, *argv).stdout
    assert run("infer.py", "--load", out / "checkpoints/step-00000012", *argv).stdout == newest


def test_infer_without_a_prompt_or_tokens(one):
    out, _, _ = one
    assert run("infer.py", "--load", out, input="").stdout.strip()
    assert run("infer.py", "--load", out, "--out-seq-length", 0, "--prompt", "x").stdout == "x\n"
