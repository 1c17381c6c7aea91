"""Print the test files below the given folders that import torch neither themselves nor through a helper beside them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def needs_torch(path: Path) -> bool:
    """Whether a file, or a module beside it that it imports, imports torch."""
    names = imported(path)
    helpers = [path.with_name(f"{name}.py") for name in names if path.stem != name]
    return "torch" in names or any(needs_torch(helper) for helper in helpers if helper.exists())


for folder in map(Path, sys.argv[1:]):
    for test in sorted(folder.rglob("test_*.py")):
        if not needs_torch(test):
            print(test)
