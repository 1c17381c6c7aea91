"""``refitd bench gpu``: what is still to be measured on a machine with GPUs, step by step.

Each step is a command of its own with a limit of its own, and leaves a JSON file beside its logs, however it ends: a
step that fails or hangs costs its own numbers and no others. Steps run beside each other, each on cards of its own
(``CUDA_VISIBLE_DEVICES``). Those that have gone well are not done again, so the command is repeated until nothing is
left; it begins no step whose limit goes beyond its own (``--seconds``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOTAL_SECONDS = 530.0
TAIL = 4000
POLL_SECONDS = 0.02
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
    return ("-m", "pytest", "-q", "-m", "gpu", "--durations=15", *words)


def _fault(*words: str) -> tuple[str, ...]:
    return ("tests/device/faults.py", *words)


def _cards(gpus: int, transport: str, *words: str) -> tuple[str, ...]:
    return _bench("refit", "--device", "cuda", "--gpus", str(gpus), "--transport", transport, *words)


def _card_fault(*words: str) -> tuple[str, ...]:
    return ("tests/device/card_faults.py", *words)


def _leaks(*words: str) -> tuple[str, ...]:
    return ("tests/device/leaks.py", *words)


def _bad_luck(*cases: str) -> tuple[str, ...]:
    return ("tests/device/bad_luck.py", *cases)


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
    Step("library-peer", 90, ("tests/device/library.py", "1GiB", "peer", "child", "library")),
    Step("library-nccl", 90, ("tests/device/library.py", "big", "nccl", "child", "library")),
    Step("trainer-crowded", 90, _fault("crowded", "16GB", "peer")),
    Step("moved-peer", 90, _leaks("moved", "100", "big", "peer")),
    Step("moved-peer-vmm", 60, ("tests/device/leaks_vmm.py", "moved", "100", "big", "peer")),
    Step("turns-peer", 90, _leaks("turns", "50", "big", "peer")),
    Step("turns-nccl", 90, _leaks("turns", "12", "big", "nccl", "60")),
    Step("mover-peer", 120, _bench("mover", "--device", "cuda", "--transport", "peer")),
    Step("mover-nccl", 120, _bench("mover", "--device", "cuda", "--transport", "nccl")),
    Step("bad-luck", 120, _bad_luck("illegal", "garbage", "dead", "no-peer", "oom")),
    Step("bad-luck-hung", 70, _bad_luck("hung")),
    Step("bad-luck-nccl", 90, _bad_luck("oom-nccl", "versions")),
    Step("pack", 150, _bench("pack", "--device", "cuda", "--only", "kernels", "--repeats", "10")),
    Step("pack-pulls", 120, _bench("pack", "--device", "cuda", "--only", "processes", "--repeats", "10")),
    Step("refit-peer-small", 90, _bench(
        "refit", "--device", "cuda", "--transport", "peer", "--model", "small", "--repeats", "20")),
    Step("refit-peer-256mib", 90, _bench(
        "refit", "--device", "cuda", "--transport", "peer", "--model", "256MiB", "--repeats", "20")),
    Step("refit-peer-1gib", 90, _bench(
        "refit", "--device", "cuda", "--transport", "peer", "--model", "1GiB", "--repeats", "20")),
    Step("peer-fixed", 120, ("-m", "refitd.bench.fixed")),
    Step("peer-fixed-2", 120, ("-m", "refitd.bench.fixed", "--gpus", "2"), 2),
    Step("peer-cold", 60, ("-m", "refitd.bench.fixed_cold"), 2),
    Step("peer-calls", 120, ("-m", "refitd.bench.fixed_calls")),
    Step("refit-peer-48gb", 180, _bench(
        "refit", "--device", "cuda", "--transport", "peer", "--model", "48GB", "--repeats", "7")),
    Step("pause", 90, _bench("pause", "--device", "cuda", "--model", "16GB", "--repeats", "10")),
    Step("pause-in-place", 120, _bench(
        "pause", "--device", "cuda", "--model", "48GB", "--modes", "in_place", "--repeats", "7")),
    Step("real-engine", 120, ("tests/real/real_check.py", "--device", "cuda", "--size", "card")),
    Step("real-engine-shadow", 120, (
        "tests/real/real_check.py", "--device", "cuda", "--size", "card", "--mode", "device_shadow")),
    Step("gpu-tests", 190, _tests("tests/gpu")),
    Step("gpu-tests-kernels", 150, _tests("tests/mover/test_kernels.py")),
    Step("repair-2", 120, _bench("repair", "--device", "cuda", "--gpus", "2", "--repeats", "3"), 2),
    Step("two-replicas", 60, _cards(1, "peer", "--size", "1GiB", "16GB", "--width", "512", "--repeats", "5")),
    Step("two-replicas-nccl", 60, _cards(1, "nccl", "--size", "16MiB", "--width", "512", "--repeats", "5")),
    Step("cards2-try", 60, _cards(2, "peer", "--size", "1GiB", "--width", "512", "--repeats", "3"), 2),
    Step("cards2-try-nccl", 60, _cards(2, "nccl", "--size", "1GiB", "--width", "512", "--repeats", "3"), 2),
    Step("cards2-one", 90, _cards(
        2, "peer", "--layout", "one_to_one", "--size", "16GB", "--width", "contiguous", "512", "128", "--repeats", "5",
        "--rivals", "copies"), 2),
    Step("cards2-both", 90, _cards(
        2, "peer", "--layout", "rows_to_cols", "--size", "16GB", "--width", "contiguous", "512", "128",
        "--repeats", "5", "--rivals", "copies"), 2),
    Step("cards2-nccl", 120, _cards(
        2, "nccl", "--layout", "one_to_one", "--size", "16GB", "--width", "contiguous", "512", "--repeats", "5"), 2),
    Step("cards2-rivals", 90, _cards(2, "peer", "--size", "4GB", "--width", "512", "--repeats", "5"), 2),
    Step("cards2-m2n", 120, _cards(
        2, "peer", "--layout", "one_to_one", "--size", "1MiB", "16MiB", "256MiB", "1GiB", "2GiB", "--repeats", "10",
        "--rivals", "copies"), 2),
    Step("cards2-64gb", 120, _cards(
        2, "peer", "--size", "64GB", "--width", "contiguous", "512", "--repeats", "3", "--rivals", "copies"), 2),
    Step("nccl-tuned", 120, (
        "tests/device/tuned.py", "nccl", "one_to_one", "16GB", "contiguous", "5", "usual",
        "bench.cards.measure.MOST_BUCKET_BYTES=268435456", "bench.cards.measure.MOST_BUCKET_BYTES=4194304",
        "mover.nccl.nccl4py.MAX_CTAS=16"), 2),
    Step("nccl-steps", 60, ("tests/device/nccl_steps.py", "16", "16", "32"), 2),
    Step("cards2-64gb-nccl", 170, _cards(
        2, "nccl", "--layout", "one_to_one", "--size", "64GB", "--width", "contiguous", "512", "--repeats", "3"), 2),
    Step("cards2-kill-peer", 60, _card_fault("kill", "one_to_one", "peer", "16GB"), 2),
    Step("cards2-stop-peer", 60, _card_fault("stop", "rows_to_cols", "peer", "16GB"), 2),
    Step("cards2-kill-nccl", 60, _card_fault("kill", "one_to_one", "nccl", "4GB"), 2),
    Step("cards2-stop-nccl", 60, _card_fault("stop", "one_to_one", "nccl", "4GB"), 2),
    Step("cards2-kill-source-nccl", 60, _card_fault("kill", "one_to_one", "nccl", "4GB", "trainer/run/0"), 2),
    Step("cards4-kill-source-nccl", 60, _card_fault("kill", "tp2_to_2xtp1", "nccl", "4GB", "trainer/run/1"), 4),
    Step("cards4-kill-mate-nccl", 60, _card_fault("kill", "tp2_to_tp2", "nccl", "4GB"), 4),
    Step("cards8-on-2-nccl", 120, _cards(
        8, "nccl", "--size", "16MiB", "--width", "512", "--repeats", "3", "--rivals", "none", "--per-card", "4"), 2),
    Step("cards8-on-2-kill-nccl", 60, _card_fault("kill", "four_to_four", "nccl", "256MiB", "per-card=4"), 2),
    Step("cards8-on-2-leave", 60, _card_fault("leave", "four_to_four", "nccl", "16MiB", "per-card=4"), 2),
    Step("repair-4", 120, _bench("repair", "--device", "cuda", "--gpus", "4", "--repeats", "3"), 4),
    Step("cards4-try", 60, _cards(4, "peer", "--size", "1GiB", "--width", "512", "--repeats", "3"), 4),
    Step("cards4-nccl", 90, _cards(4, "nccl", "--size", "4GB", "--width", "512", "--repeats", "5"), 4),
    Step("cards4-peer", 120, _cards(
        4, "peer", "--size", "16GB", "--width", "contiguous", "512", "--repeats", "5", "--rivals", "copies"), 4),
    Step("cards4-kill-nccl", 60, _card_fault("kill", "tp2_to_2xtp1", "nccl", "4GB"), 4),
    Step("cards4-kill-peer", 60, _card_fault("kill", "tp2_to_2xtp1", "peer", "16GB"), 4),
    Step("cards4-stop-nccl", 60, _card_fault("stop", "tp2_to_2xtp1", "nccl", "4GB"), 4),
    Step("cards4-leave", 60, _card_fault("leave", "tp2_to_2xtp1", "nccl", "1GiB"), 4),
    Step("repair-8", 120, _bench("repair", "--device", "cuda", "--gpus", "8", "--repeats", "3"), 8),
    Step("cards8-peer", 120, _cards(8, "peer", "--size", "4GB", "--width", "512", "--repeats", "5"), 8),
    Step("cards8-nccl", 120, _cards(8, "nccl", "--size", "4GB", "--width", "512", "--repeats", "5"), 8),
    Step("cards8-kill-nccl", 60, _card_fault("kill", "four_to_four", "nccl", "4GB"), 8),
    Step("cards8-leave", 60, _card_fault("leave", "four_to_four", "nccl", "1GiB"), 8),
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
    found = Run(arguments).all(chosen)
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


class Run:
    """The steps of one call, beside each other as far as there are cards."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._deadline: float = time.monotonic() + arguments.seconds
        self._cards = list(range(arguments.gpus))
        self._running: list[Running] = []

    def all(self, steps: Sequence[Step]) -> dict[str, str]:
        """How each ended. Those of many cards come first: they would else wait for a moment when all are free."""
        found = {step.name: GOOD if self._is_done(step) else LEFT for step in steps}
        waiting = sorted((step for step in steps if found[step.name] != GOOD), key=lambda step: -step.gpus)
        try:
            while waiting or self._running:
                waiting = [step for step in waiting if self._fits_time(step) and not self._begun(step)]
                time.sleep(POLL_SECONDS)
                found.update(self._ended())
        finally:
            for one in self._running:
                one.end()
        return found

    def _is_done(self, step: Step) -> bool:
        path = self._path(step)
        if self._arguments.again or not path.exists():
            return False
        return bool(json.loads(path.read_text())["ended"] == GOOD)

    def _path(self, step: Step) -> Path:
        return Path(self._arguments.out / f"{step.name}.json")

    def _fits_time(self, step: Step) -> bool:
        return step.seconds <= self._deadline - time.monotonic()

    def _begun(self, step: Step) -> bool:
        if step.gpus > len(self._cards):
            return False
        cards, self._cards = self._cards[: step.gpus], self._cards[step.gpus :]
        self._running.append(Running(step, cards, self._arguments.python, self._arguments.out))
        return True

    def _ended(self) -> dict[str, str]:
        """Steps that are over, each written down before it is said."""
        over = [one for one in self._running if one.is_over()]
        for one in over:
            self._running.remove(one)
            self._cards = sorted(self._cards + one.cards)
            _write(self._path(one.step), one.result())
        return {one.step.name: one.ended for one in over}


