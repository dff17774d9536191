"""Files that repeat themselves, to measure drafts on: `python -m benchmarks.repeats FILE.jsonl`.

Each is a short function of the running Python's library, four to eight times, and each time under
another name.  To train a model on them, and to measure it on those that are left for validation:

    python train.py --data FILE.jsonl --out repeats --num-layers 5 --hidden-size 512 \\
        --seq-length 256 --micro-batch-size 8 --global-batch-size 8 --lr 1e-3 \\
        --init-method-std 0.02 --train-iters 1200
    python -m benchmarks.decode repeats
"""

import ast
import json
import random
import re
import sys
import sysconfig
from pathlib import Path


def functions() -> list[tuple[str, str]]:
    """(name, source) of those with 4 to 10 lines."""
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
                if 3 <= source.count("\n") <= 9 and len(source) < 400:
                    found.append((node.name, source))
    return found


def main(argv: list[str]) -> None:
    known, draw = functions(), random.Random(1)
    names = sorted({name for name, _ in known})
    with open(argv[0], "w") as file:
        for _ in range(6000):
            name, source = draw.choice(known)
            copies = [re.sub(rf"\b{name}\b", draw.choice(names), source)
                      for _ in range(draw.randint(4, 8))]
            file.write(json.dumps({"code": "\n\n\n".join(copies) + "\n", "language": "Python"}))
            file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
