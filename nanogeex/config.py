"""Configuration: all of a training that can be set, and three presets.

A field is written once, with its default, its help and its bounds; its flag, the check and the line
in `--help` are made from it (command_line.py).  Names are those of Megatron-LM's and CodeGeeX's
scripts.  What a user can get wrong raises `UsageError`: one line that names the field, the value
and the remedy.

Tests: tests/test_config.py, tests/test_errors.py.
"""

import re
from dataclasses import dataclass, field

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")


class UsageError(ValueError):
    """A mistake that the user can mend.  Entry points print it as one line, without a traceback."""


def flag(default, group: str, help: str, **meta):
    """A dataclass field that is also a flag.  `meta`: bounds `low` <= value <= `high`, value >
    `above`; `choices`; `short`, a second name; `type`, where the annotation allows None; `metavar`,
    what --help calls the value; `positional`, the name of an argument without a flag."""
    return field(default=default, metadata=dict(group=group, help=help, **meta))


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


@dataclass
class ModelConfig:
    """The shape of a CodeGeeX: `num_layers` ordinary blocks, then one top-query block."""

    num_layers: int = flag(1, "model", "transformer blocks below the top-query block", low=1)
    hidden_size: int = flag(128, "model", "width of the residual stream", low=1)
    num_attention_heads: int = flag(8, "model", "attention heads a block", low=1)
    seq_length: int = flag(128, "model", "tokens of the context and of a training sample", low=1)
    vocab_size: int = flag(4096, "model", "token ids of the tokenizer", low=300)
    make_vocab_size_divisible_by: int = flag(
        128, "model", "pad the vocabulary to a multiple of this, at every topology alike", low=1)

    @property
    def padded_vocab_size(self) -> int:
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    @property
    def num_parameters(self) -> int:
        h, blocks = self.hidden_size, self.num_layers + 1
        block = 12 * h * h + 13 * h     # q k v dense 4hh + 4h, FFN 8hh + 5h, two LayerNorms 4h
        return self.padded_vocab_size * h + 2 * self.seq_length * h + blocks * block + 2 * h

    def flops_per_token(self) -> float:
        """Forward and backward: 6 a weight that is multiplied, and attention's two products."""
        h, blocks = self.hidden_size, self.num_layers + 1
        weights = 12 * h * h * blocks + self.padded_vocab_size * h
        return 3.0 * (2 * weights + 4 * self.seq_length * h * blocks)


