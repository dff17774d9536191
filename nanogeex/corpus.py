"""Source code -> documents: what is taken, what is left, and why.

Sources are folders (the language goes by the file's extension), .jsonl or .jsonl.gz files (one
object a line: `code`, and `language` if known), or, by default, code that is on every machine where
this runs: the running Python's library and C++ headers that come with torch.

The filters are those of the CodeGeeX paper (arXiv:2303.17568, section 2.2): average line over 100
characters, generated, under 40% letters, smaller than 1 KB or larger than 100 KB.  Each document
opens with its language, as a comment: `# language: Python`.

Tests: tests/test_data.py.
"""

import gzip
import hashlib
import json
import os
import re
import string
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanogeex.config import UsageError

# language -> how a comment opens in it, file extensions
LANGUAGES = {
    "Assembly": ("; ", ".asm .s"), "C": ("// ", ".c"), "C#": ("// ", ".cs"),
    "C++": ("// ", ".cc .cpp .cxx .h .hh .hpp .hxx .inl"), "CSS": ("/* ", ".css"),
    "Cuda": ("// ", ".cu .cuh"), "Dart": ("// ", ".dart"), "Fortran": ("! ", ".f .f90 .f95"),
    "Go": ("// ", ".go"), "Haskell": ("-- ", ".hs"), "HTML": ("<!-- ", ".html .htm"),
    "Java": ("// ", ".java"), "JavaScript": ("// ", ".js .jsx .mjs .cjs"), "Julia": ("# ", ".jl"),
    "Kotlin": ("// ", ".kt .kts"), "Lisp": ("; ", ".lisp .el .clj"), "Lua": ("-- ", ".lua"),
    "Objective-C": ("// ", ".m .mm"), "Perl": ("# ", ".pl .pm"), "PHP": ("// ", ".php"),
    "Python": ("# ", ".py .pyi .pyx"), "R": ("# ", ".r"), "Ruby": ("# ", ".rb"),
    "Rust": ("// ", ".rs"), "Scala": ("// ", ".scala"), "Shell": ("# ", ".sh .bash .zsh"),
    "SQL": ("-- ", ".sql"), "Swift": ("// ", ".swift"), "TeX": ("% ", ".tex"),
    "TypeScript": ("// ", ".ts .tsx"),
}
COMMENT_CLOSES = {"CSS": " */", "HTML": " -->"}
BY_EXTENSION = {extension: name for name, (_, known) in LANGUAGES.items()
                for extension in known.split()}
BY_NAME = {name.lower(): name for name in LANGUAGES} | {"cpp": "C++", "csharp": "C#"}

SMALLEST, LARGEST = 1024, 100 * 1024            # bytes of a document
UNIT_BYTES = 1 << 20                            # of work that a process gets at a time
_GENERATED = re.compile(
    r"@generated|do not edit|auto-?generated|generated (by|from|with|automatically)")


@dataclass
class Document:
    language: str
    left: str               # why it was left out; "" if it was kept
    text: str = ""          # with its language line
    digest: bytes = b""     # of the text: finds duplicates, splits off validation
    size: int = 0           # of the text, in bytes


@dataclass
class Unit:
    """Work for a process: files to read, as (path, language), or lines of a .jsonl already read."""

    files: list[tuple[str, str]]
    lines: list[bytes]


def language_line(language: str) -> str:
    """`# language: Python` and a newline; nothing for an unknown language."""
    opens, _ = LANGUAGES.get(language, ("# ", ""))
    return f"{opens}language: {language}{COMMENT_CLOSES.get(language, '')}\n" if language else ""


def embedded_files() -> list[str]:
    """The default corpus, read in place: the running Python's library without its tests (which not
    every machine has, and which repeat themselves), and the headers of torch's own compiler."""
    library = Path(sysconfig.get_paths()["stdlib"])
    headers = Path(torch.__file__).parent / "include/torch/csrc/jit"
    tests = {"test", "tests", "idle_test"}
    python = [path for path in walk(library)
              if path.endswith(".py") and not tests & set(Path(path).relative_to(library).parts)]
    return python + [path for path in walk(headers) if path.endswith(".h")]


def walk(root: Path, leave: Path | None = None) -> Iterator[str]:
    """All regular files below, sorted; not entered: hidden folders, links to folders, `leave`."""
    left = os.path.realpath(leave) if leave else ""
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if name[0] != "." and name != "site-packages"
                          and os.path.realpath(os.path.join(folder, name)) != left)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.isfile(path):            # no pipes, no sockets, no dangling links
                yield path


