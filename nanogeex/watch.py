"""What a rank holds, sends and computes: every tensor operation passes by here and is counted.

torch lets a TorchDispatchMode see each operation below autograd, FSDP2's and the optimizer's too.
Watch keeps a book of storages: entered when an operation returns a new one, struck out when the
last tensor on it dies.  What they are for shows in who touches them: what FSDP2 gathers are
weights, what it reduces are gradients, what nobody claims are activations and passing results.

It works on real tensors, and on fake ones, which have shapes but no memory.

Tests: tests/test_plan.py, tests/test_tour.py.
"""

import weakref
from collections import Counter
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

COLLECTIVES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather",
               "_reduce_scatter_base_": "reduce-scatter", "broadcast_": "broadcast"}
KINDS = ("weights", "gathered weights", "gradients", "optimizer", "activations", "logits")


@dataclass
class Held:
    """A storage that is alive."""

    bytes: int
    kind: str
    death: weakref.ref | None = None


class Watch(TorchDispatchMode):
    """Use it as a context.  `groups`: names of process groups, to be told apart in `calls` and
    `sent`, whose keys are (collective, group, dtype); bytes are those of the whole tensor."""

    def __init__(self, groups: dict[str, dist.ProcessGroup | None], vocabulary: int):
        super().__init__()
        self.names = {group.group_name: name for name, group in groups.items() if group is not None}
        self.vocabulary = vocabulary                    # width of the logits on this rank
        self.book: dict[int, Held] = {}
        self.held, self.peak, self.at_peak = 0, 0, []
        self.calls, self.sent, self.flops = Counter(), Counter(), 0

    def __enter__(self):
        """Also sees FSDP2 drop weights: it empties their storages, which is no operation."""
        self.resize = torch.UntypedStorage.resize_
        original = self.resize

        def resize(storage, size):
            original(storage, size)
            if storage._cdata in self.book:
                self._set(self.book[storage._cdata], size)
            return storage

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented                       # its local tensors come by in turn
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and type(args[0]) is not Tensor:
            return 1 if not args[0].is_floating_point() else 1.0    # a fake tensor has no value
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._enter(tensor)
        if func.namespace == "c10d":
            self._collective(func, args)
        elif func.namespace == "fsdp":
            reduces = func is torch.ops.fsdp.chunk_cat.default
            self.claim((args, kwargs, out), "gradients" if reduces else "gathered weights")
        elif func is SDPA.default:
            self.flops += 4 * prod(args[0].shape) * args[1].shape[2]        # q k^T, and times v
        elif func is SDPA_BACKWARD.default:
            self.flops += 10 * prod(args[1].shape) * args[2].shape[2]       # q k^T again, and 4
        elif func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        return out

    def claim(self, tensors, kind: str) -> None:
        """What was not known to be more than an activation is of this kind, and was all along."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                held = self._enter(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
                if held.kind == "activations":
                    held.kind = kind

    def _enter(self, tensor: Tensor) -> Held:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.book:
            logits = tensor.dim() == 2 and tensor.shape[1] == self.vocabulary
            held = self.book[key] = Held(0, "logits" if logits else "activations")
            held.death = weakref.ref(storage, lambda _: self._set(self.book.pop(key), 0))
            self._set(held, storage.nbytes())
        return self.book[key]

    def _set(self, held: Held, size: int) -> None:
        self.held += size - held.bytes
        held.bytes = size
        if self.held > self.peak:
            self.peak, self.at_peak = self.held, [(h, h.bytes) for h in self.book.values()]

    def _collective(self, func, args) -> None:
        name = func._schema.name.split("::")[1]
        if name not in COLLECTIVES:
            return
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = self.names[dist.ProcessGroup.unbox(group).group_name]
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        largest = max(tensors, key=lambda tensor: tensor.nbytes)
        key = (COLLECTIVES[name], group, str(largest.dtype).removeprefix("torch."))
        self.calls[key] += 1
        self.sent[key] += largest.nbytes
        self.happens(COLLECTIVES[name], group, largest)
        if group == "dp" and name != "allreduce_":
            self.claim(tensors, "gradients" if "reduce" in name else "gathered weights")

    def happens(self, collective: str, group: str, tensor: Tensor) -> None:
        """Now: nothing here; the tour prints it."""

    def reset(self) -> None:
        """Begin to count anew; what is held stays in the book."""
        self.peak, self.at_peak = 0, []
        self.calls, self.sent, self.flops = Counter(), Counter(), 0

    def peak_by_kind(self) -> Counter:
        return _by_kind(self.at_peak)

    def held_by_kind(self) -> Counter:
        return _by_kind([(held, held.bytes) for held in self.book.values()])


def _by_kind(storages: list[tuple[Held, int]]) -> Counter:
    return Counter({kind: sum(size for held, size in storages if held.kind == kind)
                    for kind in KINDS})


SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
SDPA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