def _write(path: Path, result: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.rename(path)
    print(f"{result['step']}: {result['ended']} after {result['seconds']:.1f} s", flush=True)


class Running:
    """A step's process on its cards."""

    def __init__(self, step: Step, cards: list[int], python: str, out: Path) -> None:
        self.step, self.cards = step, cards
        self.ended = LATE
        self._began = time.monotonic()
        self._said, self._complained = (out / f"{step.name}.{stream}" for stream in ("stdout", "stderr"))
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards)), "PYTHONPATH": _path()}
        with self._said.open("wb") as said, self._complained.open("wb") as complained:
            self._process = subprocess.Popen(
                [python, *step.command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=complained,
                start_new_session=True, env={**os.environ, **visible},
            )  # fmt: skip

    def is_over(self) -> bool:
        """By itself, or because its time is."""
        return self._process.poll() is not None or time.monotonic() - self._began > self.step.seconds

    def end(self) -> None:
        """The step and all that it started, in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def result(self) -> dict[str, Any]:
        """What is written down; ends what is left of it."""
        status = self._process.poll()
        self.end()
        self.ended = LATE if status is None else GOOD if status == 0 else FAILED
        stdout, stderr = (path.read_text(errors="replace") for path in (self._said, self._complained))
        return {
            "step": self.step.name, "ended": self.ended, "status": status, "cards": self.cards,
            "seconds": time.monotonic() - self._began, "limit": self.step.seconds,
            "command": list(self.step.command), "document": _document(stdout), "stdout": stdout[-TAIL:],
            "stderr": stderr[-TAIL:],
        }  # fmt: skip


def _path() -> str:
    """This checkout, and the folders of tests that steps import from."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _document(stdout: str) -> Any:
    """The last line as JSON; None where it is none."""
    lines = stdout.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