def _language(path: str) -> str:
    if path.endswith((".jsonl", ".jsonl.gz")):
        return "jsonl"
    return BY_EXTENSION.get(os.path.splitext(path)[1].lower(), "")


def list_files(sources: list[str] | None, leave: Path) -> list[tuple[str, str]]:
    """Every file of the sources, as (path, language): "" where the extension tells none, "jsonl"
    for a file of documents.  The run directory `leave` may lie among them, and is not read.
    Raises UsageError for a source that is not there."""
    paths = embedded_files() if sources is None else []
    for source in sources or []:
        if not os.path.exists(source):
            raise UsageError(f"--data {source}: no such file or folder; give one that exists")
        if os.path.isdir(source):
            paths += walk(Path(source), leave)
        elif os.path.isfile(source) and _language(source) == "jsonl":
            paths.append(source)
        else:
            raise UsageError(f"--data {source}: neither a folder nor a .jsonl or .jsonl.gz file; "
                             "give one of these")
    return [(path, _language(path)) for path in paths]


def fingerprint(files: list[tuple[str, str]]) -> str:
    """Changes if a file is added, removed or changed."""
    digest = hashlib.sha256()
    for path, _ in files:
        size, changed = _size_and_time(path)
        digest.update(os.fsencode(f"{path}\0{size}\0{changed}\n"))
    return digest.hexdigest()


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    except OSError:                             # gone since it was listed: it will be "unreadable"
        return 0, 0


def units(files: list[tuple[str, str]]) -> Iterator[Unit]:
    """Cut the work into pieces of about UNIT_BYTES, in the order of the files."""
    batch, size = [], 0
    for path, language in files:
        if language == "jsonl":
            yield from _jsonl_units(path)
            continue
        batch.append((path, language))
        size += min(_size_and_time(path)[0], LARGEST)
        if size >= UNIT_BYTES:
            yield Unit(batch, [])
            batch, size = [], 0
    yield Unit(batch, [])


def _jsonl_units(path: str) -> Iterator[Unit]:
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rb") as lines:
            while batch := lines.readlines(UNIT_BYTES):
                yield Unit([], batch)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"--data {path}: cannot be read ({error}); mend or remove it") from None


def read(unit: Unit) -> list[Document]:
    """A unit's documents, kept and left."""
    return [*(_from_file(*file) for file in unit.files), *map(_from_json, unit.lines)]


def read_without_text(unit: Unit) -> list[Document]:
    """The same, where it is sent to another process that needs no text."""
    return [replace(document, text="") for document in read(unit)]


def _from_file(path: str, language: str) -> Document:
    if not language:
        return Document("", "unknown extension")
    try:
        if os.path.getsize(path) > LARGEST:
            return Document(language, "over 100 KB")
        with open(path, "rb") as file:
            return _filtered(language, file.read().decode())
    except UnicodeDecodeError:
        return Document(language, "not UTF-8")
    except OSError:
        return Document(language, "unreadable")


def _from_json(line: bytes) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return Document("", "line that is not JSON" if line.strip() else "empty line")
    text = record.get("code") if isinstance(record, dict) else None
    if not isinstance(text, str):
        return Document("", "line without `code`")
    language = record.get("language")
    language = BY_NAME.get(str(language).lower(), str(language)) if language else ""
    try:
        return _filtered(language, text)
    except UnicodeEncodeError:
        return Document(language, "lone surrogate")


def _filtered(language: str, text: str) -> Document:
    raw = text.encode()
    letters = len(raw) - len(raw.translate(None, string.ascii_letters.encode()))
    if not text.isascii():
        letters = sum(map(str.isalpha, text))
    left = ("under 1 KB" if len(raw) < SMALLEST else
            "over 100 KB" if len(raw) > LARGEST else
            "average line over 100" if len(text) > 100 * len(text.splitlines()) else
            "under 40% letters" if letters < 0.4 * len(text) else
            "generated" if _GENERATED.search(text[:1000].lower()) else "")
    if left:
        return Document(language, left)
    line = language_line(language)
    raw = line.encode() + raw
    return Document(language, "", line + text, hashlib.sha256(raw).digest()[:16], len(raw))
