"""Continue code: `python infer.py --prompt "def main():"`, or with torchrun on several ranks.

The text goes to standard output as it is decided: each prompt, then its continuation.
"""

import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from nanogeex import checkpoint, integrity
from nanogeex.command_line import parse
from nanogeex.config import DTYPES, InferConfig, ModelConfig, UsageError, check_shape
from nanogeex.generate import Sampling, generate, stream_text
from nanogeex.mesh import Mesh, init_mesh, launch, on_rank0, pick_device, world_size
from nanogeex.model import CodeGeeX, Options
from nanogeex.parameters import split_table
from nanogeex.tokenizer import CodeTokenizer


def main(argv: list[str]) -> None:
    config = parse(InferConfig, argv, __doc__)
    device = pick_device(config.device)
    tp = config.tensor_model_parallel_size or world_size()
    if tp != world_size():
        raise UsageError(f"--tensor-model-parallel-size {tp}: all {world_size()} ranks of this job "
                         f"share the model; drop the flag, or start {tp} with torchrun")
    mesh = init_mesh(tp, device, config.timeout)
    path = find_checkpoint(Path(config.load), mesh)
    trained = integrity.read_meta(path)["config"]
    shape = ModelConfig(**{field.name: trained[field.name] for field in fields(ModelConfig)})
    check_shape(shape, tp)
    tokenizer = CodeTokenizer.load(path.parent.parent / "tokenizer.model")
    precision = config.precision or ("fp32" if device.type == "cpu" else trained["precision"])
    model = load(path, shape, trained["ln_fp16"], DTYPES[precision], mesh)

    texts = on_rank0(mesh, "prompts", lambda: prompts(config))
    encoded = [tokenizer.encode(text) or [tokenizer.end_of_document] for text in texts]
    for i, prompt in enumerate(encoded):        # all of them before the first is answered
        if len(prompt) >= shape.seq_length:
            raise UsageError(f"--prompt: number {i + 1} has {len(prompt)} tokens, the context "
                             f"holds {shape.seq_length}; shorten it to {shape.seq_length - 1}")
    sampling = Sampling(0.0 if config.greedy else config.temperature, config.top_k, config.top_p)
    sys.stdout.reconfigure(errors="backslashreplace")       # a terminal that cannot show it all
    for i, (text, prompt) in enumerate(zip(texts, encoded, strict=True)):
        show(mesh, ("\n\n" if i else "") + text)
        ids = generate(model, prompt, config.out_seq_length, tokenizer.end_of_document, sampling,
                       config.seed, mesh)
        for part in stream_text(tokenizer, prompt, ids):
            show(mesh, part)
    show(mesh, "\n")


def find_checkpoint(given: Path, mesh: Mesh) -> Path:
    """A checkpoint itself, or a run's newest that is whole."""
    say = partial(print, file=sys.stderr) if mesh.rank == 0 else (lambda line: None)
    if not on_rank0(mesh, "is a checkpoint", (given / "meta.json").is_file):
        found = integrity.find(given / "checkpoints", mesh, say)
        if found is None:
            raise UsageError(f"--load {given}: no run with a checkpoint; make one with "
                             f"`python train.py --out {given}`, or give another")
        return found.resolve()
    if problem := integrity.damage(given, mesh):
        raise UsageError(f"--load {given}: {problem}")
    return given.resolve()


def prompts(config: InferConfig) -> list[str]:
    """The texts to continue.  Raises UsageError for what is not UTF-8."""
    if not config.prompt and sys.stdin.isatty():
        print("type the text to continue; Ctrl-D ends it", file=sys.stderr)
    try:
        texts = config.prompt or [sys.stdin.buffer.read().decode()]
        for text in texts:
            text.encode()
    except UnicodeError as error:
        raise UsageError(f"--prompt: not UTF-8 ({error.reason} at position {error.start}); convert "
                         "it") from None
    return texts


def load(path: Path, shape: ModelConfig, ln_fp16: bool, dtype: torch.dtype, mesh: Mesh) -> CodeGeeX:
    """This rank's share of a checkpoint's weights, ready to generate."""
    with torch.device("meta"):
        model = CodeGeeX(shape, mesh, Options(ln_fp16)).requires_grad_(False)
    model.to_empty(device=mesh.device)
    checkpoint.load(path, dict(model.named_parameters()), None, split_table(model), mesh)
    return model.to(dtype).eval()


def show(mesh: Mesh, text: str) -> None:
    if mesh.rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    launch(main)
