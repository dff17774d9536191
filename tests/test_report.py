"""Log line and metrics."""

import io
import json
import math
import sys

import pytest
import torch

from nanogeex import report
from nanogeex.config import UsageError
from tests.programs import metrics

RECORD = dict(step=20, loss=2.5, lr=1e-3, grad_norm=0.5, loss_scale=4096.0, skipped=1, samples=320,
              tokens=40960, tokens_per_s=1000.0, step_s=2.0, mem_gb=1.5, mfu=0.25)


def test_log_line_has_everything():
    line = report.log_line(RECORD, 1000, step_s=4.0)                # twice as slow as this step
    for part in ("step   20/1000", "loss 2.5000", "lr 1.00e-03", "grad norm 0.500", "scale 4096",
                 "skipped 1", "500 tokens/s", "mfu 12.5%", "1.50 GB", "eta 1:05:20"):
        assert part in line


def test_metrics_are_json_and_the_later_record_of_a_step_counts(tmp_path):
    file = io.StringIO()
    for record in (RECORD, RECORD | dict(step=21, grad_norm=math.inf), RECORD | dict(loss=2.0)):
        report.append(file, record)
    (tmp_path / "metrics.jsonl").write_text(file.getvalue())
    records = metrics(tmp_path)
    assert list(records) == [20, 21]
    assert records[20]["loss"] == 2.0 and records[21]["grad_norm"] is None


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(RECORD) + '\n{"step": 21, "lo')
    for step in (21, 22):
        with report.open_metrics(path, resume=True) as file:
            report.append(file, RECORD | dict(step=step))
    assert list(metrics(tmp_path)) == [20, 21, 22]
    report.open_metrics(path, resume=False).close()
    assert path.read_text() == ""


def test_unknown_hardware_has_no_peak():
    assert report.peak_flops(torch.device("cpu")) == 0.0


def test_tensorboard_gets_the_same_and_goes_on(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report.check_tensorboard(str(tmp_path / "board"))
    assert report.open_tensorboard(None, 0) is None
    for start, loss in ((20, 2.5), (21, 2.0)):                  # steps 21 and 22, then 22 again
        board = report.open_tensorboard(str(tmp_path / "board"), start)
        for step in range(start + 1, 23):
            report.append(io.StringIO(), RECORD | dict(step=step, loss=loss), board)
        board.close()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert set(events.Tags()["scalars"]) == set(RECORD) - {"step"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(21, 2.5), (22, 2.0)]


def test_tensorboard_that_cannot_be_had(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", torch)              # is there
    with pytest.raises(UsageError, match="--tensorboard-dir .*/file: File exists; give one that"):
        report.check_tensorboard(str(tmp_path / "file"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)               # is not
    with pytest.raises(UsageError, match="--tensorboard-dir board: tensorboard is not installed;"):
        report.check_tensorboard("board")
