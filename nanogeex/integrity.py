"""Which checkpoint is real: a damaged file must never be believed.

meta.json, written last, tells of every other file its size and checksum, and has one of its own.
find() takes the newest checkpoint of which all that holds; each rank reads its part of the files,
so that together all are read once.  CRC-32 finds what disks and crashes do, not what an enemy does;
he is left nothing to run.  DCP's .metadata is a pickle, which calls what it names: it may name
DCP's own classes and no other.  Tensors are read with weights_only=True.

Tests: tests/test_survival.py.
"""

import json
import pickle
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nanogeex.config import UsageError
from nanogeex.mesh import Mesh, on_rank0


def find(directory: Path, mesh: Mesh, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint below `directory` whose files are all as they were written, found by
    all ranks together, each checking its part; `say` hears what was wrong with newer ones.  None
    where there is none at all; UsageError if all of them are damaged."""
    names = on_rank0(mesh, f"checkpoints in {directory}", lambda: [
        path.name for path in reversed(steps(directory))])
    for name in names:
        problem = damage(directory / name, mesh)
        if problem is None:
            return directory / name
        say(f"skipping {directory / name}: {problem}")
    if names:
        raise UsageError(f"{directory}: none of its {len(names)} checkpoints is whole; "
                         "give another directory, or remove them to start over")
    return None


def damage(path: Path, mesh: Mesh) -> str | None:
    """What is wrong with a checkpoint, and with which file; alike on all ranks."""
    def check() -> str | None:
        try:
            files = read_meta(path)["files"]
            there = {each.name for each in path.iterdir() if each.is_file()} - {"meta.json"}
            for name in sorted({".metadata", *files} ^ there):      # all are checked, or none is
                return f"{name}: {'not told of by meta.json' if name in there else 'No such file'}"
            for name, (size, checksum) in sorted(files.items())[mesh.rank::mesh.world]:
                found = size_and_checksum(path / name)
                if found[0] != size:
                    return f"{name} has {found[0]} bytes of {size}"
                if found[1] != checksum:
                    return f"{name} is not what was written: its checksum differs"
                if name == ".metadata":
                    with open(path / name, "rb") as file:
                        _OnlyDCP(file).load()
        except UsageError as error:
            return str(error)
        except OSError as error:
            return f"{Path(error.filename or path).name}: {error.strerror}"
        except Exception as error:                          # whatever a pickle can raise
            return f".metadata: {error}"
        return None

    found = [check()]
    if mesh.world > 1:
        found = [None] * mesh.world
        dist.all_gather_object(found, check())
    return next((problem for problem in found if problem), None)


class _OnlyDCP(pickle.Unpickler):
    """Reads DCP's .metadata of tensors, and refuses any class or function that it has no need of:
    a pickle calls what it names."""

    NEEDED = {
        "torch": {"Size", "float32"}, "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath", "PurePosixPath"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"}}

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.NEEDED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP does not need")
        return super().find_class(module, name)


def read_meta(path: Path) -> dict:
    """A checkpoint's meta.json.  Raises UsageError where there is none, or where it was changed."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        meta["config"], meta["files"], meta["optimizer_steps"], int(meta["step"])
        if meta.pop("checksum") != checksum_of_json(meta):
            raise ValueError("its checksum differs")
        if re.fullmatch(r"step-\d{8}", path.name) and path.name != f"step-{meta['step']:08d}":
            raise ValueError(f"it is of step {meta['step']}")
        return meta
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"checkpoint {path}: its meta.json cannot be read ({error}); give a "
                         "directory step-... of a run's checkpoints") from None


def steps(directory: Path) -> list[Path]:
    """Every directory with a checkpoint's final name, oldest first."""
    return sorted(path for path in directory.glob(f"step-{'[0-9]' * 8}") if path.is_dir())


def size_and_checksum(path: Path) -> list[int]:
    checksum, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return [size, checksum]


def checksum_of_json(content: dict) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
