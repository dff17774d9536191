"""report.png, from metrics that were made up."""

import json
import subprocess
import sys

import numpy as np
import pytest

from nanogeex import figures
from nanogeex.config import UsageError
from tests.programs import ROOT


def record(step, **changes):
    return dict(step=step, loss=8.0 - step / 10, lr=1e-3, skipped=0, tokens=100 * step) | changes


@pytest.fixture
def made_up(tmp_path):
    """12 steps: 3 is left out, 4 and 12 are evaluated, 9 and 10 were lost and trained again."""
    records = [record(1), record(2), record(3, loss=None, skipped=1),
               record(4, skipped=1, val_loss=7.7),
               *(record(step, skipped=1) for step in (5, 6, 7, 8)),
               *(record(step, skipped=2, loss=9.0) for step in (9, 10)),
               record(9, skipped=1, restart=True),
               *(record(step, skipped=1) for step in (10, 11, 12)),
               record(12, skipped=1, val_loss=6.9)]
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 13, "lo')
    (run / "config.json").write_text(json.dumps({"data": None}))
    tokens = {"Python": 60, "C++": 30, "": 10, "Perl": 0}
    (run / "data/meta.json").write_text(json.dumps(
        {"languages": {name: {"tokens": count} for name, count in tokens.items()}}))
    return run


def test_what_is_read(made_up):
    records = figures.read_metrics(made_up)
    assert [record["step"] for record in records] == list(range(1, 13))
    loss = figures.column(records, "loss")
    assert np.isnan(loss[2]) and loss[8] == pytest.approx(7.1)
    assert np.flatnonzero(figures.skipped(records)).tolist() == [2]
    assert np.flatnonzero(np.isfinite(figures.column(records, "val_loss"))).tolist() == [3, 11]


def test_steps_beyond_a_restart_are_forgotten(made_up):
    with open(made_up / "metrics.jsonl", "a") as file:
        file.write("\n" + json.dumps(record(6, restart=True)) + "\n")
    assert [record["step"] for record in figures.read_metrics(made_up)] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_goes_on_from_another_has_skipped_nothing_yet():
    records = [record(7, skipped=3, restart=True), record(8, skipped=4)]
    assert figures.skipped(records).tolist() == [False, True]


def test_shares_of_languages(made_up, tmp_path):
    assert figures.languages(made_up) == {"Python": 0.6, "C++": 0.3, "(unknown)": 0.1}
    other = tmp_path / "other"                                  # was given the first one's data
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"data": [str(made_up)]}))
    assert figures.languages(other) == figures.languages(made_up)
    (made_up / "data/meta.json").write_text(json.dumps(
        {"languages": {str(n): {"tokens": 100 - n} for n in range(20)}}))
    shares = figures.languages(made_up)
    assert len(shares) == figures.LANGUAGES and list(shares)[-1] == "9 others"
    assert sum(shares.values()) == pytest.approx(1)


def test_running_mean_leaves_out_what_is_not_there():
    mean = figures.running_mean(np.array([1.0, np.nan, 3.0, 5.0]), 3)
    assert mean.tolist() == [1.0, 2.0, 4.0, 4.0]
    assert len(figures.running_mean(np.ones(2), 5)) == 2        # of the shorter of two runs


@pytest.mark.parametrize("x, place", [("steps", 9), ("tokens", 900)])
def test_figure(made_up, x, place):
    pytest.importorskip("matplotlib")
    figure = figures.draw({"run": figures.read_metrics(made_up)}, {"Python": 0.9, "C++": 0.1}, x)
    left, loss, rate = figure.axes
    assert [bar.get_width() for bar in left.patches] == [0.9, 0.1]
    assert [text.get_text() for text in left.texts] == ["90.0%", "10.0%"]
    training, validation, skip, restart = loss.lines
    assert len(training.get_xdata()) == 12 and len(rate.lines) == 1
    unit = place // 9
    assert validation.get_xydata().tolist() == [[4 * unit, 7.7], [12 * unit, 6.9]]
    assert list(skip.get_xdata()) == [3 * unit] and list(restart.get_xdata()) == [place, place]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["training loss", "validation loss", "step left out",
                      "went on from a checkpoint", "learning rate (right)"]


def test_a_validation_loss_above_all_others_is_seen():
    pytest.importorskip("matplotlib")
    records = [record(step, loss=50.0 if step == 1 else 2.0) for step in range(1, 301)]
    records[-1]["val_loss"] = 9.0
    _, loss, _ = figures.draw({"run": records}, {}, "steps").axes
    assert 9 < loss.get_ylim()[1] < 10


def test_several_runs(made_up, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    other = tmp_path / "other"                                  # long, and nothing but steps
    other.mkdir()
    (other / "metrics.jsonl").write_text(
        "\n".join(json.dumps(record(step)) for step in range(1, 301)))
    figures.main([str(other), str(made_up)])
    assert (other / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in other.iterdir()) == ["metrics.jsonl", "report.png"]
    assert f"{other} 300 steps, {made_up} 12 steps" in capsys.readouterr().err
    runs = {run.name: figures.read_metrics(run) for run in (other, made_up)}
    figure = figures.draw(runs, {}, "steps")
    figure.savefig(tmp_path / "without shares.png")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["other", "run", "training loss, mean of 3 steps"]


def test_mistakes(made_up, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no/metrics.jsonl: No such file.*; give a run directory"):
        figures.main([str(tmp_path / "no")])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="matplotlib: not installed.*; pip install matplotlib"):
        figures.main([str(made_up)])
    (made_up / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="holds no step yet"):
        figures.main([str(made_up)])
    ended = subprocess.run([sys.executable, "-m", "nanogeex.report"], cwd=ROOT, text=True,
                           capture_output=True)
    assert ended.returncode == 2 and ended.stderr.startswith("report.py: ") and (
        "RUN..." in ended.stderr and ended.stderr.count("\n") == 1)
