"""What goes into infer.py and what comes out of it, prompt by prompt.

      --prompt TEXT ...     --prompt-file F: the file is one prompt
      --prompts-jsonl F     an object a line with `prompt`; its other keys come back
      --prompt-ids 5,17 ...
      none of these         standard input is one prompt; in a terminal, repl.py asks for them

      --output F.jsonl      an object a sample, in order:  {the prompt's keys, generation, ids,
                            finish, tokens, seconds, temperature, top_k, top_p, seed}

A text is a prompt character by character, as it is; only a byte order mark is no part of it.  A
prompt that cannot be answered, because it fills the context or has no ids, has `error` in its
object, and the others are answered.  Nothing is cut off a prompt.

--language and --translate-to put lines around each prompt that tell the model what follows, as in
its training.  Records do not show them.

Tests: tests/test_prompts.py.
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from nanogeex.config import ModelConfig, UsageError
from nanogeex.corpus import language_line
from nanogeex.generate import Sample, Sampling
from nanogeex.infer_config import InferConfig
from nanogeex.tokenizer import CodeGeeXTokenizer, CodeTokenizer


def read_prompts(config: InferConfig, tokenizer: CodeTokenizer | CodeGeeXTokenizer | None
                 ) -> list[dict] | None:
    """A dictionary a prompt: `given`, the keys of its record; `shown`; `ids`; `error` or None.
    None, instead of all of them: a terminal is there to ask.  Raises UsageError for files that are
    not what their flag says."""
    sources = ["prompt", "prompt_file", "prompts_jsonl", "prompt_ids"]
    named = ["--" + name.replace("_", "-") for name in sources if getattr(config, name) is not None]
    if len(named) > 1:
        raise UsageError(f"{named[1]}: {named[0]} is there too; give one")
    if config.prompt_ids:
        return [_from_ids(given, tokenizer) for given in config.prompt_ids]
    if config.prompts_jsonl:
        objects = _objects(config.prompts_jsonl)
    elif config.prompt_file:
        objects = [{"prompt": _read(config.prompt_file, "--prompt-file")}]
    elif config.prompt:
        objects = [{"prompt": text} for text in config.prompt]
    else:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return None
        if sys.stdin.isatty():
            print("type the text to continue; Ctrl-D ends it", file=sys.stderr)
        objects = [{"prompt": _text(sys.stdin.buffer.read(), "standard input")}]
    return [from_text(given, tokenizer, config) for given in objects]


def _from_ids(given: str, tokenizer: CodeTokenizer | CodeGeeXTokenizer | None) -> dict:
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise UsageError(f"--prompt-ids {given}: not ids; give them as 5,17,300")
    ids = [int(number) for number in given.split(",")]
    if tokenizer and max(ids) >= tokenizer.vocab_size:
        raise UsageError(f"--prompt-ids {given}: id {max(ids)}, the tokenizer's end at "
                         f"{tokenizer.vocab_size - 1}; give this tokenizer's")
    return {"given": {"prompt_ids": ids}, "ids": ids, "error": None,
            "shown": tokenizer.decode(ids) if tokenizer else given}


def from_text(given: dict, tokenizer: CodeTokenizer | CodeGeeXTokenizer, config: InferConfig
              ) -> dict:
    """A document begins where another has ended: so does the empty prompt."""
    text = as_trained(given["prompt"], config.language or "", config.translate_to)
    try:
        ids, error = tokenizer.encode(text) or [tokenizer.end_of_document], None
    except UnicodeEncodeError as problem:
        ids, error = [], f"not Unicode ({problem.reason} at position {problem.start}); convert it"
    return {"given": given, "shown": text, "ids": ids, "error": error}


def as_trained(text: str, language: str, translate_to: str | None) -> str:
    """The text after its language line, as documents begin; or as the source of a translation, in
    the form that CodeGeeX's own benchmark has (codegeex/benchmark/utils.py in THUDM/CodeGeeX,
    `read_translation_dataset`; there the translation's declaration follows)."""
    if translate_to:
        return f"code translation\n{language}:\n{text.rstrip()}\n{translate_to}:\n"
    return language_line(language) + text


def _text(content: bytes, what: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeError as error:
        raise UsageError(f"{what}: not UTF-8 ({error.reason} at position {error.start}); convert "
                         "it") from None


def _read(path: str, flag: str) -> str:
    try:
        return _text(Path(path).read_bytes(), f"{flag} {path}")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}; give a file that can be read") from None


def _objects(path: str) -> list[dict]:
    objects = []
    for number, line in enumerate(_read(path, "--prompts-jsonl").split("\n"), 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
                raise ValueError("no object with a text as `prompt`")
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--prompts-jsonl {path}: line {number} is wrong ({error}); give one "
                             'object a line, as {"prompt": "def f(x):"}') from None
        objects.append(given)
    if not objects:
        raise UsageError(f"--prompts-jsonl {path}: no prompt in it; give one object a line")
    return objects


def problem(ids: list[int], config: ModelConfig) -> str | None:
    """Why this model cannot continue these ids."""
    if len(ids) >= config.seq_length:
        return (f"{len(ids)} tokens, the context holds {config.seq_length}; shorten it to "
                f"{config.seq_length - 1}")
    if max(ids) >= config.vocab_size:
        return f"id {max(ids)}, the vocabulary ends at {config.vocab_size - 1}; give this model's"
    return None


def record(given: dict, sample: Sample, sampling: Sampling) -> dict:
    """A sample's object in --output."""
    text = {"generation": "".join(sample.parts)} if sample.stream else {}
    return given | text | {
        "ids": sample.ids, "finish": sample.finish, "tokens": len(sample.ids),
        "seconds": round(sample.seconds, 3), **asdict(sampling), "seed": sample.seed}
