"""The rules of the house, read off the source: flags are used, modules short, imports one way."""

import ast
import re
import sys
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from nanogeex.config import TrainConfig
from nanogeex.figures import ReportConfig
from nanogeex.infer_config import InferConfig
from nanogeex.plan import Accelerator
from nanogeex.tour import TourConfig
from shard import ShardConfig
from tests.programs import ROOT

FILES = {path.stem: path for path in [*ROOT.glob("nanogeex/*.py"), *ROOT.glob("*.py")]}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
PROGRAMS = {"train", "infer", "shard"}


def imported(name: str) -> set[str]:
    """Dotted names of all that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# module -> modules of the package, and programs, that it imports.
OURS = {name: {part for path in imported(name) for part in path.split(".")[:2]
               if part in FILES and path.split(".")[0] in ("nanogeex", *PROGRAMS)}
        for name in FILES}


def reached(name: str) -> set[str]:
    """What a module imports, and what that imports, and so on."""
    return OURS[name].union(*map(reached, OURS[name]))


def reads(tree: ast.AST) -> set[str]:
    """`name` of each `config.name` that is read, and of a config's own `self.name`; a __post_init__
    checks, and does not count."""
    if isinstance(tree, ast.FunctionDef) and tree.name == "__post_init__":
        return set()
    own = {tree.attr} if isinstance(tree, ast.Attribute) and isinstance(
        tree.value, ast.Name) and tree.value.id in ("config", "self", "options") else set()
    return own.union(*map(reads, ast.iter_child_nodes(tree)))


WITHOUT_READER = {
    "checkpoint_activations",                           # becomes recompute in __post_init__
    "use_cpu_initialization",                           # accepted, without effect, says its help
    *Accelerator.__dataclass_fields__}                  # plan.accelerator goes through them


@pytest.mark.parametrize("config", [TrainConfig, InferConfig, ShardConfig, TourConfig,
                                    ReportConfig])
def test_every_flag_is_read(config):
    kinds = {kind.__name__ for kind in config.__mro__[:-1]}
    read = set().union(*(reads(TREES[name]) for name, path in FILES.items()
                         if kinds & set(re.findall(r"\w+", path.read_text()))))
    assert {field.name for field in fields(config)} - read - WITHOUT_READER == set()


def test_modules_are_short():
    assert {name: lines for name, path in FILES.items()
            if (lines := len(path.read_text().splitlines())) > 270} == {}


def test_imports_run_one_way():
    list(TopologicalSorter(OURS).static_order())                # raises CycleError
    assert {name for name in FILES if OURS[name] & PROGRAMS} == {"tour"}      # goes through train


MODEL = {"config", "mesh", "tensor_parallel", "vocab_parallel", "layernorm", "attention", "mlp"}


@pytest.mark.parametrize("name, below", [
    ("config", set()), ("mesh", {"config"}), ("tensor_parallel", {"config", "mesh"}),
    ("vocab_parallel", {"config", "mesh", "tensor_parallel"}), ("layernorm", set()),
    ("attention", {"config", "mesh", "tensor_parallel"}),
    ("mlp", {"config", "mesh", "tensor_parallel"}), ("model", MODEL),
    ("parameters", MODEL | {"model"}), ("zero", MODEL | {"model", "parameters"}),
    ("optim", MODEL | {"model", "parameters"}), ("samples", {"config"}), ("corpus", {"config"}),
    ("codegeex_tokenizer", {"config"}), ("tokenizer", {"config", "codegeex_tokenizer"}),
    ("data", {"config", "codegeex_tokenizer", "corpus", "mesh", "tokenizer"}), ("lookup", set()),
    ("watch", set())])
def test_a_module_knows_only_what_is_below_it(name, below):
    assert reached(name) <= below


def test_few_packages_are_needed():
    usual = sys.stdlib_module_names | {"nanogeex", "torch", "numpy", "sentencepiece", "tqdm"}
    others = {(name, path.split(".")[0]) for name in FILES for path in imported(name)}
    assert {(name, package) for name, package in others if package not in usual} == {
        ("figures", "matplotlib"), ("tour", "train")}
    assert {name for name in FILES if any("tensorboard" in path for path in imported(name))} == {
        "report"}


@pytest.mark.parametrize("name", sorted(FILES.keys() - PROGRAMS - {"__init__"}))
def test_a_module_names_its_tests(name):
    last = ast.get_docstring(TREES[name]).splitlines()[-1]
    assert re.fullmatch(r"Tests: tests/\w+\.py(, tests/\w+\.py)*\.(  Measured: .*)?", last)
    assert all(Path(ROOT, path).is_file() for path in re.findall(r"\w+/\w+\.py", last))
