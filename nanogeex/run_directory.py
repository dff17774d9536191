"""A run directory: one live run in it, and what that starts from.

      out/   lock   config.json   tokenizer.model   data/   metrics.jsonl   checkpoints/

Tests: tests/test_survival.py, tests/test_errors.py.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TextIO

from nanogeex import data, integrity
from nanogeex.config import ModelConfig, TrainConfig, UsageError
from nanogeex.mesh import Mesh, on_rank0


def take(out: Path) -> TextIO:
    """Make the directory, if need be, and lock it for as long as the returned file is open and this
    process lives.  Raises UsageError if it cannot be written, or if a live run has it; under
    torchrun that may be one which is about to end, and is waited for."""
    patience = time.monotonic() + (30 if "TORCHELASTIC_RUN_ID" in os.environ else 0)
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        for path in (out / "checkpoints/.writable", out / "metrics.jsonl"):
            open(path, "a").close()             # fail now, not at the first save
        (out / "checkpoints/.writable").unlink()
        lock = open(out / "lock", "a+")
        while not _locked(lock):
            if time.monotonic() > patience:
                lock.seek(0)
                raise UsageError(f"--out {out}: {lock.read().strip() or 'another run'} is training "
                                 "there; give another --out, or stop it")
            time.sleep(0.2)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror}; give an --out that can be "
                         "written") from None
    return lock


def _locked(lock: TextIO) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)        # of a process, and seen over NFS
        return True
    except (BlockingIOError, PermissionError):
        return False


def find_start(config: TrainConfig, mesh: Mesh, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume, if any; all ranks together check that it is whole.  Raises
    UsageError if it is not, or if its model has another shape."""
    own = integrity.find(Path(config.out) / "checkpoints", mesh, say)
    if config.resume == "none" and own:
        raise UsageError(f"--resume none: {own} is there; give another --out, or remove it")
    if config.resume == "none" or config.resume == "auto" and own is None:
        return None
    start = own if config.resume == "auto" else Path(config.resume)
    if on_rank0(mesh, "a run or a checkpoint", (start / "checkpoints").is_dir):
        start = integrity.find(start / "checkpoints", mesh, say) or start
    elif start != own and (problem := integrity.damage(start, mesh)):
        raise UsageError(f"--resume {start}: {problem}; --resume auto takes the newest whole one")
    if own and start.resolve() != own.resolve():
        raise UsageError(f"--resume {start}: --out {config.out} has a checkpoint of its own, {own};"
                         " give another --out, or remove that")
    saved = integrity.read_meta(start)["config"]
    for field in fields(ModelConfig):
        mine, its = getattr(config, field.name), saved[field.name]
        if mine != its:
            raise UsageError(f"--{field.name.replace('_', '-')} {mine}: the checkpoint {start} has "
                             f"{its}; give {its}, or another --out")
    return start


def prepare(config: TrainConfig, start: Path | None) -> str:
    """Make the run's tokenizer and data, write its config.json; return the data's directory."""
    out = Path(config.out)
    try:
        directory = data.prepare(config.data, out, config.vocab_size, config.num_workers,
                                 start.parent.parent if start else config.tokenizer)
        (out / "config.json").write_text(json.dumps(asdict(config), indent=1))
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror}; give an --out that can be "
                         "written and --data that can be read") from None
    return str(directory)


def changes(before: dict, config: TrainConfig) -> str:
    """What differs from the run that is resumed, in words."""
    now = asdict(config)
    names = [name for name in now if name in before and now[name] != before[name]]
    return "".join(f", --{name.replace('_', '-')} {now[name]} (was {before[name]})"
                   for name in names if name not in ("out", "resume"))
