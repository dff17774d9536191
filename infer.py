"""Continue code: `python infer.py --prompt "def main():"`, or with torchrun on several ranks.

The text goes to standard output as it is decided: each prompt, then its continuation.  Without a
prompt, in a terminal: asks for them, one after the other.
"""

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

from nanogeex import repl
from nanogeex.command_line import parse
from nanogeex.config import UsageError
from nanogeex.decoder import Decoder
from nanogeex.generate import Sample, Sampling, generate
from nanogeex.infer_config import InferConfig
from nanogeex.mesh import (
    end_with_parent,
    init_mesh,
    launch,
    on_rank0,
    pick_device,
    world_size,
)
from nanogeex.prompts import from_text, problem, read_prompts, record
from nanogeex.sources import find, open_weights
from nanogeex.streaming import TextStream
from nanogeex.tokenizer import open_tokenizer
from nanogeex.weights import load_model


def main(argv: list[str]) -> None:
    config = parse(InferConfig, argv, __doc__)
    device = pick_device(config.device)
    tp = config.tensor_model_parallel_size or world_size()
    if tp != world_size():
        raise UsageError(f"--tensor-model-parallel-size {tp}: all {world_size()} ranks of this job "
                         f"share the model; drop the flag, or start {tp} with torchrun")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    mesh = init_mesh(tp, device, config.timeout)
    say = partial(print, file=sys.stderr, flush=True) if mesh.rank == 0 else (lambda line: None)

    # What to continue, and the model.
    weights = open_weights(find(config.load, mesh, say))
    home = config.tokenizer or (weights.path.parent.parent if weights.trained else None)
    tokenizer = open_tokenizer(Path(home)) if home else None
    if not tokenizer and not config.prompt_ids:
        raise UsageError(f"--load {config.load}: has no tokenizer of its own; give --tokenizer DIR,"
                         " or --prompt-ids")
    if not tokenizer and config.stop:
        raise UsageError(f"--stop {config.stop[0]}: there is no text without --tokenizer; give it, "
                         "or --end-id")
    prompts = on_rank0(mesh, "prompts", lambda: read_prompts(config, tokenizer))
    model = load_model(weights, config.num_attention_heads, config.precision, mesh,
                       tokenizer.vocab_size if tokenizer else None, config.quantize == "int8")
    for prompt in prompts or []:                # all of them before the first is answered
        prompt["error"] = prompt["error"] or problem(prompt["ids"], model.config)
    failed = [f"prompt {number}: {prompt['error']}"
              for number, prompt in enumerate(prompts or [], 1) if prompt["error"]]
    if failed and len(failed) == len(prompts):
        raise UsageError(failed[0])
    for line in failed:
        say(f"not answered: {line}")
    decoder = Decoder(model)

    sampling = Sampling(0.0 if config.greedy else config.temperature, config.top_k, config.top_p)
    end = config.end_id
    if end is None:
        end = tokenizer.end_of_document if tokenizer else -1
    sys.stdout.reconfigure(errors="backslashreplace")       # a terminal that cannot show it all
    outputs: list[TextIO] = []
    read = [*weights.files, config.prompt_file or "", config.prompts_jsonl or ""]
    on_rank0(mesh, "output", lambda: open_output(config.output, read, outputs))
    show = partial(print, end="", flush=True) if mesh.rank == 0 else (lambda text: None)

    def answer(prompts: list[dict], before: int = 0, watch: Callable = iter) -> None:
        """A turn a sample, in order.  `before`: prompts of earlier calls; `watch`: see repl.py."""
        turns: list[tuple[dict, Sample | None]] = []
        for number, prompt in enumerate(prompts, before):
            if prompt["error"]:
                turns.append((prompt, None))
                continue
            for copy in range(config.num_samples):
                seed = zlib.crc32(f"{config.seed} {number} {copy}".encode())
                stream = tokenizer and TextStream(tokenizer, prompt["ids"], config.stop or [])
                turns.append((prompt, Sample(prompt["ids"], config.out_seq_length, seed, stream)))
        gap = ""
        for first in range(0, len(turns), config.micro_batch_size):
            batch = turns[first:first + config.micro_batch_size]
            samples = [sample for _, sample in batch if sample]
            steps = watch(generate(decoder, samples, sampling, end, mesh, config.lookup))
            for prompt, sample in batch:
                if sample:
                    show(gap + prompt["shown"])
                    gap = "\n\n"
                    for text in as_decided(sample, steps, config.stream):
                        show(text)
                    its = record(prompt["given"], sample, sampling)
                else:
                    its = prompt["given"] | {"error": prompt["error"]}
                for output in outputs:
                    write(output, its)
        show("\n")

    def reply(number: int, text: str, watch: Callable) -> None:
        prompt = from_text({"prompt": text}, tokenizer, config) | {"shown": ""}     # it was typed
        prompt["error"] = prompt["error"] or problem(prompt["ids"], model.config)
        if prompt["error"]:
            say(f"not answered: {prompt['error']}")
        answer([prompt], number, watch)

    if prompts is None:
        repl.converse(mesh, reply)
    else:
        answer(prompts)


def as_decided(sample: Sample, steps: Iterator[None], stream: bool) -> Iterator[str]:
    """The sample's text, in parts or at once.  Its batch takes the steps that it needs, and so the
    samples whose turn is later grow, too."""
    shown = 0
    while not sample.finish:
        next(steps)
        if stream:
            yield "".join(sample.parts[shown:])
            shown = len(sample.parts)
    yield "".join(sample.parts[shown:])


def open_output(path: str | None, read: list[Path | str], outputs: list[TextIO]) -> None:
    """--output, if it is asked for, into the list; not over what is `read`."""
    if path and Path(path).resolve() in [Path(each).resolve() for each in read]:
        raise UsageError(f"--output {path}: is what is read; give another file")
    try:
        outputs += [open(path, "w")] if path else []
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}; give a file that can be written") \
            from None


def write(output: TextIO, its: dict) -> None:
    try:
        output.write(json.dumps(its) + "\n")
        output.flush()
    except OSError as error:
        raise UsageError(f"--output {output.name}: {error.strerror}; make room, or give another "
                         "file") from None


if __name__ == "__main__":
    launch(main)
