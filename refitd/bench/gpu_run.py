"""``refitd bench gpu``: what is still to be measured on a machine with one GPU or two, step by step.

Each step is a command of its own with a limit of its own, and leaves one JSON file when it ends, however it ends: a
step that fails or hangs costs its own numbers and no others. Steps that have gone well are not done again, so the
command is repeated until nothing is left; it begins no step whose limit goes beyond its own (``--seconds``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOTAL_SECONDS = 530.0
TAIL = 4000
GOOD, FAILED, LATE, LEFT = "good", "failed", "out of time", "left for the next run"


class Step(NamedTuple):
    """``command`` after the interpreter; its last line of stdout is JSON where it has one. ``seconds``: its limit."""

    name: str
    seconds: float
    command: tuple[str, ...]
    gpus: int = 1


def _bench(*words: str) -> tuple[str, ...]:
    return ("-m", "refitd.cli", "bench", *words, "--json")


def _tests(*words: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-m", "gpu", "-x", *words)


def _fault(*words: str) -> tuple[str, ...]:
    return ("tests/device/faults.py", *words)


# Cheap and telling ones first: where NCCL itself does not work, the rest need not be tried.
STEPS = (
    Step("nccl-tests", 120, _tests("tests/gpu/test_gpu_nccl.py")),
    Step("repair", 180, _bench("repair", "--device", "cuda", "--repeats", "10")),
    Step("refit-nccl-small", 90, _bench("refit", "--device", "cuda", "--transport", "nccl", "--model", "small")),
    Step("refit-nccl-big", 120, _bench(
        "refit", "--device", "cuda", "--transport", "nccl", "--model", "big", "--repeats", "10")),
    Step("kill-nccl", 60, _fault("kill", "big", "nccl")),
    Step("stop-nccl", 60, _fault("stop", "big", "nccl")),
    Step("kill-peer", 60, _fault("kill", "1GiB", "peer")),
    Step("stop-peer", 60, _fault("stop", "1GiB", "peer")),
    Step("trainer-peer", 60, _fault("trainer", "1GiB", "peer")),
    Step("refit-peer-48gb", 180, _bench(
        "refit", "--device", "cuda", "--transport", "peer", "--model", "48GB", "--repeats", "7")),
    Step("gpu-tests", 300, _tests("tests/mover/test_kernels.py", "tests/gpu")),
    Step("repair-2", 180, _bench("repair", "--device", "cuda", "--gpus", "2", "--repeats", "10"), 2),
    Step("cards", 240, _bench("pack", "--device", "cuda", "--only", "cards"), 2),
)  # fmt: skip


def main(argv: Sequence[str], steps: Sequence[Step] = STEPS) -> int:
    """Run what is to be run and print a line a step; 0 where every step that applies has gone well, else 1."""
    arguments = _parse(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in steps if step.gpus <= arguments.gpus and step.name in (arguments.only or [step.name])]
    if arguments.list:
        print(*(f"{step.name}: {step.seconds:g} s: {' '.join(step.command)}" for step in chosen), sep="\n")
        return 0
    deadline = time.monotonic() + arguments.seconds
    found = {step.name: _one(step, arguments.out, arguments.python, deadline, arguments.again) for step in chosen}
    print(json.dumps({"ok": set(found.values()) <= {GOOD}, "steps": found}))
    return 0 if set(found.values()) <= {GOOD} else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="refitd bench gpu", description="Measure what needs a GPU, step by step.")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs that there are (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where each step leaves its JSON")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="limit in all (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps")
    parser.add_argument("--again", action="store_true", help="also what has gone well before")
    parser.add_argument("--list", action="store_true", help="name the steps and do nothing")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the steps")
    return parser.parse_args(argv)


def _one(step: Step, out: Path, python: str, deadline: float, again: bool) -> str:
    """How the step ended, which is written down before it is said."""
    path = out / f"{step.name}.json"
    if not again and path.exists() and json.loads(path.read_text())["ended"] == GOOD:
        return GOOD
    if step.seconds > deadline - time.monotonic():
        return LEFT
    result = _run(step, python)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.rename(path)
    print(f"{step.name}: {result['ended']} after {result['seconds']:.1f} s", flush=True)
    return str(result["ended"])


def _run(step: Step, python: str) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        process = subprocess.Popen(
            [python, *step.command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=complained,
            start_new_session=True, env={**os.environ, "PYTHONPATH": _path()},
        )  # fmt: skip
        try:
            status: int | None = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        stdout, stderr = _read(said), _read(complained)
    ended = LATE if status is None else GOOD if status == 0 else FAILED
    return {
        "step": step.name, "ended": ended, "status": status, "seconds": time.monotonic() - began, "limit": step.seconds,
        "command": list(step.command), "document": _document(stdout), "stdout": stdout[-TAIL:],
        "stderr": stderr[-TAIL:],
    }  # fmt: skip


def _path() -> str:
    """This checkout, and the folders of tests that steps import from."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _end(process: subprocess.Popen[bytes]) -> None:
    """The step and all that it started, in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def _document(stdout: str) -> Any:
    """The last line as JSON; None where it is none."""
    lines = stdout.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
