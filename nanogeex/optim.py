"""The optimizer step: what all ranks must agree on comes from one number.

A rank holds pieces of the gradient.  The square of the whole gradient's norm is

      all-reduce over the world of  ( sum of squares of its tp-split pieces
                                      + sum of squares of its tp-repeated pieces / tp )

and it decides the step: its root is logged, it clips, and it is not finite exactly when some rank
overflowed somewhere (`found_inf` elsewhere); then, as after a loss that is not finite, every rank
skips the step and, in fp16, counts an overflow, together: one that stepped alone would from then on
hold a piece of another model.  torch's clip_grad_norm_ and GradScaler see the dp ranks only: tp
ranks would clip and skip apart.

Tests: tests/test_optim.py, tests/test_train_step.py.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nanogeex.config import TrainConfig
from nanogeex.mesh import Mesh
from nanogeex.parameters import Split


def lr_at(step: int, config: TrainConfig) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up, cosine, min_lr from lr_decay_iters on."""
    if step < config.lr_warmup_iters:
        return config.lr * (step + 1) / config.lr_warmup_iters
    if step >= config.lr_decay_iters:
        return config.min_lr
    done = (step - config.lr_warmup_iters) / (config.lr_decay_iters - config.lr_warmup_iters)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class LossScaler:
    """Keeps fp16 gradients in range (arXiv:1710.03740), by DeepSpeed's rule: the `hysteresis`-th
    overflow halves the scale, and so does each that follows; `window` steps without one double it,
    and the count begins anew."""

    scale: float
    minimum: float
    window: int
    hysteresis: int
    good_steps: int = 0
    overflows: int = 0

    @property
    def exhausted(self) -> bool:
        """One more overflow could not lower the scale."""
        return self.scale <= self.minimum and self.overflows + 1 >= self.hysteresis

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; the rest are flags."""
        return {name: getattr(self, name) for name in ("scale", "good_steps", "overflows")}

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good_steps, self.overflows = 0, self.overflows + 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps % self.window == 0:
            self.scale, self.overflows = self.scale * 2, 0


def loss_scaler(config: TrainConfig) -> LossScaler | None:
    """None where none is needed: fp32 and bf16 have the range."""
    if config.precision != "fp16":
        return None
    return LossScaler(config.initial_loss_scale, config.min_loss_scale, config.loss_scale_window,
                      config.hysteresis)


def adamw(shards: dict[str, Tensor], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over this rank's fp32 pieces; no weight decay on biases and LayerNorms.

    Key biases stay as they are.  They shift all scores of a query alike, and softmax does not see
    that: their gradient is zero but for rounding, which Adam would divide by its own size and turn
    into full steps, different ones at every topology."""
    trained = [name for name in shards if not name.endswith("attention.key.bias")]
    plain = [name for name in trained if name.endswith("bias") or "layernorm" in name]
    decayed = [name for name in trained if name not in plain]
    groups = [{"params": [shards[name] for name in names], "weight_decay": decay}
              for names, decay in ((decayed, config.weight_decay), (plain, 0.0))]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2),
                             eps=config.adam_eps, fused=True)


@torch.no_grad()
def sum_over_tp(gradients: dict[str, Tensor], table: dict[str, Split], mesh: Mesh) -> None:
    """Sequence parallelism: a tp rank's gradient of what all of them hold comes from its tokens
    only.  Adds these up, in place, by one all-reduce a step."""
    if mesh.tp == 1:
        return
    partial = [gradient for name, gradient in gradients.items() if table[name].dim is None]
    flat = torch.cat([gradient.flatten() for gradient in partial])
    dist.all_reduce(flat, group=mesh.tp_group)
    totals = flat.split([gradient.numel() for gradient in partial])
    for gradient, total in zip(partial, totals, strict=True):
        gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def gradient_norm(gradients: dict[str, Tensor], table: dict[str, Split], mesh: Mesh) -> float:
    """Norm of the whole gradient from every rank's pieces of it; the same number on all ranks."""
    norms = torch.stack(torch._foreach_norm(list(gradients.values()))).double()     # one a piece
    copies = [mesh.tp if table[name].dim is None else 1 for name in gradients]
    squared = (norms.square() / torch.tensor(copies, device=norms.device)).sum()
    if mesh.world > 1:
        dist.all_reduce(squared)                                                    # dp and tp
    return squared.sqrt().item()


@torch.no_grad()
def first_not_finite(gradients: dict[str, Tensor], mesh: Mesh) -> str | None:
    """Name of the first parameter whose gradient is not finite on some rank; alike on all ranks."""
    bad = torch.stack([~gradient.isfinite().all() for gradient in gradients.values()]).int()
    if mesh.world > 1:
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    found = [name for name, is_bad in zip(gradients, bad.tolist(), strict=True) if is_bad]
    return found[0] if found else None


@torch.no_grad()
def optimizer_step(optimizer: torch.optim.Optimizer, shards: dict[str, Tensor],
                   gradients: dict[str, Tensor], table: dict[str, Split], mesh: Mesh,
                   unscale: float, clip: float, loss: float = 0.0) -> tuple[float, bool]:
    """Clip and step, or skip if the norm or the loss is not finite.  `gradients` times `unscale` is
    the true one.  Returns its norm before clipping, and whether the step was taken: alike on all
    ranks."""
    norm = gradient_norm(gradients, table, mesh) * unscale
    taken = math.isfinite(norm) and math.isfinite(loss)
    if taken:
        factor = unscale * min(1.0, clip / (norm + 1e-6)) if clip > 0 else unscale
        torch._foreach_mul_(list(gradients.values()), factor)
        for name, tensor in shards.items():
            tensor.grad = gradients[name]
        optimizer.step()
        for tensor in shards.values():
            tensor.grad = None
    return norm, taken
