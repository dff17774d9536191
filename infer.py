"""Continue code: `python infer.py --prompt "def main():"`, or with torchrun on several ranks.

The text goes to standard output as it is decided: each prompt, then its continuation.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from nanogeex.command_line import parse
from nanogeex.config import InferConfig, ModelConfig, UsageError
from nanogeex.generate import Sampling, generate, stream_text
from nanogeex.mesh import Mesh, init_mesh, launch, on_rank0, pick_device, world_size
from nanogeex.sources import find, open_weights
from nanogeex.tokenizer import open_tokenizer
from nanogeex.weights import load_model


def main(argv: list[str]) -> None:
    config = parse(InferConfig, argv, __doc__)
    device = pick_device(config.device)
    tp = config.tensor_model_parallel_size or world_size()
    if tp != world_size():
        raise UsageError(f"--tensor-model-parallel-size {tp}: all {world_size()} ranks of this job "
                         f"share the model; drop the flag, or start {tp} with torchrun")
    mesh = init_mesh(tp, device, config.timeout)
    say = partial(print, file=sys.stderr) if mesh.rank == 0 else (lambda line: None)
    weights = open_weights(find(config.load, mesh, say))
    home = config.tokenizer or (weights.path.parent.parent if weights.trained else None)
    tokenizer = open_tokenizer(Path(home)) if home else None
    if not tokenizer and not config.prompt_ids:
        raise UsageError(f"--load {config.load}: has no tokenizer of its own; give --tokenizer DIR,"
                         " or --prompt-ids")
    asked = on_rank0(mesh, "prompts", lambda: prompts(config, tokenizer))
    model = load_model(weights, config.num_attention_heads, config.precision, mesh,
                       tokenizer.vocab_size if tokenizer else None)
    for i, (_, prompt) in enumerate(asked):     # all of them before the first is answered
        check_prompt(i + 1, prompt, model.config)

    sampling = Sampling(0.0 if config.greedy else config.temperature, config.top_k, config.top_p)
    end = config.end_id
    if end is None:
        end = tokenizer.end_of_document if tokenizer else -1
    sys.stdout.reconfigure(errors="backslashreplace")       # a terminal that cannot show it all
    with open_output(config.output, mesh) as output:
        for i, (text, prompt) in enumerate(asked):
            show(mesh, ("\n\n" if i else "") + text)
            ids, parts = [], []
            chosen = keep(ids, generate(model, prompt, config.out_seq_length, end, sampling,
                                        config.seed, mesh))
            for part in (stream_text(tokenizer, prompt, chosen) if tokenizer
                         else (f",{token}" for token in chosen)):
                show(mesh, part)
                parts.append(part)
            if output:
                record = {"prompt_ids": prompt, "ids": ids}
                if tokenizer:
                    record |= {"prompt": text, "text": "".join(parts)}
                output.write(json.dumps(record) + "\n")
                output.flush()
    show(mesh, "\n")


def prompts(config: InferConfig, tokenizer) -> list[tuple[str, list[int]]]:
    """What to continue, as it is shown and as ids.  Raises UsageError for what is neither ids nor
    UTF-8."""
    if config.prompt_ids:
        if config.prompt:
            raise UsageError("--prompt-ids: --prompt is there too; give one")
        asked = []
        for given in config.prompt_ids:
            if not re.fullmatch(r"\d+(,\d+)*", given):
                raise UsageError(f"--prompt-ids {given}: not ids; give them as 5,17,300")
            ids = [int(number) for number in given.split(",")]
            asked.append((tokenizer.decode(ids) if tokenizer else given, ids))
        return asked
    if not config.prompt and sys.stdin.isatty():
        print("type the text to continue; Ctrl-D ends it", file=sys.stderr)
    try:
        texts = config.prompt or [sys.stdin.buffer.read().decode()]
        for text in texts:
            text.encode()
    except UnicodeError as error:
        raise UsageError(f"--prompt: not UTF-8 ({error.reason} at position {error.start}); convert "
                         "it") from None
    return [(text, tokenizer.encode(text) or [tokenizer.end_of_document]) for text in texts]


def check_prompt(number: int, ids: list[int], config: ModelConfig) -> None:
    if len(ids) >= config.seq_length:
        raise UsageError(f"--prompt: number {number} has {len(ids)} tokens, the context holds "
                         f"{config.seq_length}; shorten it to {config.seq_length - 1}")
    if max(ids) >= config.vocab_size:
        raise UsageError(f"--prompt-ids: number {number} has id {max(ids)}, the vocabulary ends at "
                         f"{config.vocab_size - 1}; give ids of this model")


def keep(ids: list[int], chosen: Iterator[int]) -> Iterator[int]:
    """The same ids, and a list of them."""
    for token in chosen:
        ids.append(token)
        yield token


def open_output(path: str | None, mesh: Mesh):
    """--output, on rank 0."""
    if path is None or mesh.rank > 0:
        return nullcontext()
    try:
        return open(path, "w")
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}; give a file that can be written") \
            from None


def show(mesh: Mesh, text: str) -> None:
    if mesh.rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    launch(main)
