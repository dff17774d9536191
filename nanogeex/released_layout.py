"""Weights as CodeGeeX was released: what the tensors are called, and where they lie.

      {"module": {"language_model": {                                one file, or N parts of it:
          "embedding": {"word_embeddings":     {"weight"},           rows cut N ways
                        "position_embeddings": {"weight"}},          repeated in each part
          "topQueryEmbedding": {"top_query_embeddings": {"weight"}}, rows
          "transformer": {"layers.0.attention.query.weight", ...,    as the model's TP_DIM says
                          "topQueryLayer. ...", "final_layernorm. ..."}}}}

Parts are `mp_rank_00_model_states.pt` ...; how each tensor is cut is the model's own split table.
Files in the wild differ: no `module` level, dotted keys, fused query_key_value, an optimizer beside
the weights.  `read_part` brings all of them to one form: a dictionary from the model's names to
tensors in mapped memory, of which nothing has been read yet.

A pickle can call any function.  `weights_only` calls none but torch's own; here the classes of what
lies beside the weights are told to it as empty stand-ins, so that nothing of theirs runs either.

Tests: tests/test_released_layout.py.
"""

import re
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from nanogeex.config import UsageError

PART = "mp_rank_{:02d}_model_states.pt"
RELEASED = {                        # how our names begin, and theirs, in the order of the file
    "word_embeddings": "embedding.word_embeddings",
    "position_embeddings": "embedding.position_embeddings",
    "top_query_embeddings": "topQueryEmbedding.top_query_embeddings",
    "layers": "transformer.layers",
    "top_query_layer": "transformer.topQueryLayer",
    "final_layernorm": "transformer.final_layernorm",
}
FUSED = {".query_key_value.": ("query", "key", "value"), ".key_value.": ("key", "value")}
# Of Python's own modules, only what holds settings: its functions are what hostile pickles call.
PLAIN = {"argparse.Namespace", "types.SimpleNamespace", "pathlib.PosixPath", "pathlib.Path",
         "builtins.list", "builtins.dict", "builtins.set", "builtins.int", "builtins.float",
         "collections.defaultdict"}


def released_name(name: str) -> str:
    """Our name -> its dotted path below module.language_model."""
    first, rest = name.split(".", 1)
    return f"{RELEASED[first]}.{rest}"


def our_name(path: str) -> str | None:
    """A dotted path of a file -> our name; None for what is no weight of a CodeGeeX."""
    path = re.sub(r"^(module\.)*(language_model\.)?", "", path)
    for ours, theirs in RELEASED.items():
        if path.startswith(theirs + "."):
            return ours + path.removeprefix(theirs)
    return None


def nest(tensors: dict[str, Tensor], parts: int) -> dict:
    """Our names -> the released nesting and order, in which parts have the positions first."""
    order = list(RELEASED)
    if parts > 1:
        order[:2] = order[1::-1]
    language_model: dict = {}
    for name in sorted(tensors, key=lambda name: order.index(name.split(".")[0])):     # stable
        first, rest = released_name(name).split(".", 1)
        inner = language_model.setdefault(first, {})
        if first != "transformer":                          # whose keys stay flat
            module, rest = rest.split(".")
            inner = inner.setdefault(module, {})
        inner[rest] = tensors[name]
    return {"module": {"language_model": language_model}}


def read_part(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """One file's tensors by our names, mapped, and the names of what else is in it."""
    try:
        left: list[str] = []
        tensors = flatten(_unpickle(path), left)
    except Exception as error:              # torch.load raises whatever a bad file causes
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
        reason = re.split(r" ?(In PyTorch 2\.6|Re-running|Please file)", reason)[0]    # bad advice
        raise UsageError(f"{path}: cannot be read safely ({reason}); give a file that torch.save "
                         "has written whole, with nothing but weights and settings") from None
    for name in list(tensors):
        for fused, names in FUSED.items():          # rows: all of q, all of k, all of v
            if fused in name:
                for one, piece in zip(names, tensors.pop(name).chunk(len(names)), strict=False):
                    tensors[name.replace(fused, f".{one}.")] = piece
                break
    return tensors, left


class _Skipped:
    """Stands for every class of another package: takes whatever it is given, and forgets it."""

    def __init__(self, *arguments, **keywords):
        pass

    def __new__(cls, *arguments, **keywords):
        return object.__new__(cls)

    def __setstate__(self, state):
        pass


def _unpickle(path: Path) -> object:
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
    if not zipped:                              # the legacy format: read whole, torch's own only
        return torch.load(path, map_location="cpu", weights_only=True)
    stand_ins = []
    for name in get_unsafe_globals_in_checkpoint(path):
        if name.split(".")[0] in sys.stdlib_module_names and name not in PLAIN:
            raise ValueError(f"it calls {name}, which weights have no use for")
        stand_ins.append((type("Skipped", (_Skipped,), {}), name))
    with safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def flatten(content: object, left: list[str] | None = None) -> dict[str, Tensor]:
    """Weights in whatever nesting, by our names; `left` gets the names of what else is there."""
    tensors: dict[str, Tensor] = {}
    _walk(content, "", tensors, [] if left is None else left)
    return tensors


def _walk(content: object, path: str, tensors: dict[str, Tensor], left: list[str]) -> None:
    """Sort a file's entries into weights and the rest, which is told by its outermost name."""
    if isinstance(content, dict):
        for key, value in content.items():
            _walk(value, f"{path}.{key}" if path else str(key), tensors, left)
        return
    name = our_name(path)
    if isinstance(content, Tensor) and name:
        if name in tensors:
            raise ValueError(f"it holds {released_name(name)} twice")
        tensors[name] = content.detach()
        return
    known = re.match(r"(module|language_model|transformer|embedding|topQueryEmbedding)\b", path)
    entry = path if known else path.split(".")[0]
    if entry not in left:
        left.append(entry)
