r"""CodeGeeX's own tokenizer: GPT-2's byte-level BPE, with runs of blanks as tokens of their own.

      text       "def f():\n····return 'é'"              (· is a blank)
      cut        def | ·f | (): | \n | ···· | return | ·' | é | '
      bytes      a piece's UTF-8, a token each (é: C3, A9), so that no text is without tokens
      merge      of all neighbours the pair that merges.txt lists first, until it lists none
                 (arXiv:1508.07909)

Runs of 2..10 blanks are <|extratoken_10|> .. <|extratoken_18|>.  A longer run is tens and a rest; a
rest of one goes with what follows, as a single blank does.  All other tokens are GPT-2's.

The cut asks of a character only whether it is a letter, a number, white space or none of these.  So
one pattern for ASCII does; other text is cut where its shadow is, which has Z for a letter, 0 for a
number, a tab for white space.  What is a letter goes by the Unicode of the running Python.

Tests: tests/test_codegeex_tokenizer.py.
"""

import json
import re
from collections.abc import Set
from functools import cache, lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from pathlib import Path

from nanogeex.config import UsageError

END_OF_DOCUMENT = "<|endoftext|>"
EXTRA_TOKENS = 143                          # <|extratoken_1|> and so on
BLANKS = {" " * n: f"<|extratoken_{n + 8}|>" for n in range(2, 11)}
KEPT, LONGEST_KEPT = 1 << 16, 64            # pieces whose ids are kept; their characters

_CUT = re.compile("|".join([
    r" {2,10}",                             # one of BLANKS
    r"'(?:s|t|re|ve|m|ll|d)",
    r" ?[A-Za-z]+",
    r" ?[0-9]+",
    r" ?[^\sA-Za-z0-9]+",
    r"\s+?(?=\s\S|  |\Z)",                  # leaves its last character to what follows,
    r"\s",                                  # which takes it in if it is a blank
]), re.ASCII)                               # else \s would have \x1c..\x1f in it
_LONE_SURROGATE = re.compile(rb"(\xed[\xa0-\xbf][\x80-\xbf])")      # in no other character's UTF-8


class CodeGeeXTokenizer:
    """decode(encode(text)) == text for every str, even with lone surrogates.  Text that spells a
    special token stays text: encode gives no other than those of blanks."""

    def __init__(self, directory: str | Path):
        """From vocab.json, merges.txt and, unless the extra tokens just follow the vocabulary,
        added_tokens.json.  Raises UsageError for what is missing or not that."""
        self._directory = Path(directory)
        vocab = _read_ids(self._directory / "vocab.json", [END_OF_DOCUMENT, *_symbols()])
        self.end_of_document: int = vocab[END_OF_DOCUMENT]
        names = [f"<|extratoken_{k}|>" for k in range(1, EXTRA_TOKENS + 1)]
        extra = {name: self.end_of_document + k for k, name in enumerate(names, 1)}
        if (self._directory / "added_tokens.json").exists():
            extra = _read_ids(self._directory / "added_tokens.json", names, {*vocab.values()})
        self.vocab_size: int = max(*vocab.values(), *extra.values()) + 1

        self._ranks, self._merged, self._bytes = _read_merges(self._directory / "merges.txt", vocab)
        self._byte_ids = [vocab[symbol] for symbol in _symbols()]
        self._blank_ids = {blanks: extra[name] for blanks, name in BLANKS.items()}
        self._bytes |= {i: name.encode() for name, i in extra.items()}
        self._bytes |= {i: blanks.encode() for blanks, i in self._blank_ids.items()}
        self._kept = lru_cache(KEPT)(self._merge)

    def __reduce__(self):
        """Another process opens the folder for itself, once."""
        return _opened, (self._directory,)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in cut(text):
            ids += self._kept(piece) if len(piece) <= LONGEST_KEPT else self._merge(piece)
        return ids

    def decode(self, ids: list[int]) -> str:
        """As upstream: other special ids give their names, ids without a token give nothing, and
        half a character gives U+FFFD."""
        parts = _LONE_SURROGATE.split(b"".join(self._bytes.get(int(i), b"") for i in ids))
        return "".join(part.decode(errors="surrogatepass" if k % 2 else "replace")
                       for k, part in enumerate(parts))

    @staticmethod
    def may_change(text: str) -> bool:
        """Whether further ids could change the end of this decoded text: half a character."""
        return text.endswith("\ufffd")

    def _merge(self, piece: str) -> list[int]:
        """A piece's ids, in O(n log n): its tokens are a linked list, and the places of each pair
        are found by its rank.  A pair's left token becomes both, its right one None; None is also
        the end, and what precedes the first.  New pairs have higher ranks than the merges that make
        their halves, so that a rank is done with once."""
        if piece in self._blank_ids:
            return [self._blank_ids[piece]]
        ranks = self._ranks
        ids = [self._byte_ids[byte] for byte in piece.encode(errors="surrogatepass")]
        before, after = list(range(-1, len(ids))), list(range(1, len(ids) + 2))
        found: dict[int, list[int]] = {}                            # rank -> its left tokens
        for i, pair in enumerate(pairwise(ids)):
            if pair in ranks:
                found.setdefault(ranks[pair], []).append(i)
        waiting = list(found)
        heapify(waiting)
        ids.append(None)
        while waiting:
            rank = heappop(waiting)
            for left in sorted(found.pop(rank)):
                right = after[left]
                if ranks.get((ids[left], ids[right])) != rank:
                    continue                # one of the two has merged with another since
                ids[left], ids[right] = self._merged[rank], None
                after[left] = after[right]
                before[after[left]] = left
                for i, j in ((before[left], left), (left, after[left])):
                    new = ranks.get((ids[i], ids[j]))
                    if new in found:
                        found[new].append(i)
                    elif new is not None:
                        found[new] = [i]
                        heappush(waiting, new)
        return [i for i in ids if i is not None]


