"""What can be set when text is generated: the flags of infer.py, made as config.py's are.

Tests: tests/test_config.py, tests/test_prompts.py.
"""

from dataclasses import dataclass

from nanogeex.config import DEVICES, DTYPES, UsageError, flag
from nanogeex.corpus import BY_NAME, LANGUAGES


@dataclass
class InferConfig:
    load: str = flag(
        "out", "input", "run directory, one of its checkpoints, a released .pt file, or a "
        "directory of its parts", metavar="WEIGHTS")
    tokenizer: str | None = flag(
        None, "input", "directory of CodeGeeX's vocab.json and merges.txt; default: the run's",
        type=str, metavar="DIR")
    num_attention_heads: int | None = flag(
        None, "input", "of released weights, which do not tell; default: hidden size / 128",
        low=1, type=int)
    prompt: list[str] | None = flag(
        None, "input", "text to continue, several in order (--prompt=TEXT if it begins with a "
        "dash); default: standard input, as one prompt; a terminal is asked for prompts")
    prompt_file: str | None = flag(None, "input", "a text file, which is one prompt", type=str,
                                   metavar="FILE")
    prompts_jsonl: str | None = flag(
        None, "input", "an object a line with `prompt`; its other keys come back in --output",
        type=str, metavar="FILE")
    prompt_ids: list[str] | None = flag(
        None, "input", "token ids to continue, as 5,17,300; needs no --tokenizer", metavar="IDS")
    language: str | None = flag(
        None, "input", "of the prompts: the line that opens its documents, as # language: Python, "
        "goes before each", type=str, metavar="NAME")
    translate_to: str | None = flag(
        None, "input", "another language: prompts, in --language, are to be translated, as the "
        "released weights have learnt it", type=str, metavar="NAME")
    num_samples: int = flag(1, "input", "continuations a prompt", low=1)

    out_seq_length: int = flag(
        256, "sampling", "new tokens, at most; a full context ends it too", low=0)
    greedy: bool = flag(False, "sampling", "take the likeliest token")
    temperature: float = flag(
        0.2, "sampling", "lower takes likely tokens more often; 0 is --greedy", low=0)
    top_k: int = flag(0, "sampling", "choose among the k likeliest; 0: off", low=0)
    top_p: float = flag(
        0.95, "sampling", "choose among the likeliest that hold this much; 0 or 1: off",
        low=0, high=1)
    seed: int = flag(1234, "sampling", "of the choices", low=0, high=2**63 - 1)
    end_id: int | None = flag(
        None, "sampling", "token id to stop before; default: the tokenizer's end of a document",
        low=0, type=int)
    stop: list[str] | None = flag(
        None, "sampling", "strings to stop before, several or one, in the new text")

    output: str | None = flag(
        None, "output", "an object a line, a sample's: the prompt's keys, generation, ids, "
        "finish (end, stop, length or context), tokens, seconds and the sampling",
        type=str, metavar="FILE")
    stream: bool = flag(True, "output", "show text as it is decided, not each sample as a whole")

    micro_batch_size: int = flag(8, "machine", "samples decoded together, at most", low=1)
    lookup: int = flag(
        0, "machine", "draft up to N tokens from where the last ones occurred before; the choices "
        "stay the same; 0: off", low=0, high=1000)
    precision: str | None = flag(
        None, "machine", "of weights and products; default: fp32 on the CPU, the weights' own on "
        "CUDA", choices=tuple(DTYPES), type=str)
    quantize: str | None = flag(
        None, "machine", "int8: the blocks' weights in half the memory of fp16", choices=("int8",),
        type=str)
    device: str = flag("auto", "machine", "auto: CUDA where there is some", choices=DEVICES)
    tensor_model_parallel_size: int | None = flag(
        None, "machine", "ranks that share the model; default: all that torchrun starts",
        low=1, type=int, short="--tp")
    use_cpu_initialization: bool = flag(
        False, "machine", "accepted, without effect: a rank reads its own slices, in place")
    timeout: float = flag(
        300.0, "machine", "seconds that ranks wait for one another before the job fails", above=0)

    def __post_init__(self):
        if "" in (self.stop or []):
            raise UsageError("--stop: empty; give the text to stop before")
        for name in ("language", "translate_to"):
            given = getattr(self, name) or ""
            if given and given.lower() not in BY_NAME:
                raise UsageError(f"--{name.replace('_', '-')} {given}: unknown; choose one of "
                                 f"{', '.join(LANGUAGES)}")
            setattr(self, name, BY_NAME.get(given.lower()))
        if self.translate_to and not self.language:
            raise UsageError(f"--translate-to {self.translate_to}: from which language? give "
                             "--language, too")
        if self.language and self.prompt_ids:
            raise UsageError(f"--language {self.language}: --prompt-ids are taken as they are; "
                             "give one of the two")
