"""Nothing that arrives is ever run: no module of refitd can unpickle, and none evaluates text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import refitd

ROOT = Path(refitd.__file__).parent
MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle",
    "yaml", "multiprocessing", "xmlrpc", "code",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "torch.load", "torch.jit.load", "torch.package", "torch.multiprocessing", "torch.save", "np.load", "numpy.load",
    "object_list", "broadcast_object_list", "all_gather_object", "gather_object",
    "scatter_object_list", "recv_object_list", "send_object_list", "allow_pickle",
}  # fmt: skip


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain; what is not a plain name ends it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def forbidden(source: str) -> Iterator[str]:
    """What a module does that could run what it was sent."""
    for node in ast.walk(ast.parse(source)):
        for name in imported(node):
            if any(name == module or name.startswith(module + ".") for module in MODULES | ATTRIBUTES):
                yield f"{node.lineno}: imports {name}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield f"{node.lineno}: calls {node.func.id}"
        if isinstance(node, ast.Attribute) and (dotted(node) in ATTRIBUTES or node.attr in ATTRIBUTES):
            yield f"{node.lineno}: uses {dotted(node)}"
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            yield f"{node.value.lineno}: passes {node.arg}"


# Benchmarks whose own children answer over pipes that no other process has; no daemon, mover or hook imports them.
_PIPES = {
    "imports multiprocessing",
    "imports multiprocessing.connection",
    "imports multiprocessing.connection.Connection",
}
EXCEPTIONS = {"bench/pull.py": _PIPES, "bench/fixed_cold.py": _PIPES}
FILES = sorted(path for path in ROOT.rglob("*.py"))


def test_all_modules_are_looked_at() -> None:
    """The search has not silently come to look at nothing."""
    assert len(FILES) > 150
    assert {"daemon", "hook", "mover", "store", "epoch"} <= {path.relative_to(ROOT).parts[0] for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    """No pickle in any of its clothes, no torch.load, no eval, no objects over torch.distributed."""
    allowed = EXCEPTIONS.get(str(path.relative_to(ROOT)), set())
    assert [found for found in forbidden(path.read_text()) if found.partition(": ")[2] not in allowed] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["1: imports pickle"]),
        ("from dill import loads", ["1: imports dill", "1: imports dill.loads"]),
        ("def f(x):\n    import marshal", ["2: imports marshal"]),
        ("import torch\ntorch.load('x')", ["2: uses torch.load"]),
        ("from torch import load", ["1: imports torch.load"]),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", ["2: uses np.load", "2: passes allow_pickle"]),
        ("eval('1')", ["1: calls eval"]),
        ("exec(text)", ["1: calls exec"]),
        ("dist.broadcast_object_list(x)", ["1: uses dist.broadcast_object_list"]),
        ("from multiprocessing.connection import Client",
         ["1: imports multiprocessing.connection", "1: imports multiprocessing.connection.Client"]),
        ("model.eval()\nre.compile('x')\njson.loads(text)", []),
    ],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(source: str, found: list[str]) -> None:
    """And lets alone what only looks alike."""
    assert sorted(forbidden(source)) == sorted(found)
