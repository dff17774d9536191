"""Files that repeat themselves, to measure drafts on: `python -m benchmarks.repeats FILE.jsonl`.

Each is a short function of the running Python's library, four to eight times, each time under
another name.  All other names and words in it are drawn anew for each file, so that what comes can
be copied from above, but not known by heart.  To train a model on such files, and to measure it on
those that are left for validation:

    python train.py --data FILE.jsonl --out repeats --num-layers 5 --hidden-size 512 \\
        --seq-length 256 --vocab-size 8192 --micro-batch-size 8 --global-batch-size 8 --lr 1e-3 \\
        --init-method-std 0.02 --train-iters 1500
    python -m benchmarks.decode repeats
"""

import ast
import json
import keyword
import random
import re
import sys
import sysconfig
from pathlib import Path

WORD = re.compile(r"\b[A-Za-z_]\w*\b")


def functions() -> list[tuple[str, str]]:
    """(name, source) of those with 3 to 8 lines."""
    found, left = [], {"site-packages", "test", "tests", "lib2to3"}
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if left & set(path.parts):
            continue
        try:
            text = path.read_text()
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        for node in body:
            if isinstance(node, ast.FunctionDef):
                source = ast.get_source_segment(text, node)
                if 2 <= source.count("\n") <= 7 and len(source) < 250:
                    found.append((node.name, source))
    return found


def file(name: str, source: str, words: list[str], draw: random.Random) -> str:
    other = {word: word if keyword.iskeyword(word) else draw.choice(words)
             for word in sorted(set(WORD.findall(source)) - {name})}
    copies = []
    for _ in range(draw.randint(4, 8)):
        other[name] = draw.choice(words)
        copies.append(WORD.sub(lambda match: other[match[0]], source))
    return "\n\n\n".join(copies) + "\n"


def main(argv: list[str]) -> None:
    known, draw = functions(), random.Random(1)
    words = sorted({word for _, source in known for word in WORD.findall(source)
                    if not keyword.iskeyword(word)})
    with open(argv[0], "w") as lines:
        for _ in range(12000):
            code = file(*draw.choice(known), words, draw)
            lines.write(json.dumps({"code": code, "language": "Python"}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
