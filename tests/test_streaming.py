"""Streamed text: all of it, whole characters, up to a stop, and no more work at the end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogeex.streaming import LONG, TextStream
from tests.test_codegeex_tokenizer import TOKENIZER as RELEASED
from tests.test_tokenizer import TOKENIZERS

ALL = [TOKENIZERS[0], RELEASED]
TEXT = "def f(x):\n    return '中文 é 😀' # \u2581 \ue000\n"


def parts_of(tokenizer, text, stops=(), prompt="# "):
    stream = TextStream(tokenizer, tokenizer.encode(prompt), list(stops))
    parts = []
    for token in tokenizer.encode(text):
        parts.append(stream(token))
        if stream.stopped:
            break
    return [*parts, stream.end()]


@pytest.mark.parametrize("tokenizer", ALL)
@pytest.mark.parametrize("text", [TEXT, "\ufffd\ue000", "\ufffd" * 300, "a\ufffd" * 200, " x  y"])
def test_whole_characters_and_all_of_the_text(tokenizer, text):
    parts = parts_of(tokenizer, text)
    assert "".join(parts) == text
    if text == TEXT:
        assert not any("\ufffd" in part for part in parts)
        assert sum(bool(part) for part in parts) > 10


@pytest.mark.parametrize("tokenizer", ALL)
@given(ids=st.lists(st.integers(0, 380), max_size=200))
@settings(deadline=None, max_examples=200)
def test_any_ids_give_their_text(tokenizer, ids):
    stream = TextStream(tokenizer, [])
    parts = [stream(token) for token in ids]
    assert "".join(parts) + stream.end() == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", ALL)
@pytest.mark.parametrize("text", [TEXT * 40, "\ufffd" * 2000])
def test_work_a_token_does_not_grow(monkeypatch, tokenizer, text):
    lengths, true = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: lengths.append(len(ids)) or true(ids))
    assert "".join(parts_of(tokenizer, text)) == text
    assert max(lengths) <= LONG + 8


@given(text=st.text("ab\n", max_size=40), stops=st.lists(st.text("ab\n", min_size=1, max_size=4),
                                                        max_size=3))
@settings(deadline=None, max_examples=300)
def test_ends_before_the_first_stop(text, stops):
    """That of the first token to make one whole; of several then, the leftmost."""
    tokenizer, true = TOKENIZERS[0], text
    ids = tokenizer.encode(text)
    for count in range(len(ids) + 1):
        so_far = tokenizer.decode(ids[:count])
        if found := [at for stop in stops if (at := so_far.find(stop)) >= 0]:
            true = so_far[:min(found)]
            break
    assert "".join(parts_of(tokenizer, text, stops)) == true
