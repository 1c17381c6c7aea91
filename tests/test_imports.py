"""What importing refitd costs: an engine has numpy and torch and must not need anything else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = ["grpc", "google.protobuf", "etcd3", "prometheus_client", "structlog"]
CLIENT = """
import json, sys, importlib.util
import refitd, refitd.hook.trainer, refitd.hook.engine
loaded = sorted(name for name in {forbidden} if name in sys.modules)
torch_loaded = "torch" in sys.modules
def missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True
absent = sorted(name for name in {forbidden} if missing(name))
import torch
layout = refitd.Layout.from_tensors({{"w": torch.zeros(3)}})
with refitd.connect_trainer("job", "run", 0, 1, socket={socket!r}) as trainer:
    trainer.register(layout)
    offer = trainer.publish(1, {{"w": torch.zeros(3)}})
    outcome = offer.released(timeout=5)
    report = offer.committed(timeout=5)
with refitd.connect_engine("job", "r0", 0, 1, socket={socket!r}) as engine:
    engine.register(layout)
    pending = engine.pending()
print(json.dumps({{"loaded": loaded, "torch": torch_loaded, "absent": absent, "outcome": outcome, "pending": pending,
    "closed": report.closed, "refitd": refitd.__file__, "numpy": bool(sys.modules.get("numpy"))}}))
"""


def distributions(*roots: str) -> set[str]:
    """The installed distributions that the given ones need, with these, by normalised name."""
    found, todo = set(), list(roots)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or an extra
        found.add(name)
        todo += [re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0] for need in needs if "extra ==" not in need]
    return found


def top_level(distribution: str) -> Iterator[Path]:
    """Files and folders of a distribution directly below its site-packages."""
    dist = importlib.metadata.distribution(distribution)
    site = Path(str(dist.locate_file("")))
    names = {file.parts[0] for file in dist.files or [] if file.parts[0] not in ("..", "__pycache__")}
    yield from (site / name for name in sorted(names) if (site / name).exists())


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment that sees numpy, torch and what these need, and has refitd without dependencies."""
    folder = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for distribution in distributions("numpy", "torch"):
        for path in top_level(distribution):
            link = site / path.name
            if not link.exists():
                link.symlink_to(path)
            elif link.is_dir() and path.is_dir():  # one namespace of several distributions
                merge(link, path)
    command = [
        sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index",
        "--no-build-isolation", "--target", str(site), str(source_copy(tmp_path_factory.mktemp("source"))),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=100)
    return folder / "bin" / "python"


def merge(link: Path, more: Path) -> None:
    if link.is_symlink():
        first = link.resolve()
        if first == more.resolve():
            return
        link.unlink()
        link.mkdir()
        merge(link, first)
    for path in more.iterdir():
        if not (link / path.name).exists():
            (link / path.name).symlink_to(path)


def source_copy(folder: Path) -> Path:
    """The project's files, so that the build leaves nothing in the working tree."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "refitd"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(python: Path, program: str) -> dict[str, object]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "REFITD"))}
    done = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, timeout=100, env=environ, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_the_hook_works_beside_torch_alone(bare_python: Path, tmp_path: Path) -> None:
    """With numpy, torch and refitd --no-deps: nothing forbidden can be imported, and publish works without a daemon."""
    socket = str(tmp_path / "none.sock")
    found = run(bare_python, CLIENT.format(forbidden=FORBIDDEN, socket=socket))
    assert found["absent"] == sorted(FORBIDDEN)
    assert found["loaded"] == []
    assert found["torch"] is False
    assert (found["outcome"], found["closed"], found["pending"]) == ("SKIPPED", "no daemon", None)
    assert str(found["refitd"]).startswith(str(bare_python.parents[1]))


def test_importing_refitd_loads_nothing_heavy() -> None:
    """In an interpreter that has everything: the client's modules load neither torch nor what the daemon needs."""
    program = (
        "import json, sys, refitd, refitd.hook.trainer, refitd.hook.engine, refitd.testing\n"
        f"print(json.dumps({{'loaded': [name for name in {[*FORBIDDEN, 'torch', 'pytest']} if name in sys.modules]}}))"
    )
    assert run(Path(sys.executable), program) == {"loaded": []}
