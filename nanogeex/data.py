"""Documents -> tokens on disk, once, by rank 0.

      documents --(scan)--> digests; the tokenizer's training sample; the split by document
                --(encode)--> train.bin, val.bin: ids one after another, each document closed by
                              the end-of-document id; meta.json last: without it nothing is there

Both passes run on several processes and give the same bytes whatever their number.

Tests: tests/test_data.py.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanogeex import corpus, tokenizer
from nanogeex.config import UsageError
from nanogeex.mesh import end_with_parent
from nanogeex.tokenizer import CodeTokenizer

VALIDATION_SHARE, VALIDATION_BYTES = 0.05, 32 << 20     # of the text, the smaller of the two
SAMPLE_BYTES = 2048                                     # a piece that the tokenizer learns


def prepare(sources: list[str] | None, out: Path, vocab_size: int, num_workers: int,
            tokenizer_of: str | Path | None = None) -> Path:
    """Make what training reads, or find it made and unchanged; return its directory.

    `tokenizer_of`: the directory of the tokenizer whose ids the weights know: the run whose
    checkpoint goes on, or --tokenizer.  Raises UsageError for sources that are missing or
    unusable."""
    encoder, model = None, None
    if tokenizer_of is not None:
        known = Path(tokenizer_of)
        encoder, model = tokenizer.open_tokenizer(known), tokenizer.read_files(known)
    for source in sources or []:
        for directory in (Path(source), Path(source) / "data"):
            if all((directory / name).is_file() for name in ("meta.json", "train.bin", "val.bin")):
                if len(sources) > 1:
                    raise UsageError(f"--data {source}: prepared already; give it alone")
                return _use_prepared(directory, out, model)
    files = corpus.list_files(sources, leave=out)
    made_from = {"files": corpus.fingerprint(files), "vocab_size": vocab_size}
    directory = out / "data"
    if _is_made(directory / "meta.json", made_from, out, model):
        return directory
    workers = num_workers or os.cpu_count() or 1
    scan = _Scan(files, 0 if encoder else SAMPLE_BYTES * vocab_size, workers)
    if not scan.kept:
        left = ", ".join(f"{count} {reason}" for (_, reason), count in sorted(scan.left.items()))
        raise UsageError(f"--data {' '.join(sources or ['(default)'])}: no usable document in "
                         f"{len(files)} files ({left or 'none there'}); give source files of 1 to "
                         "100 KB, or .jsonl with such `code`")
    if encoder is None:
        trained = tokenizer.train(scan.sample(), vocab_size)
        encoder, model = CodeTokenizer(trained), {"tokenizer.model": trained}
    directory.mkdir(parents=True, exist_ok=True)
    meta = _encode(files, encoder, scan, directory, workers)
    meta |= {"made_from": made_from, "tokenizer": _digest(model)}
    # Only now, when all is there, do the new files take the place of the old.
    (directory / "meta.json").unlink(missing_ok=True)
    for split in ("train", "val"):
        os.replace(directory / f"{split}.bin.tmp", directory / f"{split}.bin")
    _put(model, out)
    _write(directory / "meta.json", json.dumps(meta, indent=1).encode())
    return directory


def _digest(model: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(model.values())).hexdigest()


def _put(model: dict[str, bytes], out: Path) -> None:
    """A tokenizer's files into a run's directory, and none of another's."""
    for name in tokenizer.FILES:
        if name in model:
            _write(out / name, model[name])
        else:
            (out / name).unlink(missing_ok=True)


def _is_made(meta_path: Path, made_from: dict, out: Path, model: dict[str, bytes] | None) -> bool:
    """From these files, with this run's tokenizer, and that the one that is wanted, if any is?"""
    try:
        meta, its = json.loads(meta_path.read_text()), tokenizer.read_files(out)
        return (meta["made_from"] == made_from and model in (None, its)
                and meta["tokenizer"] == _digest(its))
    except (OSError, ValueError, KeyError):
        return False


def _use_prepared(directory: Path, out: Path, model: dict[str, bytes] | None) -> Path:
    """A directory that an earlier run made; its tokenizer lies in it or, as in a run, beside it."""
    its = tokenizer.read_files(directory) or tokenizer.read_files(directory.parent)
    if not its:
        raise UsageError(f"--data {directory}: prepared, but without its tokenizer.model; put that "
                         "into the directory")
    if model is not None and its != model:
        raise UsageError(f"--data {directory}: encoded with another tokenizer than the weights'; "
                         "give the sources, or start anew in another --out")
    _put(its, out)
    return directory


