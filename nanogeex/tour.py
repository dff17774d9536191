"""A tour of one training step: `python -m nanogeex.tour`, where train.py is.

Two processes train a small model on a CPU for a step.  Under each line of ours that asks for a
collective stands what is sent; after each part of the step, what each rank holds.  Nothing is
acted: model, FSDP2, loss and optimizer are those of train.py, and Watch looks on.  Two ranks share

      tp 2     each layer: half of it on each, and sums of activations all the way through
      dp 2     the batch (ZeRO-2): other samples on each, weights gathered, gradients reduced

Both ask for the same collectives, so rank 0's are printed; bytes are those of the whole tensor.
A step before the tour has made AdamW's moments.

Tests: tests/test_tour.py.
"""

import json
import linecache
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, start_processes

from nanogeex import zero
from nanogeex.command_line import parse
from nanogeex.config import TrainConfig, UsageError, flag
from nanogeex.mesh import Mesh, all_reduce_sum, init_mesh, launch
from nanogeex.optim import adamw, optimizer_step, sum_over_tp
from nanogeex.parameters import initial_weight
from nanogeex.samples import Windows
from nanogeex.watch import Watch

# What to look for in the four parts of a step, by what the ranks do.
PARTS = ("at rest", "forward", "backward", "norm, clip, AdamW")
GUIDE = {
    "tensor parallel": (
        "half of every matrix, LayerNorms and some biases whole; two moments of each",
        "half of a layer gives a summand, which an all-reduce adds up: two a block",
        "where forward was a copy, gradients are summands: two all-reduces a block, last first",
        "loss and norm of the whole; the norm clips, AdamW needs no other rank"),
    "tensor and sequence parallel": (
        "half of every matrix, LayerNorms and some biases whole; two moments of each",
        "an all-reduce becomes two: between the products a rank holds its tokens only",
        "the mirror: a reduce-scatter for each gather, a gather for each reduce-scatter",
        "what all hold got its gradient from each rank's tokens: added up, once a step"),
    "ZeRO-2": (
        "half of every tensor, in fp32, and of its two moments",
        "a block's weights are gathered in 16 bits just before it runs, and stay",
        "a block's gradients are added up, a rank keeps half; its weights are dropped",
        "loss and norm of the whole; the norm clips, AdamW works on its half"),
    "ZeRO-3": (
        "half of every tensor, in fp32, and of its two moments",
        "a block's weights are gathered in 16 bits just before it runs, and dropped just after",
        "so they are gathered again, the next block's ahead of time; the rest is as in ZeRO-2",
        "loss and norm of the whole; the norm clips, AdamW works on its half"),
}
OURS = Path(__file__).parent


@dataclass
class TourConfig:
    tensor_model_parallel_size: int | None = flag(
        None, "tour", "2: the ranks share each layer; 1: the batch; default: one after the other",
        low=1, high=2, type=int, short="--tp")
    sequence_parallel: bool = flag(
        False, "tour", "--tp 2, and between the products a rank holds its own tokens")
    reshard_after_forward: bool = flag(
        False, "tour", "--tp 1, and a block's weights are dropped after forward, too (ZeRO-3)")

    def __post_init__(self):
        for name, tp in (("sequence_parallel", 2), ("reshard_after_forward", 1)):
            if getattr(self, name):
                if self.tensor_model_parallel_size not in (None, tp):
                    raise UsageError(f"--{name.replace('_', '-')}: is of the tour of --tp {tp}; "
                                     "leave out the other's flags")
                self.tensor_model_parallel_size = tp


class Guide(Watch):
    """Watch, and prints on rank 0: collectives, beneath the line that asks, and what is held."""

    def __init__(self, config: TrainConfig, mesh: Mesh):
        super().__init__({"tp": mesh.tp_group, "dp": mesh.dp_group, "world": mesh.world_group},
                         config.padded_vocab_size // mesh.tp)
        self.mesh, self.asked, self.on_tour = mesh, "", False

    def say(self, line: str) -> None:
        if self.on_tour and self.mesh.rank == 0:
            print(line, flush=True)

    def happens(self, collective: str, group: str, tensor: Tensor) -> None:
        frame = asking(sys._getframe(1))
        path = frame.f_code.co_filename
        where = f"{Path(path).name}:{frame.f_lineno}"
        source = linecache.getline(path, frame.f_lineno).split("  #")[0].strip()
        asked = f"  {where:<24}{source}"
        if asked != self.asked:
            self.say(asked[:100])
        self.asked = asked
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.say(f"      {collective:<16}{group:<8}{str(tuple(tensor.shape)):<16}{dtype:<10}"
                 f"{tensor.nbytes:>12,} bytes")

    def begin(self, part: int, rule: str) -> None:
        self.say(f"\n{PARTS[part]}: {GUIDE[rule][part]}")
        self.asked, self.peak = "", self.held

    def end(self, part: int) -> None:
        """What both ranks hold now, and the most since the part began."""
        if not self.on_tour:
            return
        kinds = {kind.split()[0]: size for kind, size in self.held_by_kind().items()}
        mine = kinds | {"in all": self.held, "at peak": self.peak}
        self.mesh.store.set(f"{part}/{self.mesh.rank}", json.dumps(mine))
        self.say("  bytes held" + "".join(f"{name:>{_width(name)}}" for name in mine))
        for rank in range(self.mesh.world if self.mesh.rank == 0 else 0):
            held = json.loads(self.mesh.store.get(f"{part}/{rank}"))
            self.say(f"      rank {rank}" + "".join(f"{size:{_width(name)},}"
                                                    for name, size in held.items()))


def _width(name: str) -> int:
    return max(10, len(name) + 2)


def asking(frame: FrameType) -> FrameType:
    """The innermost frame of ours around `frame`.  Forward, f and g of tensor_parallel.py stand
    for those who call them; in backward nobody else is there."""
    while True:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.name == "tensor_parallel.py":
            found = name == "backward"
        else:
            found = path.parent == OURS and path.name not in ("watch.py", "tour.py")
        if found or path == OURS.parent / "train.py":
            return frame
        frame = frame.f_back


def rank(number: int, config: TrainConfig, rule: str, folder: str,
         forward_backward: Callable) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)                # first: a forked OpenMP pool can hang
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)           # `| head` has read enough
    os.environ.update(RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number))
    mesh = init_mesh(config.tensor_model_parallel_size, torch.device("cpu"), 60,
                     f"file://{folder}/store")
    with Guide(config, mesh) as guide:
        step(config, mesh, guide, rule, forward_backward)
    dist.destroy_process_group()