@cache
def _opened(directory: Path) -> CodeGeeXTokenizer:
    return CodeGeeXTokenizer(directory)


def cut(text: str) -> list[str]:
    """Pieces that merge apart from each other; joined they are the text."""
    if text.isascii():
        return _CUT.findall(text)
    shadows = _CUT.findall(text.translate(_shadows()))
    return [text[i:j] for i, j in pairwise(accumulate(map(len, shadows), initial=0))]


@cache
def _shadows() -> str:
    """Each character's shadow, by code point, as far as there are letters, numbers or white space;
    those beyond stay what they are."""
    return "".join(chr(code) if code < 0x80 else
                   "Z" if chr(code).isalpha() else          # Unicode's category L
                   "0" if chr(code).isnumeric() else        # N
                   "\t" if chr(code).isspace() else "!" for code in range(0x40000))


@cache
def _symbols() -> list[str]:
    """How the two files spell each byte: as its Latin-1 character where that is visible; the others
    in order as U+0100, U+0101 and so on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(0x100)]


def _read_ids(path: Path, needed: list[str], taken: Set[int] = frozenset()) -> dict[str, int]:
    """token -> id.  Raises UsageError for anything else, and where a token is missing."""
    try:
        ids = json.loads(path.read_bytes())
        if not isinstance(ids, dict) or {type(i) for i in ids.values()} != {int}:
            raise ValueError("not an object of tokens and their ids")
        if missing := [token for token in needed if token not in ids]:
            raise ValueError(f"tokens missing: {len(missing)}, first {missing[0]!r}")
        if min(ids.values()) < 0 or len({*taken, *ids.values()}) < len(taken) + len(ids):
            raise ValueError("ids that are negative or given twice")
        return ids
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, error) from None


def _read_merges(path: Path, vocab: dict[str, int]
                 ) -> tuple[dict[tuple[int, int], int], list[int], dict[int, bytes]]:
    """(left id, right id) -> rank; rank -> id of both; id -> bytes.  Raises UsageError where the
    file makes other tokens than the vocabulary's, or not all of them."""
    ranks, merged = {}, []
    made = {vocab[symbol]: bytes([byte]) for byte, symbol in enumerate(_symbols())}
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.startswith("#version") or not line:
                continue
            left, _, right = line.partition(" ")
            try:
                pair, both = (vocab[left], vocab[right]), vocab[left + right]
                made[both] = made[pair[0]] + made[pair[1]]
            except KeyError:
                raise ValueError(f"line {number}, {line!r}, is not two tokens known by then "
                                 "that make one of vocab.json") from None
            ranks[pair] = len(merged)
            merged.append(both)
        made[vocab[END_OF_DOCUMENT]] = END_OF_DOCUMENT.encode()
        if missing := [token for token, i in vocab.items() if i not in made]:
            raise ValueError("tokens of vocab.json that no line makes: "
                             f"{len(missing)}, first {missing[0]!r}")
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from None
    return ranks, merged, made


def _unusable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"tokenizer {path}: cannot be used ({error}); give the tokenizer folder of "
                      "CodeGeeX's release, with its vocab.json and merges.txt")
