"""ZeRO-2 (arXiv:1910.02054): what `dp` ranks need not hold dp times.

Adam in mixed precision holds 16 bytes a parameter: 2 for the weight, 2 for its gradient, 12 for its
fp32 master, the copy that AdamW updates, and two moments.  ZeRO's stage 1 shards these 12 over the
data ranks, stage 2 the gradients too, stage 3 the weights too.  Stage 2 is FSDP2's
`fully_shard(reshard_after_forward=False)`, FSDP1's SHARD_GRAD_OP, and leaves on each rank

      at rest       1/dp of the fp32 masters and moments
      forward       + the weights, in --precision, gathered block by block and kept
      backward      + one block's gradients, at once reduced to this rank's fp32 1/dp;
                    of the last micro-batch: a block's weights go when its gradients are there

A step of several micro-batches gathers the weights once and reduces the gradients after each, so
that they stay sharded:

      [ gather | forward backward reduce | forward backward reduce, drop ]  norm, clip, AdamW

The traffic does not shrink with dp: of each parameter of the tp slice 2 bytes of weight are
gathered, once a step, and 4 of gradient, in fp32, reduced, each micro-batch.  In a step of the
paper's world, tp 8 x dp 192, one micro-batch of 16 samples, that is 3.2 and 6.5 GiB, of which
FSDP2's padding of rows to a multiple of dp is 7%, beside 63 GiB over tp (tensor_parallel.py).

dp = 1 has nothing to shard and is not wrapped.  There, in 16 bits, a copy of the model computes and
its gradients are added to the masters': the same arithmetic.

`reshard_after_forward` makes it stage 3: a block drops its weights after each forward and each
backward and gathers them again for the next, so that a rank holds a block or two at a time, for
two gathers a micro-batch instead of one a step.

Tests: tests/test_train_step.py.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nanogeex.config import DTYPES, TrainConfig, UsageError
from nanogeex.mesh import Mesh
from nanogeex.model import CodeGeeX, Options
from nanogeex.parameters import Split, piece, split_table


def build(config: TrainConfig, mesh: Mesh
          ) -> tuple[CodeGeeX, nn.Module, dict[str, Tensor], dict[str, Split]]:
    """The model, built without memory and then cut over tp and dp, not yet filled: `model` with the
    fp32 masters, the module that computes, this rank's pieces of the masters, and how each is cut
    over tp."""
    with torch.device("meta"):
        model = CodeGeeX(config, mesh, Options.of(config))
    table = split_table(model)
    compute = shard(model, mesh, DTYPES[config.precision], DTYPES[config.grad_reduce_dtype],
                    config.reshard_after_forward)
    if config.compile:
        for block in [*compute.layers, compute.top_query_layer]:
            # FSDP2's hooks stay outside; the dropout masks are those of a block not compiled
            block.block = torch.compile(block.block, options={"fallback_random": True})
    shards = {name: local(weight.detach()) for name, weight in model.named_parameters()}
    return model, compute, shards, table


def check_compiler() -> None:
    """Raises UsageError where torch.compile would find none, in the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # a second, only for --compile
    try:
        get_cpp_compiler()
    except RuntimeError:
        raise UsageError("--compile: finds no C++ compiler; install g++, or leave it out") from None


def shard(model: CodeGeeX, mesh: Mesh, dtype: torch.dtype,
          reduce_dtype: torch.dtype = torch.float32,
          reshard_after_forward: bool = False) -> nn.Module:
    """Cut `model`, built on the meta device, over dp and give it memory, not yet filled.  Returns
    the module that computes, in `dtype`; `model` keeps the fp32 masters."""
    if mesh.dp > 1:
        policy = MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)
        for module in [*model.layers, model.top_query_layer, model]:    # a collective each
            fully_shard(module, mesh=mesh.dp_mesh, mp_policy=policy,      # the head, in `model`, is
                        reshard_after_forward=reshard_after_forward and module is not model)  # last
    model.to_empty(device=mesh.device)
    if mesh.dp > 1 or dtype == torch.float32:
        return model
    compute = deepcopy(model, memo={id(mesh): mesh})
    for master, weight in zip(model.parameters(), compute.parameters(), strict=True):
        weight.data = weight.data.to(dtype)
        weight.register_post_accumulate_grad_hook(partial(_add_to_master, master))
    return compute


@torch.no_grad()
def fill(model: CodeGeeX, table: dict[str, Split], mesh: Mesh,
         source: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Every parameter's piece from `source(name, whole shape)`, which gives whole tensors."""
    for name, parameter in model.named_parameters():
        local(parameter).copy_(piece(source(name, table[name].shape), table[name].dim, mesh))


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of what FSDP2 shows as a DTensor: a plain tensor over the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _add_to_master(master: Tensor, weight: Tensor) -> None:
    gradient, weight.grad = weight.grad.float(), None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


def micro_batch(model: nn.Module, compute: nn.Module, first: bool, last: bool,
                reshard_after_forward: bool = False) -> None:
    """Before each forward of a step: the first gathers weights, the last backward drops them."""
    if isinstance(compute, FSDPModule):
        compute.set_reshard_after_backward(last or reshard_after_forward)
        compute.set_is_last_backward(last)
    elif first:
        refresh(model, compute)


@torch.no_grad()
def refresh(model: nn.Module, compute: nn.Module) -> None:
    """dp = 1: round the masters into the copy that computes."""
    if compute is not model:
        torch._foreach_copy_(list(compute.parameters()), list(model.parameters()))


def release(compute: nn.Module) -> None:
    """After forwards without a backward: drop the gathered weights, which would stay."""
    for module in compute.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