def step(config: TrainConfig, mesh: Mesh, guide: Guide, rule: str,
         forward_backward: Callable) -> None:
    """Two steps, as in train.py; the second is the tour."""
    model, compute, shards, table = zero.build(config, mesh)
    guide.claim(shards, "weights")
    optimizer = adamw(shards, config)
    zero.fill(model, table, mesh, lambda name, shape: initial_weight(name, shape, config))
    size = config.global_batch_size
    ids = np.random.default_rng(0).integers(config.vocab_size, size=(size, config.seq_length + 1))

    def turn(*_) -> None:                   # from forward to backward
        guide.end(1)
        guide.begin(2, rule)

    compute.register_forward_hook(turn)
    for guide.on_tour in (False, True):
        guide.begin(0, rule)
        guide.end(0)
        guide.begin(1, rule)
        sums = forward_backward(model, compute, Windows(ids, 0, 0), np.arange(size),
                                config.micro_batch_size, 1 / config.seq_length, config, mesh)
        gradients = {name: zero.local(weight.grad) for name, weight in model.named_parameters()}
        guide.claim(gradients, "gradients")
        guide.end(2)
        guide.begin(3, rule)
        sums = torch.cat([sums, sums.new_zeros(1)])             # nobody is told to stop
        _, tokens, _ = (all_reduce_sum(sums, mesh.world_group) / mesh.tp).tolist()
        if config.sequence_parallel:
            sum_over_tp(gradients, table, mesh)
        unscale = mesh.dp * config.seq_length / tokens
        optimizer_step(optimizer, shards, gradients, table, mesh, unscale, config.clip_grad)
        guide.claim([list(state.values()) for state in optimizer.state.values()], "optimizer")
        model.zero_grad()
        del gradients, sums
        guide.end(3)


def small_config(tp: int, **flags) -> TrainConfig:
    """Of 2 ranks, with one micro-batch of 2 samples on each data rank."""
    return TrainConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=16, vocab_size=320,
        micro_batch_size=2, global_batch_size=4 // tp, tensor_model_parallel_size=tp,
        precision="fp32" if tp == 2 else "bf16", **flags)


def tour(rule: str, config: TrainConfig, forward_backward: Callable) -> None:
    tp = config.tensor_model_parallel_size
    print(f"{rule.upper()}: two ranks share {'each layer' if tp == 2 else 'the batch'} (dp "
          f"{2 // tp} x tp {tp})\n{config.num_layers} blocks and the top-query block, hidden size "
          f"{config.hidden_size}, {config.micro_batch_size} samples of {config.seq_length} tokens "
          f"on a data rank, {config.precision}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(rank, (config, rule, folder, forward_backward), 2, start_method="fork")
        except ProcessExitedException as ended:
            if ended.signal_name == "SIGPIPE":
                raise BrokenPipeError from None
            raise


def main(argv: list[str]) -> None:
    config = parse(TourConfig, argv, __doc__)
    try:
        from train import forward_backward  # the program: no module of the package imports it above
    except ModuleNotFoundError:
        raise UsageError("train.py: not found; start the tour in the directory that it is in"
                         ) from None
    tp = config.tensor_model_parallel_size
    if tp != 1:
        rule = "tensor and sequence parallel" if config.sequence_parallel else "tensor parallel"
        tour(rule, small_config(2, sequence_parallel=config.sequence_parallel), forward_backward)
    if tp is None:
        print()
    if tp != 2:
        rule = "ZeRO-3" if config.reshard_after_forward else "ZeRO-2"
        tour(rule, small_config(1, reshard_after_forward=config.reshard_after_forward),
             forward_backward)


if __name__ == "__main__":
    launch(main)