class _Scan:
    """What a first pass over the documents finds."""

    def __init__(self, files: list[tuple[str, str]], sample_bytes: int, workers: int):
        self.kept: dict[bytes, int] = {}                        # digest -> bytes
        self.left: Counter[tuple[str, str]] = Counter()         # (language, reason) -> documents
        self._texts: list[tuple[bytes, str]] = []               # of the largest digests
        self._texts_bytes, self._sample_bytes = 0, sample_bytes
        self.units = 0
        read = corpus.read if sample_bytes else corpus.read_without_text
        for documents in _in_parallel(read, corpus.units(files), workers, "reading"):
            self.units += 1
            for document in documents:
                self._add(document)
        # The smallest digests are validation: an even choice, at least one document of two.
        self.last_validation = b""
        room = min(VALIDATION_SHARE * sum(self.kept.values()), VALIDATION_BYTES)
        for digest in sorted(self.kept)[:-1]:
            if room <= 0:
                break
            self.last_validation, room = digest, room - self.kept[digest]

    def _add(self, document: corpus.Document) -> None:
        left = document.left or ("duplicate" if document.digest in self.kept else "")
        if left:
            self.left[document.language, left] += 1
            return
        self.kept[document.digest] = document.size
        if not self._sample_bytes:
            return
        self._texts.append((document.digest, document.text))
        self._texts_bytes += document.size
        if self._texts_bytes > 2 * self._sample_bytes:          # now and then: memory stays bounded
            self._trim()

    def _trim(self) -> None:
        self._texts.sort(reverse=True)
        while len(self._texts) > 1 and self._texts_bytes > self._sample_bytes:
            digest, _ = self._texts.pop()
            self._texts_bytes -= self.kept[digest]

    def sample(self) -> Iterator[str]:
        """Text to train the tokenizer on, without validation's."""
        self._trim()
        return (text for digest, text in self._texts if digest > self.last_validation)


def _encode(files: list[tuple[str, str]], encoder: CodeTokenizer, scan: _Scan, directory: Path,
            workers: int) -> dict:
    """Write both .bin, under temporary names; return what meta.json says of them."""
    dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    splits: dict[str, Counter] = {"train": Counter(), "val": Counter()}
    languages: dict[str, Counter] = defaultdict(Counter)
    gzip, gzip_bytes, done = zlib.compressobj(9, wbits=31), 0, set()    # of the validation text
    outputs = {split: open(directory / f"{split}.bin.tmp", "wb") for split in splits}
    work = partial(_encode_unit, encoder, dtype, scan.last_validation)
    for documents in _in_parallel(work, corpus.units(files), workers, "encoding", scan.units):
        for digest, language, size, ids, text in documents:
            if digest in done or digest not in scan.kept:
                continue
            done.add(digest)
            split = "val" if digest <= scan.last_validation else "train"
            outputs[split].write(ids)
            gzip_bytes += len(gzip.compress(text.encode()))
            counts = Counter(documents=1, bytes=size, tokens=len(ids) // dtype.itemsize)
            splits[split] += counts
            languages[language] += counts
    gzip_bytes += len(gzip.flush())
    for output in outputs.values():
        output.flush()
        os.fsync(output.fileno())
        output.close()
    left: dict[str, dict[str, int]] = defaultdict(dict)
    for (language, reason), count in scan.left.items():
        left[language][reason] = count
    return {"dtype": dtype.name, "vocab_size": encoder.vocab_size, "gzip_bytes": gzip_bytes,
            **splits, "languages": languages, "left": left}


def _encode_unit(encoder: CodeTokenizer, dtype: np.dtype, last_validation: bytes,
                 unit: corpus.Unit) -> list[tuple[bytes, str, int, bytes, str]]:
    """(digest, language, bytes, ids, text if it is validation's) of each document kept."""
    encoded = []
    for document in corpus.read(unit):
        if not document.left:
            ids = encoder.encode(document.text)
            ids.append(encoder.end_of_document)
            text = document.text if document.digest <= last_validation else ""
            encoded.append((document.digest, document.language, document.size,
                            np.fromiter(ids, dtype, len(ids)).tobytes(), text))
    return encoded


def _in_parallel(work: Callable, units: Iterator, workers: int, what: str,
                 total: int | None = None) -> Iterator:
    """map(work, units), in order, on `workers` processes; few results wait at a time."""
    bar = tqdm(desc=what, unit=" MB", total=total, disable=None, leave=False)
    if workers == 1:                                        # then this one
        with bar:
            for unit in units:
                yield work(unit)
                bar.update()
        return
    with bar, multiprocessing.get_context("fork").Pool(workers, _start_worker) as pool:
        pending: deque = deque()
        for unit in units:
            pending.append(pool.apply_async(work, (unit,)))
            if len(pending) > 4 * workers:
                yield pending.popleft().get()
                bar.update()
        for result in pending:
            yield result.get()
            bar.update()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)            # Ctrl-C is rank 0's
    end_with_parent()


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def table(meta: dict) -> str:
    """What was kept and what was left out, by language."""
    rows = [f"{'language':<12} {'documents':>9} {'MB':>7} {'tokens':>11}   left out"]
    for name in sorted({*meta["languages"], *meta["left"]}):
        kept = Counter(meta["languages"].get(name, {}))
        left = sorted(meta["left"].get(name, {}).items())
        rows.append(f"{name or '(unknown)':<12} {kept['documents']:>9} {kept['bytes'] / 1e6:>7.2f} "
                    f"{kept['tokens']:>11,}   "
                    + ", ".join(f"{count} {reason}" for reason, count in left))
    return "\n".join(row.rstrip() for row in rows)
