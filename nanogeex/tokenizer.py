"""SentencePiece for code: byte-pair encoding (arXiv:1808.06226) that gives every text back.

SentencePiece's defaults are made for prose: they fold Unicode, squeeze runs of blanks, put one in
front, and drop long lines.  Here all of that is off, whole documents are the training sentences (so
that a newline and its indentation can become one piece), and bytes stand in for rare characters.
One hole is left: SentencePiece writes a blank as U+2581, and a real U+2581 would come back as a
blank.  A two-way escape closes it.

CodeGeeX's released weights know another tokenizer's ids: that is codegeex_tokenizer.py.

Tests: tests/test_tokenizer.py.
"""

import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
from tqdm import tqdm

from nanogeex.codegeex_tokenizer import END_OF_DOCUMENT, CodeGeeXTokenizer
from nanogeex.config import UsageError

__all__ = ["END_OF_DOCUMENT", "CodeGeeXTokenizer", "CodeTokenizer", "train"]
_BLANK, _ESCAPE = "\u2581", "\ue000"        # SentencePiece's blank; a private-use character of ours


def _escape(text: str) -> str:
    return text.replace(_ESCAPE, _ESCAPE + "0").replace(_BLANK, _ESCAPE + "1")


def _unescape(text: str) -> str:
    return text.replace(_ESCAPE + "1", _BLANK).replace(_ESCAPE + "0", _ESCAPE)


class CodeTokenizer:
    """decode(encode(text)) == text for every str that UTF-8 can write: all but lone surrogates."""

    def __init__(self, model: bytes):
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._pieces.vocab_size()
        self.end_of_document: int = self._pieces.piece_to_id(END_OF_DOCUMENT)

    @classmethod
    def load(cls, path: Path) -> "CodeTokenizer":
        """Raises UsageError for what is not a tokenizer.model."""
        try:
            return cls(path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise UsageError(f"tokenizer {path}: cannot be read ({error}); give a run that holds "
                             "the tokenizer.model it was trained with") from None

    def encode(self, text: str) -> list[int]:
        """Raises UnicodeEncodeError for lone surrogates."""
        return self._pieces.encode(_escape(text).encode())

    def decode(self, ids: list[int]) -> str:
        """Control ids give nothing; a character's first bytes alone give U+FFFD."""
        return _unescape(self._pieces.decode(ids))

    @staticmethod
    def may_change(text: str) -> bool:
        """Whether further ids could change the end of this decoded text: a character or an escape
        of which half is there."""
        return text.endswith(("\ufffd", _ESCAPE))


FILES = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")    # of either kind


def open_tokenizer(directory: Path):
    """The tokenizer in a release's folder or in a run's directory.  Raises UsageError."""
    if (directory / "vocab.json").is_file():
        return CodeGeeXTokenizer(directory)
    return CodeTokenizer.load(directory / "tokenizer.model")


def read_files(directory: Path) -> dict[str, bytes]:
    """The files of the tokenizer in a directory, to put into another; empty if there is none."""
    return {name: (directory / name).read_bytes() for name in FILES
            if (directory / name).is_file()}


def train(documents: Iterable[str], vocab_size: int) -> bytes:
    """Documents -> a model of at most `vocab_size` pieces, fewer where the text has not that many.
    Raises UsageError where it has more characters than that."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=map(_escape, tqdm(documents, "tokenizer reads", disable=None,
                                                leave=False)), model_writer=model,
            model_type="bpe", vocab_size=vocab_size, hard_vocab_limit=False,
            num_threads=2,                      # is written into the model: a fixed number
            normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=False,
            byte_fallback=True, max_sentence_length=1 << 20,
            required_chars=_BLANK,              # a text without blanks would give a model without
            control_symbols=[END_OF_DOCUMENT],  # a text that spells it stays text
            bos_id=-1, eos_id=-1, pad_id=-1, minloglevel=2)
    except RuntimeError as error:
        if "required_chars" not in str(error):
            raise
        raise UsageError(f"--vocab-size {vocab_size}: too few for the characters of the text and "
                         "258 for bytes and control; raise it") from None
    return model.getvalue()
