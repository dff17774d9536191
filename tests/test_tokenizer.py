"""decode(encode(text)) == text, whatever the text and whatever the tokenizer was trained on."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanogeex.config import UsageError
from nanogeex.tokenizer import END_OF_DOCUMENT, CodeTokenizer, train

CODE = ["def main():\n    for i in range(10):\n        print(i)\n\n\nif __name__ == 'main':\n" * 20,
        "class A:\n\tdef f(self):\n\t\treturn {'a': 1}\n" * 20]
TOKENIZERS = [CodeTokenizer(train(corpus, 400))
              for corpus in (CODE, ["x" * 2000], ["\u2581\ue000" * 500])]
TEXTS = (st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
         | st.text("ab \n\t\r\u2581\ue000\ue00101\0", max_size=60))


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["code", "no blank", "only escapes"])
@given(text=TEXTS)
@example("\u2581 \ue0000\ue0001\ue000")
@example("   indented\r\n\t\ttabs   \n\n\n ")
@example(END_OF_DOCUMENT + " <0x41> <unk>")
@settings(deadline=None, max_examples=300)
def test_lossless(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_document not in ids             # text that spells it stays text


def test_indentation_is_one_piece():
    ids = TOKENIZERS[0].encode("\n        print")
    assert len(ids) < 4


def test_training_is_deterministic():
    assert train(CODE, 350) == train(CODE, 350)


def test_small_text_gives_a_small_vocabulary():
    assert TOKENIZERS[1].vocab_size < 400


def test_vocabulary_too_small_for_the_characters():
    with pytest.raises(UsageError, match="--vocab-size 300"):
        train(["".join(map(chr, range(0x4E00, 0x4E00 + 200))) * 20], 300)


def test_lone_surrogate_is_an_error():
    with pytest.raises(UnicodeEncodeError):
        TOKENIZERS[0].encode("\ud800")


def test_unreadable_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no tokenizer")
    for path in (tmp_path / "tokenizer.model", tmp_path / "missing"):
        with pytest.raises(UsageError, match="cannot be read"):
            CodeTokenizer.load(path)