@dataclass
class TrainConfig(ModelConfig):
    preset: str = flag("tiny", "run", "named set of defaults of the other flags",
                       choices=("tiny", "125m", "codegeex-13b"))
    out: str = flag("out", "run", "run directory: config, tokenizer, data, metrics, checkpoints",
                    metavar="DIR")
    resume: str = flag("auto", "run", "auto: the newest checkpoint of --out, if there is one; "
                       "none: refuse to continue one; or the PATH of a checkpoint",
                       metavar="auto | none | PATH")
    init_from: str | None = flag(
        None, "run", "start from these WEIGHTS: a released file, a directory of parts or a run; "
        "their shape is the model's; a checkpoint in --out goes before them", type=str,
        metavar="WEIGHTS")
    seed: int = flag(
        1234, "run", "of the weights, the order of the samples and dropout", low=0, high=2**63 - 1)
    device: str = flag("auto", "run", "auto: CUDA where there is some", choices=DEVICES)
    timeout: float = flag(
        120.0, "run", "seconds that ranks wait for one another before the job fails; making the "
        "data and saving do not count", above=0)

    data: list[str] | None = flag(
        None, "data", "folders of source files, .jsonl[.gz] files with `code`, or one prepared "
        "directory; default: the running Python's library and some C++ headers of torch",
        metavar="PATH")
    tokenizer: str | None = flag(
        None, "data", "directory of CodeGeeX's vocab.json and merges.txt, or of a run; default: "
        "one is trained on the data", type=str, metavar="DIR")
    num_workers: int = flag(0, "data", "processes that tokenise; 0: one a core", low=0, high=512)

    train_iters: int = flag(1000, "training", "optimizer steps in all", low=0)
    micro_batch_size: int | str = flag(
        16, "training", "samples a data rank puts through the model at once, at most; auto: as "
        "many as fit into memory", low=1, type=number_or_auto, metavar="N | auto")
    global_batch_size: int = flag(
        16, "training", "samples a step, over all data ranks", low=1, high=10**7)
    compile: bool = flag(False, "training", "torch.compile each block, in the first steps")
    init_method_std: float = flag(
        0.02, "training", "standard deviation of the initial weights", above=0)
    lr: float = flag(6e-3, "training", "peak learning rate", above=0)
    min_lr: float = flag(1e-5, "training", "learning rate at the end of the cosine", low=0)
    lr_warmup_iters: int | None = flag(
        None, "training", "steps of linear warm-up; default: 5%% of --lr-decay-iters",
        low=0, type=int)
    lr_decay_iters: int | None = flag(
        None, "training", "step that reaches --min-lr; default: --train-iters", low=1, type=int)
    hidden_dropout: float = flag(
        0.0, "training", "share of embeddings, and of what blocks add to the residual, that is "
        "dropped", low=0, high=0.99)
    attention_dropout: float = flag(
        0.0, "training", "share of the attention probabilities that is dropped", low=0, high=0.99)
    weight_decay: float = flag(0.1, "training", "AdamW's, not on biases and LayerNorms", low=0)
    adam_beta1: float = flag(0.9, "training", "decay of the first moment", low=0, high=0.999999)
    adam_beta2: float = flag(0.95, "training", "decay of the second moment", low=0, high=0.999999)
    adam_eps: float = flag(1e-6, "training", "added to the root of the second moment; far below "
                           "gradients, far above their rounding", above=0)
    clip_grad: float = flag(1.0, "training", "largest gradient norm; 0: no clipping", low=0)
    max_consecutive_skips: int = flag(
        50, "training", "stop when so many steps in a row were skipped for a loss or gradient that "
        "is not finite", low=1)

    precision: str | None = flag(
        None, "precision", "of products and activations, masters are fp32; default: fp32 on a CPU "
        "without fast bf16, else bf16, fp16 for codegeex-13b on CUDA", choices=tuple(DTYPES),
        type=str)
    grad_reduce_dtype: str = flag(
        "fp32", "precision", "in which gradients are summed over the data ranks; fp16 sends half",
        choices=("fp32", "bf16", "fp16"))
    ln_fp16: bool = flag(False, "precision", "LayerNorm in the products' precision, not in fp32")
    initial_loss_scale: float = flag(
        2.0**12, "precision", "of fp16: what losses are multiplied by at first", above=0)
    min_loss_scale: float = flag(
        1.0, "precision", "of fp16: an overflow at this one stops the run", above=0)
    loss_scale_window: int = flag(
        500, "precision", "of fp16: steps without overflow until the loss scale doubles", low=1)
    hysteresis: int = flag(
        2, "precision", "of fp16: which overflow is the first to halve the loss scale", low=1)

    tensor_model_parallel_size: int = flag(
        1, "parallelism", "ranks that share every layer; the others take other samples",
        low=1, short="--tp")
    recompute: str = flag(
        "none", "parallelism", "in backward, instead of keeping activations: full keeps a block's "
        "input; selective keeps two inputs, and repeats no all-reduce",
        choices=("none", "selective", "full"))
    sequence_parallel: bool = flag(
        False, "parallelism", "outside split layers each tp rank keeps its own tokens only: less "
        "memory, the same traffic; best with --recompute selective, which gathers some again")
    reshard_after_forward: bool = flag(
        False, "parallelism", "drop a block's weights between forward and backward (ZeRO-3): less "
        "memory, more traffic between data ranks")
    checkpoint_activations: bool = flag(False, "parallelism", "the same as --recompute full")
    use_cpu_initialization: bool = flag(
        False, "parallelism", "accepted, without effect: weights are always filled in place")

    dry_run: bool = flag(
        False, "dry run", "train nothing; say what a rank of --world-size would hold and send")
    world_size: int | None = flag(
        None, "dry run", "ranks of the job; default: --tp", low=1, type=int)
    json: bool = flag(False, "dry run", "print JSON instead of a table")
    accelerator: str = flag("A100-80", "dry run", "device to reckon with: V100, A100-40, A100-80, "
                            "H100, H200; the next four mend it", metavar="NAME")
    peak_tflops: float | None = flag(
        None, "dry run", "16-bit peak of a device, TFLOP/s; default: --accelerator's",
        above=0, type=float)
    memory_gib: float | None = flag(
        None, "dry run", "its memory, GiB; default: as above", above=0, type=float)
    link_gb_s: float | None = flag(
        None, "dry run", "its links in a node, GB/s one way; default: as above",
        above=0, type=float)
    network_gb_s: float | None = flag(
        None, "dry run", "its part of the node's network, GB/s one way; default: as above",
        above=0, type=float)
    devices_per_node: int = flag(8, "dry run", "devices that the faster links join", low=1)
    compute_efficiency: float = flag(
        0.5, "dry run", "of the peak, what kernels reach", above=0, high=1)

    debug_inf: str | None = flag(
        None, "logging", "STEP:RANK plants an inf in that rank's gradient at that step, to try "
        "what an overflow does", type=str, metavar="STEP:RANK")
    profile: bool = flag(
        False, "logging", "record the third to the fifth step on rank 0: trace.json in --out, and "
        "the ten largest costs")
    log_interval: int = flag(10, "logging", "steps between log lines", low=1)
    tensorboard_dir: str | None = flag(
        None, "logging", "for TensorBoard, if it is installed: what metrics.jsonl gets", type=str)
    eval_interval: int = flag(500, "logging", "steps between evaluations", low=1)
    eval_iters: int = flag(100, "logging", "global batches an evaluation, at most", low=1)
    save_interval: int = flag(
        500, "logging", "steps between checkpoints; the last step always makes one", low=1)
    keep_last: int = flag(3, "logging", "checkpoints to keep", low=1)
    async_save: bool = flag(
        True, "logging", "write checkpoints in the background, from a copy in memory")

    def __post_init__(self):
        if self.checkpoint_activations and self.recompute == "none":
            self.recompute = "full"
        self.lr_decay_iters = self.lr_decay_iters or max(1, self.train_iters)
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters = self.lr_decay_iters // 20
        if self.min_lr > self.lr:
            raise UsageError(f"--min-lr {self.min_lr}: above --lr {self.lr}; lower it")
        if self.min_loss_scale > self.initial_loss_scale:
            raise UsageError(f"--min-loss-scale {self.min_loss_scale}: above --initial-loss-scale "
                             f"{self.initial_loss_scale}; lower it")
        if self.init_from and self.resume not in ("auto", "none"):
            raise UsageError(f"--init-from {self.init_from}: starts anew, --resume {self.resume} "
                             "goes on; give one")
        if self.debug_inf and not re.fullmatch(r"\d+:\d+", self.debug_inf):
            raise UsageError(f"--debug-inf {self.debug_inf}: not STEP:RANK; give two numbers")
        if not self.dry_run and (self.world_size or self.json):
            given = f"--world-size {self.world_size}" if self.world_size else "--json"
            raise UsageError(f"{given}: is for --dry-run; add that, or let torchrun make the world")
        if self.dry_run and self.micro_batch_size == "auto":
            raise UsageError("--micro-batch-size auto: measures a device, --dry-run has none; give "
                             "a number")
        check_shape(self, self.tensor_model_parallel_size)


