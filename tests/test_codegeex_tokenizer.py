"""CodeGeeX's tokenizer against upstream's ids, and piece by piece against plainer code.

tests/cases/codegeex-tokenizer holds texts with the ids that upstream gives them (CodeGeeX's
replacement of blanks, then Hugging Face's GPT-2 tokenizer), and of the release's vocab.json and
merges.txt what can occur in these texts.  In other texts tokens are smaller than the release's.
"""

import json
import pickle
import re
import shutil
import time
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanogeex.codegeex_tokenizer import cut
from nanogeex.config import UsageError
from nanogeex.tokenizer import CodeGeeXTokenizer

RELEASE = Path(__file__).parent / "cases/codegeex-tokenizer"
CASES = json.loads((RELEASE / "cases.json").read_text())
TOKENIZER = CodeGeeXTokenizer(RELEASE)
WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000"
MIXED = ["'s", "'ll", "'S", "<|endoftext|>", "<|extratoken_12|>", "é", "中文", "²½", "ⅷ", "\u0301",
         "\u2581", "\0", "👍🏽", "\x1c", "\ud83d", "\ude80", *WHITE, *"aZ0_!=\"'<|>",
         *(" " * n for n in range(2, 51))]
TEXTS = st.text(max_size=40) | st.lists(st.sampled_from(MIXED), max_size=30).map("".join)


@pytest.mark.parametrize("name", CASES)
def test_upstreams_ids(name):
    text, ids = CASES[name]["text"], CASES[name]["ids"]
    assert TOKENIZER.encode(text) == ids
    assert TOKENIZER.decode(ids) == text


def gpt2_cut(text):
    """GPT-2's pattern with its classes written out, as far as they occur in the text, on what is
    between the runs of blanks."""
    kinds = {"L": "a", "N": "0", "Z": " "}
    for char in set(text):
        kind = "Z" if char in "\t\n\v\f\r\x85" else unicodedata.category(char)[0]
        if kind in kinds:
            kinds[kind] += re.escape(char)
    pattern = re.compile("'s|'t|'re|'ve|'m|'ll|'d| ?[{L}]+| ?[{N}]+| ?[^{Z}{L}{N}]+|"
                         "[{Z}]+(?![^{Z}])|[{Z}]+".format(**kinds))
    pieces = []
    for k, part in enumerate(re.split("( {10}| {2,})", text)):
        pieces += [part] if k % 2 else pattern.findall(part)
    return pieces


@given(text=TEXTS)
@example("".join(" " * n + "\n\t"[n % 2] for n in range(50)))
@settings(deadline=None, max_examples=1000)
def test_cut(text):
    assert cut(text) == gpt2_cut(text)


def test_every_character_is_cut_as_its_category_says():
    beyond = {unicodedata.category(chr(code))[0] for code in range(0x40000, 0x110000)}
    assert not beyond & {"L", "N", "Z"}
    for first in range(0, 0x40000, 0x1000):
        text = "".join(f"a{chr(code)}0!{chr(code)}." for code in range(first, first + 0x1000))
        assert cut(text) == gpt2_cut(text)


