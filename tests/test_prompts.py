"""What is asked, character by character, and what comes back, prompt by prompt."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanogeex.config import ModelConfig, UsageError
from nanogeex.infer_config import InferConfig
from nanogeex.prompts import problem, read_prompts
from nanogeex.tokenizer import open_tokenizer
from tests.programs import ROOT, run
from tests.test_data import source
from tests.test_tokenizer import TOKENIZERS

TOKENIZER = TOKENIZERS[0]


def prompts(**config):
    return read_prompts(InferConfig(**config), TOKENIZER)


@pytest.mark.parametrize("content, text", [
    (b"", ""), (b"   ", "   "), (b"    return x", "    return x"), (b"stop", "stop"),
    (b"x = 1\n", "x = 1\n"), (b"a\r\nb\r\n", "a\r\nb\r\n"), (b"\xef\xbb\xbfx", "x"),
    (b"a\n\n---\nb", "a\n\n---\nb"), ("中\u2028é".encode(), "中\u2028é")])
def test_a_file_is_one_prompt_as_it_is(tmp_path, content, text):
    (tmp_path / "f").write_bytes(content)
    [prompt] = prompts(prompt_file=str(tmp_path / "f"))
    assert prompt["given"] == {"prompt": text} and prompt["shown"] == text
    assert TOKENIZER.decode(prompt["ids"]) == text
    assert prompt["ids"] or not text
    assert (prompt["ids"] == [TOKENIZER.end_of_document]) == (text == "")


@pytest.mark.parametrize("language, translate_to, shown", [
    ("PYTHON", None, "# language: Python\nx = 1 \n\n"),
    ("cpp", None, "// language: C++\nx = 1 \n\n"),
    ("html", None, "<!-- language: HTML -->\nx = 1 \n\n"),
    ("python", "java", "code translation\nPython:\nx = 1\nJava:\n")])
def test_lines_around_a_prompt(language, translate_to, shown):
    """The model sees them, the record does not."""
    [prompt] = prompts(prompt=["x = 1 \n\n"], language=language, translate_to=translate_to)
    assert prompt["given"] == {"prompt": "x = 1 \n\n"}
    assert prompt["shown"] == TOKENIZER.decode(prompt["ids"]) == shown


def test_objects_come_back(tmp_path):
    lines = ['{"prompt": "a\u2028b", "task_id": "Py/0", "n": [1]}', "", ' {"prompt": ""}\r',
             '{"prompt": "\\ud800"}', '{"prompt": "last"}']
    (tmp_path / "f").write_bytes("\n".join(lines).encode())
    found = prompts(prompts_jsonl=str(tmp_path / "f"))
    assert [prompt["given"]["prompt"] for prompt in found] == ["a\u2028b", "", "\ud800", "last"]
    assert found[0]["given"] == {"prompt": "a\u2028b", "task_id": "Py/0", "n": [1]}
    assert [bool(prompt["error"]) for prompt in found] == [False, False, True, False]


@pytest.mark.parametrize("content, says", [
    ('{"prompt": "x"}\n{"prompt"', "line 2 is wrong"), ('{"text": "x"}', "no object with a text"),
    ("[1]", "no object"), ("\n", "no prompt in it")])
def test_lines_that_are_no_prompts(tmp_path, content, says):
    (tmp_path / "f").write_text(content)
    with pytest.raises(UsageError, match=says):
        prompts(prompts_jsonl=str(tmp_path / "f"))


def test_how_long_a_prompt_may_be():
    config = ModelConfig(seq_length=64, vocab_size=400)
    for length in (1, 63):
        assert problem([5] * length, config) is None
    for length in (64, 65, 640):
        assert problem([5] * length, config) == (
            f"{length} tokens, the context holds 64; shorten it to 63")
    assert "id 400" in problem([5, 400], config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "src").mkdir()
    for number in range(2):
        (folder / f"src/{number}.py").write_text(source(number))
    run("train.py", "--data", "src", "--out", "run", "--vocab-size", 400, "--hidden-size", 64,
        "--seq-length", 64, "--train-iters", 3, "--precision", "fp32", cwd=folder)
    five = [{"prompt": text, "task_id": f"T/{i}"}
            for i, text in enumerate(["def f(", "class", "x" * 900, "", "    if"])]
    (folder / "five.jsonl").write_text("".join(json.dumps(each) + "\n" for each in five))
    return folder


def records(folder, *argv, ranks=1):
    ended = run("infer.py", "--load", "run", "--output", "out.jsonl", *argv, ranks=ranks,
                cwd=folder)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()], ended


def without_seconds(found):
    return [{key: value for key, value in each.items() if key != "seconds"} for each in found]


def test_five_prompts_of_which_the_third_is_too_long(folder):
    """In order, two samples each, over batches, and the same on two ranks."""
    argv = ["--prompts-jsonl", "five.jsonl", "--num-samples", 2, "--micro-batch-size", 3,
            "--out-seq-length", 5, "--temperature", 0.8]
    found, ended = records(folder, *argv)
    assert [each["task_id"] for each in found] == [f"T/{i}" for i in (0, 0, 1, 1, 2, 3, 3, 4, 4)]
    assert [each for each in found if "error" in each] == [
        {"prompt": "x" * 900, "task_id": "T/2", "error": found[4]["error"]}]
    assert "the context holds 64" in found[4]["error"]
    assert "not answered: prompt 3: " in ended.stderr
    for each in found[:4] + found[5:]:
        assert set(each) == {"prompt", "task_id", "generation", "ids", "finish", "tokens",
                             "seconds", "temperature", "top_k", "top_p", "seed"}
        assert each["finish"] in ("length", "end") and each["tokens"] == len(each["ids"]) <= 5
        assert each["generation"] == open_tokenizer(folder / "run").decode(each["ids"])
    shown = "\n\n".join(each["prompt"] + each["generation"] for each in found if "ids" in each)
    assert ended.stdout == shown + "\n"
    again, whole = records(folder, *argv, "--no-stream", ranks=2)
    assert without_seconds(again) == without_seconds(found) and whole.stdout == ended.stdout


def test_greedy_by_any_name(folder):
    argv = ["--prompt", "def f(", "--out-seq-length", 20]
    true = records(folder, *argv, "--greedy")[0][0]["ids"]
    for name in (["--temperature", 0], ["--top-k", 1], ["--top-p", 1e-9],
                 ["--greedy", "--top-k", 10**6], ["--greedy", "--lookup", 8]):
        assert records(folder, *argv, *name)[0][0]["ids"] == true, name


def test_lookup_and_int8_at_tp(folder):
    """The same ids with drafts; int8 says what it did, at every tp."""
    argv = ["--prompts-jsonl", "five.jsonl", "--out-seq-length", 30, "--temperature", 0.5]
    plain, _ = records(folder, *argv)
    assert without_seconds(records(folder, *argv, "--lookup", 6, ranks=2)[0]) == (
        without_seconds(plain))
    assert len(records(folder, *argv, "--quantize", "int8", ranks=2)[0]) == 5


def test_a_missing_file_on_two_ranks(folder):
    ended = run("infer.py", "--load", "run", "--prompt-file", "nowhere", ranks=2, cwd=folder,
                check=False)
    assert ended.returncode != 0
    assert "--prompt-file nowhere: No such file or directory" in ended.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_leaves_no_process(folder, ranks):
    """Interrupted while it writes, as from a terminal: the whole process group gets the signal."""
    many = folder / "many.jsonl"
    many.write_text((json.dumps({"prompt": "def"}) + "\n") * 5000)
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    process = subprocess.Popen(
        [*start, ROOT / "infer.py", "--load", "run", "--prompts-jsonl", many, "--output",
         "cut.jsonl"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True)
    assert process.stdout.read(100)
    assert len(alive(many)) == (1 if ranks == 1 else 3)         # torchrun, too
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == (130 if ranks == 1 else 1)             # 1 is torchrun's own
    deadline = time.monotonic() + 10
    while alive(many) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(many)
    for line in (folder / "cut.jsonl").read_text().splitlines():
        json.loads(line)


def alive(word):
    """Processes with this on their command line; torchrun's workers have sessions of their own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(word) in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return found
