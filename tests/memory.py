"""Where a step's memory goes: `python -m tests.memory` prints, in MB, what is held at the peak of
one window's forwards and backwards, for each kind of recomputation, and for one micro-batch of 8
samples against 8 of one.  torch's MemTracker counts every tensor; AdamW's moments come on top."""

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from nanogeex import zero
from nanogeex.config import TrainConfig
from nanogeex.mesh import Mesh
from tests.ranks import batch, build, on_ranks


def peak(mesh: Mesh, recompute: str, micro_batch_size: int, number: int) -> dict[str, float]:
    """MB of each kind of tensor when most is held."""
    config = TrainConfig(num_layers=6, hidden_size=256, seq_length=256, recompute=recompute,
                         precision="fp32")
    model, compute, _, _ = build(config, mesh)
    ids, targets = batch(config, micro_batch_size)
    weights = torch.ones(ids.shape)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        for i in range(number):
            tracker.reset_mod_stats()
            zero.micro_batch(model, compute, first=i == 0, last=i == number - 1)
            compute(ids, targets, weights).backward()
    held = {str(kind): size / 1e6 for kind, size in
            tracker.get_tracker_snapshot("peak")[mesh.device].items()}
    kinds = {"weights": ("PARAM",), "gradients": ("GRAD",), "activations": ("ACT", "TEMP"),
             "in all": ("Total",)}
    return {name: sum(size for kind, size in held.items() if kind.endswith(parts))
            for name, parts in kinds.items()}


def main() -> None:
    cases = [(f"recompute {kind}", 1, kind, 8, 1) for kind in ("none", "selective", "full")]
    cases += [(f"dp {dp}, {8 // number} x {number}", dp, "full", 8 // number, number)
              for dp in (1, 2) for number in (1, 8)]
    print(f"{'peak, MB':<20}{'weights':>12}{'gradients':>12}{'activations':>12}{'in all':>12}")
    for name, dp, *case in cases:
        held = on_ranks(dp, 1, peak, *case)[0] if dp > 1 else peak(Mesh(), *case)
        print(f"{name:<20}" + "".join(f"{size:12.1f}" for size in held.values()))


if __name__ == "__main__":
    main()
