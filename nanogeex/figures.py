"""A run as a picture: `python -m nanogeex.report RUN [RUN ...]` draws report.png into the first.

      left     what the model reads: the share of each language
      right    how it learns: loss of each step and of each evaluation, the learning rate behind
               them, steps that were left out and places where the run went on from a checkpoint

All of it is read from data/meta.json and metrics.jsonl.  matplotlib is imported here alone, when
there is something to draw.

Tests: tests/test_figures.py.
"""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanogeex.command_line import parse
from nanogeex.config import UsageError, flag

LANGUAGES = 12                          # bars, at most; the others are one
GREY = "0.45"


@dataclass
class ReportConfig:
    runs: list[str] | None = flag(
        None, "figure", "run directories; the first gets report.png and shows its corpus",
        positional="RUN...")
    x: str = flag("steps", "figure", "what the loss is drawn over", choices=("steps", "tokens"))


def read_metrics(run: Path) -> list[dict]:
    """A record a step, in order; what a restart trained again counts once.  Raises UsageError."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{run}/metrics.jsonl: {error.strerror}; give a run directory of train.py"
                         ) from None
    records: dict[int, dict] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:                                      # cut short by a crash
            continue
        if record.get("restart"):                               # from here on the past is another
            records = {step: old for step, old in records.items() if step < record["step"]}
        records[record["step"]] = record
    if not records:
        raise UsageError(f"{run}/metrics.jsonl: holds no step yet; wait for the first")
    return list(records.values())


def languages(run: Path) -> dict[str, float]:
    """language -> share of the corpus's tokens, the largest first; empty if that is not known."""
    try:
        sources = json.loads((run / "config.json").read_text())["data"] or []
        roots = [run, *map(Path, sources)]                      # its own data, or prepared before
        places = [place for root in roots for place in (root / "data", root)]
        meta = next(place / "meta.json" for place in places if (place / "meta.json").is_file())
        tokens = {name or "(unknown)": counts["tokens"] for name, counts in
                  json.loads(meta.read_text())["languages"].items() if counts["tokens"]}
    except (OSError, StopIteration, ValueError, KeyError):
        return {}
    total = sum(tokens.values())
    shares = {name: tokens[name] / total for name in sorted(tokens, key=tokens.get, reverse=True)}
    if len(shares) <= LANGUAGES:
        return shares
    kept = dict(list(shares.items())[:LANGUAGES - 1])
    return kept | {f"{len(shares) - len(kept)} others": 1 - sum(kept.values())}


def column(records: list[dict], name: str) -> np.ndarray:
    """One number a step; nan where there is none."""
    values = (record.get(name) for record in records)
    return np.array([math.nan if value is None else value for value in values], float)


def skipped(records: list[dict]) -> np.ndarray:
    """Which of the steps were left out: `skipped` counts them since the run began."""
    counts = column(records, "skipped")
    return np.diff(counts, prepend=counts[0] if records[0]["step"] > 1 else 0) > 0


def running_mean(y: np.ndarray, width: int) -> np.ndarray:
    """Over `width` values around each, fewer at the ends; those that are not there are left out."""
    there, window = np.isfinite(y), np.ones(min(width, len(y)))
    count = np.convolve(there, window, "same")
    with np.errstate(invalid="ignore"):
        return np.convolve(np.where(there, y, 0.0), window, "same") / count


def draw(runs: dict[str, list[dict]], shares: dict[str, float], x: str):
    """The figure: `runs` by name, the corpus of the first.  Raises UsageError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ModuleNotFoundError:
        raise UsageError("matplotlib: not installed, and figures need it; pip install matplotlib"
                         ) from None
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, loss = figure.subplots(1, 2, width_ratios=(1, 3))
    draw_shares(left, shares)
    rate = loss.twinx()
    loss.set_zorder(1)                                          # above the learning rate
    loss.patch.set_visible(False)
    width = 1 + max(map(len, runs.values())) // 200 * 2         # steps of the running mean, odd
    training = f"training loss, mean of {width} steps" if width > 1 else "training loss"
    keys: dict[str, dict] = {training: {}}                      # styles that occur, for the legend
    for number, records in enumerate(runs.values()):
        color, at = f"C{number % 10}", column(records, "tokens" if x == "tokens" else "step")
        y = column(records, "loss")
        if width > 1:
            loss.plot(at, y, color=color, alpha=0.25, linewidth=0.8)
        loss.plot(at, running_mean(y, width), color=color, linewidth=1.5)
        evaluated = np.isfinite(column(records, "val_loss"))
        if evaluated.any():
            keys["validation loss"] = dict(marker="o", linestyle="--")
            loss.plot(at[evaluated], column(records, "val_loss")[evaluated], "o--", color=color,
                      markeredgecolor="white", markersize=6)
        rate.plot(at, column(records, "lr"), color=color if len(runs) > 1 else GREY, linestyle=":")
        if (left_out := skipped(records)).any():
            keys["step left out"] = dict(marker="x", linestyle="")
            loss.plot(at[left_out], np.full(left_out.sum(), 0.03), "x", color=color,
                      transform=loss.get_xaxis_transform())
        for place in at[[bool(record.get("restart")) for record in records]]:
            keys["went on from a checkpoint"] = dict(linestyle="-.", linewidth=0.8)
            loss.axvline(place, color=color, linestyle="-.", linewidth=0.8)
    keys["learning rate (right)"] = dict(linestyle=":")
    # Where a long run begins, out of the untrained model's loss, would press all else together.
    later = (column(records[len(records) // 100:], name)
             for records in runs.values() for name in ("loss", "val_loss"))
    loss.set_ylim(top=1.05 * max(y[np.isfinite(y)].max(initial=0.0) for y in later) or None)
    loss.set(title="loss", xlabel=x, ylabel="nats a token")
    rate.set_ylabel("learning rate", color=GREY)
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", scilimits=(-2, 2))
    rate.tick_params(colors=GREY)
    handles = [Line2D([], [], label=label, color=GREY if len(runs) > 1 or "rate" in label else "C0",
                      **style) for label, style in keys.items()]
    if len(runs) > 1:
        handles = [Line2D([], [], label=name, color=f"C{number % 10}", linewidth=4)
                   for number, name in enumerate(runs)] + handles
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def draw_shares(axes, shares: dict[str, float]) -> None:
    bars = axes.barh(list(shares), list(shares.values()), height=0.7, color=GREY)
    axes.bar_label(bars, [f"{share:.1%}" for share in shares.values()], padding=3)
    axes.set_title("corpus, share of tokens")
    axes.set(xticks=[], yticks=list(shares), xlim=(0, 1.25 * max(shares.values(), default=1)))
    axes.set_ylim(max(len(shares), 6) - 0.4, -0.6)              # the largest on top, bars not thick
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if not shares:
        axes.text(0.5, 0.5, "no data/meta.json", transform=axes.transAxes, ha="center", color=GREY)


def main(argv: list[str]) -> None:
    config = parse(ReportConfig, argv, __doc__)
    runs = {name: read_metrics(Path(name)) for name in config.runs}
    first = Path(config.runs[0])
    figure, target = draw(runs, languages(first), config.x), first / "report.png"
    try:
        figure.savefig(first / "report.png.tmp", format="png", dpi=150)
        os.replace(first / "report.png.tmp", target)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}; give a run that can be written first"
                         ) from None
    print(f"{target}: {', '.join(f'{name} {len(runs[name])} steps' for name in runs)}",
          file=sys.stderr)
