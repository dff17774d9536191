"""Run a function on several forked ranks and get its values back."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing
from torch import nn

from nanogeex import zero
from nanogeex.config import ModelConfig, TrainConfig
from nanogeex.mesh import Mesh, init_mesh
from nanogeex.model import CodeGeeX
from nanogeex.parameters import initial_weight


def _child(rank: int, world: int, tp: int, folder: str, work: Callable, args: tuple) -> None:
    torch.set_num_threads(1)                # first: a forked OpenMP pool can hang
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    code = 1
    try:
        mesh = init_mesh(tp, torch.device("cpu"), 60, f"file://{folder}/store")
        torch.save(work(mesh, *args), f"{folder}/{rank}.pt")
        code = 0
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
    os._exit(code)


def on_ranks(world: int, tp: int, work: Callable, *args) -> list:
    """[work(mesh, *args) of rank 0, of rank 1, ...]; raises if one fails or takes two minutes."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        children = [context.Process(target=_child, args=(rank, world, tp, folder, work, args))
                    for rank in range(world)]
        for child in children:
            child.start()
        deadline = time.monotonic() + 120
        while any(child.is_alive() for child in children) and time.monotonic() < deadline:
            if any(child.exitcode for child in children):
                time.sleep(1)               # the others may have something to say, too
                break
            time.sleep(0.01)
        late = [rank for rank, child in enumerate(children) if child.is_alive()]
        for child in children:
            child.kill()
            child.join()
        errors = [f"rank {path.stem}:\n{path.read_text()}"
                  for path in sorted(Path(folder).glob("*.error"))]
        assert not errors, "\n".join(errors)
        assert not late, f"ranks {late} hang"
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]


def small_config(**changes) -> TrainConfig:
    """Large enough that tp 8 and dp 4 cut it, small enough for a test."""
    return TrainConfig(**dict(
        num_layers=2, hidden_size=32, num_attention_heads=8, seq_length=16, vocab_size=320,
        make_vocab_size_divisible_by=64, precision="fp32") | changes)


def build(config: TrainConfig, mesh: Mesh) -> tuple[CodeGeeX, nn.Module, dict, dict]:
    """model, the module that computes, this rank's pieces, the split table."""
    built = model, _, _, table = zero.build(config, mesh)
    zero.fill(model, table, mesh, lambda name, shape: random_weight(name, shape, config))
    return built


def random_weight(name: str, shape: tuple[int, ...], config: TrainConfig) -> torch.Tensor:
    """The initial weight with noise on it: zero biases would hide a bias that is added twice."""
    noise = torch.Generator().manual_seed(len(name) + sum(shape))
    return initial_weight(name, shape, config) + 0.1 * torch.randn(shape, generator=noise)


def batch(config: ModelConfig, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, config.vocab_size, (count, config.seq_length + 1),
                        generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]
