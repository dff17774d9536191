"""What a run says of itself: a log line now and then, one JSON object a step.

`python -m nanogeex.report RUN [RUN ...]` makes a picture of them (figures.py).  TensorBoard gets
the same numbers, where it is asked for and installed.

Tests: tests/test_report.py.
"""

import json
import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch

from nanogeex.config import UsageError
from nanogeex.samples import Windows

# Dense 16-bit peak of one device in FLOP/s, from the makers' data sheets; more special names first.
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "V100": 125e12, "L40S": 362e12, "RTX 4090": 165e12,
}


def peak_flops(device: torch.device) -> float:
    """0 for hardware that the table does not know: a guessed peak would give a made-up MFU."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), 0.0)


def memory_gb(device: torch.device) -> float:
    """The largest so far: what torch allocated on the GPU, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def log_line(record: dict, total: int, step_s: float) -> str:
    """A step's record, with rates over `step_s`, the mean seconds a step since the last line."""
    speed = record["step_s"] / step_s
    eta = int((total - record["step"]) * step_s)
    return " | ".join((
        f"step {record['step']:>{len(str(total))}}/{total}", f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}", f"grad norm {record['grad_norm']:.3f}",
        f"scale {record['loss_scale']:g}", f"skipped {record['skipped']}",
        f"{record['tokens_per_s'] * speed:,.0f} tokens/s", f"mfu {record['mfu'] * speed:.1%}",
        f"{record['mem_gb']:.2f} GB", f"eta {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}"))


def open_metrics(path: Path, resume: bool) -> TextIO:
    """metrics.jsonl, to append to if a run goes on; a last line cut short by a crash is closed."""
    metrics = open(path, "a+" if resume else "w")
    if metrics.tell() and path.read_bytes()[-1:] != b"\n":
        metrics.write("\n")
    return metrics


def check_tensorboard(directory: str | None) -> None:
    """Raises UsageError if it is asked for and cannot be had."""
    try:
        if directory is not None:
            import torch.utils.tensorboard  # noqa: F401, takes seconds, and few have it
            Path(directory).mkdir(parents=True, exist_ok=True)
    except ImportError:
        raise UsageError(f"--tensorboard-dir {directory}: tensorboard is not installed; pip "
                         "install tensorboard, or leave the flag out") from None
    except OSError as error:
        raise UsageError(f"--tensorboard-dir {directory}: {error.strerror}; give one that can be "
                         "written") from None


def open_tensorboard(directory: str | None, step: int):
    """A writer that goes on after `step`, None without a directory; what an earlier attempt wrote
    of later steps is hidden."""
    if directory is None:
        return None
    from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(directory, purge_step=step + 1)


def append(metrics: TextIO | None, record: dict, board=None) -> None:
    """One line of metrics.jsonl, and TensorBoard's; nothing on ranks that have no file.  JSON has
    no inf and no nan: they become null.  A step may have two lines, if it ran again after a resume
    or if it is the last, evaluated when it was saved; the later one counts."""
    if metrics is None:
        return
    finite = {key: value if not isinstance(value, float) or math.isfinite(value) else None
              for key, value in record.items()}
    to = "--out, metrics.jsonl"
    try:
        metrics.write(json.dumps(finite) + "\n")
        metrics.flush()
        if board is not None:
            to = f"--tensorboard-dir {board.log_dir}"
            for key, value in record.items():
                if key != "step" and value is not None:
                    board.add_scalar(key, value, record["step"])
            board.flush()
    except OSError as error:
        raise UsageError(f"{to}: {error.strerror}; mend that, and the same command goes on"
                         ) from None


def profiler(out: Path, say: Callable[[str], None]) -> Callable[[], None]:
    """To be called after each step.  The third to the fifth are recorded: trace.json, which
    Perfetto and chrome://tracing show, and the ten largest costs."""
    def ready(profile) -> None:
        profile.export_chrome_trace(str(out / "trace.json"))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        costs = profile.key_averages().table(by, row_limit=10, max_name_column_width=40)
        say(f"{costs}\n{out / 'trace.json'}: steps 3 to 5")

    profile = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=ready)
    profile.start()
    return profile.step


def in_words(loss: float | None, val: Windows) -> str:
    """Mean loss a token of `val`, in bits per byte, too: whatever the tokenizer."""
    if loss is None:
        return "none, its text is shorter than one sample"
    bits = loss / math.log(2) * val.tokens / val.bytes
    return f"loss {loss:.4f}, {bits:.4f} bits per byte"


def final_line(step: int, loss: float | None, val: Windows, gzip_bytes: int) -> str:
    """The result, beside what a program for compression makes of the same text."""
    bits = 8 * gzip_bytes / val.bytes if val.bytes else math.nan
    return (f"step {step} | validation {in_words(loss, val)} | gzip -9 on the same text: "
            f"{bits:.4f} bits per byte")


if __name__ == "__main__":
    from nanogeex import figures, mesh
    mesh.launch(figures.main)