@given(text=TEXTS)
@example("<|endoftext|><|extratoken_12|> <|extratoken_10|>")
@example("\ud83d\ude80 \udce2\x82\ud800")           # lone surrogates, side by side too
@settings(deadline=None, max_examples=1000)
def test_lossless_and_never_special(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not {TOKENIZER.end_of_document, *range(50257, 50266), *range(50275, 50400)} & set(ids)
    assert (max(ids, default=0) >= 50266) == ("  " in text)


def merged_plainly(piece):
    """The first of the pairs that merges.txt lists first, again and again."""
    lines = (RELEASE / "merges.txt").read_text(encoding="utf-8").split("\n")[1:-1]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
    tokens = list(piece.replace(" ", "Ġ"))
    while pairs := [pair for pair in pairwise(tokens) if pair in ranks]:
        i = list(pairwise(tokens)).index(min(pairs, key=ranks.get))
        tokens[i:i + 2] = ["".join(tokens[i:i + 2])]
    vocab = json.loads((RELEASE / "vocab.json").read_text())
    return [vocab[token] for token in tokens]


@given(piece=st.text("aeionrst", max_size=200) | st.text("=-", max_size=200))
@settings(deadline=None, max_examples=100)
def test_merges(piece):
    assert TOKENIZER.encode(" " + piece) == merged_plainly(" " + piece)


@pytest.mark.parametrize("unit", ["=", "a", "é", "\n", " ", " \t"])
def test_long_pieces_take_no_longer_than_their_length(unit):
    """Quadratic, the whole would take hours."""
    start = time.process_time()
    text = unit * (500_000 // len(unit))
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert time.process_time() - start < 20


def test_memory_is_bounded():
    tokenizer = CodeGeeXTokenizer(RELEASE)
    tokenizer.encode(" ".join(map(str, range(100_000))) + "x" * 65)
    kept = tokenizer._kept.cache_info()
    assert kept.currsize == kept.maxsize < 100_000
    tokenizer.encode("x" * 65)                              # is merged anew
    assert tokenizer._kept.cache_info() == kept


def test_ids():
    assert TOKENIZER.vocab_size == 50400 and TOKENIZER.end_of_document == 50256
    assert TOKENIZER.decode([50256, 50257, 50265, 50275, 50399]) == (
        "<|endoftext|><|extratoken_1|><|extratoken_9|><|extratoken_19|><|extratoken_143|>")
    assert [len(TOKENIZER.decode([i])) for i in range(50266, 50275)] == [*range(2, 11)]
    assert TOKENIZER.decode([50400, 64, 10**9]) == "a"      # rows that pad the weights
    assert TOKENIZER.decode(torch.tensor([64, 65])) == "ab"


def test_half_characters():
    """As many U+FFFD as Python's own decoder has, whatever surrogates are around."""
    ids = TOKENIZER.encode("\u20ac") + TOKENIZER.encode("\ud800")
    assert len(ids) == 6
    assert [TOKENIZER.decode(ids[:n]) for n in range(7)] == [
        "", "\ufffd", "\ufffd", "\u20ac", "\u20ac\ufffd", "\u20ac\ufffd\ufffd", "\u20ac\ud800"]
    assert TOKENIZER.decode(ids[:2] + ids[3:] + ids[1:2]) == "\ufffd\ud800\ufffd"


def test_added_tokens_say_where_the_extra_ones_are(tmp_path):
    shutil.copytree(RELEASE, tmp_path, dirs_exist_ok=True)
    added = {f"<|extratoken_{k}|>": 60000 - k for k in range(1, 144)}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = CodeGeeXTokenizer(str(tmp_path))
    assert tokenizer.encode("a  b") == [64, 59990, 65] and tokenizer.vocab_size == 60000
    assert tokenizer.decode([59990, 59999]) == "  <|extratoken_1|>"


def test_windows_line_ends(tmp_path):
    shutil.copytree(RELEASE, tmp_path, dirs_exist_ok=True)
    merges = (RELEASE / "merges.txt").read_bytes()
    (tmp_path / "merges.txt").write_bytes(merges.replace(b"\n", b"\r\n"))
    case = CASES["python"]
    assert CodeGeeXTokenizer(tmp_path).encode(case["text"]) == case["ids"]


def test_goes_to_other_processes_as_its_folder():
    copy = pickle.dumps(TOKENIZER)
    assert len(copy) < 1000
    assert pickle.loads(copy).encode("a  b") == TOKENIZER.encode("a  b")
    assert pickle.loads(copy) is pickle.loads(copy)


def changed(name, change):
    old = json.loads((RELEASE / name).read_text())
    return json.dumps({token: i for token, i in (old | change).items() if i is not None})


MERGES = (RELEASE / "merges.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name, content, says", [
    ("vocab.json", None, "No such file"), ("merges.txt", None, "No such file"),
    ("vocab.json", '{"a": 1', "delimiter"), ("vocab.json", "[" * 100_000, "recursion"),
    ("vocab.json", b"\xff\xfe\xfd", "decode"), ("vocab.json", "[]", "not an object"),
    ("vocab.json", "{}", "not an object"), ("vocab.json", '{"a": "b"}', "not an object"),
    ("vocab.json", changed("vocab.json", {"<|endoftext|>": None}), "1, first '<|endoftext|>'"),
    ("vocab.json", changed("vocab.json", {"a": None, "b": None}), "tokens missing: 2, first 'a'"),
    ("vocab.json", changed("vocab.json", {"a": 1}), "given twice"),
    ("vocab.json", changed("vocab.json", {"a": -1}), "negative"),
    ("added_tokens.json", '{"<|extratoken_1|>": 50257}', "tokens missing: 142"),
    ("added_tokens.json", json.dumps({f"<|extratoken_{k}|>": k for k in range(1, 144)}), "twice"),
    ("merges.txt", b"\xff\n", "decode"), ("merges.txt", "nonsense", "line 1, 'nonsense', is not"),
    ("merges.txt", "#version: 0.2\nq x\n", "line 2, 'q x', is not"),
    ("merges.txt", "\n".join(sorted(MERGES.split("\n"), reverse=True)), "is not two tokens known"),
    ("merges.txt", MERGES[:3000], "is not two tokens known"),
    ("merges.txt", MERGES[:MERGES.rindex("\n", 0, -1)], "vocab.json that no line makes: 1, first"),
])
def test_unusable_files(tmp_path, name, content, says):
    shutil.copytree(RELEASE, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=re.escape(says)) as error:
        CodeGeeXTokenizer(tmp_path)
    assert str(error.value).startswith(f"tokenizer {tmp_path / name}: cannot be used (")
    assert "; give the tokenizer folder" in str(error.value) and "\n" not in str(error.value)