# 125m: the smallest model of GPT-3 (arXiv:2005.14165, table 2.1), in blocks of ours.  codegeex-13b:
# the paper's model and batch (arXiv:2303.17568); rates and steps of upstream's pretraining script.
PRESETS: dict[str, dict] = {
    "tiny": dict(init_method_std=0.08),         # 0.02 is for wide models: measured 0.6 nats behind
    "125m": dict(
        num_layers=11, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=32000,
        micro_batch_size=8, global_batch_size=256, lr=6e-4, min_lr=6e-5, adam_eps=1e-8,
        train_iters=20000, lr_warmup_iters=700, save_interval=1000),
    "codegeex-13b": dict(
        num_layers=39, hidden_size=5120, num_attention_heads=40, seq_length=2048, vocab_size=50400,
        make_vocab_size_divisible_by=52224, micro_batch_size=16, global_batch_size=3072, lr=2e-4,
        min_lr=1e-7, adam_eps=1e-8, train_iters=100000, lr_warmup_iters=1500, hidden_dropout=0.1,
        attention_dropout=0.1, recompute="full"),
}


def check_shape(config: ModelConfig, tp: int) -> None:
    """Whatever a layer cuts must divide: torch.chunk gives uneven parts without an error."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    if hidden % heads:
        raise UsageError(f"--hidden-size {hidden}: not a multiple of --num-attention-heads {heads}"
                         "; change one")
    cut = {"--num-attention-heads": heads, "--hidden-size": hidden, "the FFN's width": 4 * hidden,
           "the padded vocabulary": config.padded_vocab_size, "--seq-length": config.seq_length}
    for what, size in cut.items():
        if size % tp:
            fit = [n for n in range(1, heads + 1) if not any(size % n for size in cut.values())]
            raise UsageError(f"--tensor-model-parallel-size {tp}: does not divide {what} {size}; "
                             f"choose one of {', '.join(map(str, fit))}")
