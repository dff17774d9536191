"""The two READMEs, English and Chinese: same commands, same headings, links that lead somewhere."""

import re
from collections import Counter

import pytest

from tests.programs import ROOT

BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def read(name):
    """A README's code blocks, and the prose between them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return BLOCK.findall(text), BLOCK.sub("", text)


def test_same_code_blocks_and_headings():
    (blocks, prose), (zh_blocks, zh_prose) = read("README.md"), read("README_zh.md")
    assert blocks and zh_blocks == blocks
    levels, zh_levels = (Counter(re.findall(r"^#+(?= )", text, re.MULTILINE))
                         for text in (prose, zh_prose))
    assert levels and zh_levels == levels
    assert "```" not in prose + zh_prose                                    # no block left open


@pytest.mark.parametrize("name, other", [("README.md", "README_zh.md"),
                                         ("README_zh.md", "README.md")])
def test_relative_links_exist(name, other):
    _, prose = read(name)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in link]
    assert other in links
    assert [link for link in links if not (ROOT / link).exists()] == []
