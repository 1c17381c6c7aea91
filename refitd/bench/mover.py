"""``refitd bench mover``: what movers cost a GPU when they do nothing, and how soon a new one works.

Idle memory: what is free on the card before and after a mover is killed, while its daemon is stopped and starts no
other. Cold start: from the daemon's wish for a new mover to the first bucket that it counts, with a publication waiting
for it; ``compiled`` with Triton's cache emptied before, ``cached`` without. Slowdown: a process that multiplies
matrices, alone, beside idle movers, and while they refit once a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from refitd.bench import contest, models, on_device, outcome, tenant
from refitd.bench.clients import PatientTrainer
from refitd.bench.contest import Contest
from refitd.bench.daemon import Settings
from refitd.bench.machine import commit, machine
from refitd.bench.party import BenchFailed, Process
from refitd.bench.rows import Row, show

LIMIT_BYTES = 1.5 * (1 << 30)  # a mover's idle memory, with communicators and staging
LIMIT_PERCENT = 3.0  # of a busy trainer's speed, outside refits
WINDOW_MS, WINDOWS, REFITS = 500, 6, 5
GONE_SECONDS = 10.0
BEAT_SECONDS = 0.5  # trainers give up a daemon whose heartbeat is twice as old: it may need time for one
PARTS = ("import", "context", "torch", "kernels", "nccl", "mount")
MODELS = {"peer": "1GiB", "nccl": "big"}


class Cold(NamedTuple):
    """A new mover's start: seconds in all, of them to its first word, and of them by `PARTS`."""

    total: float
    spawn: float
    parts: dict[str, float]


class Found(NamedTuple):
    """Bytes that came free with each mover, by the card and by NVML; starts with and without Triton's cache; TFLOP/s
    alone, beside idle movers, and beside refits.
    """

    freed: list[float]
    by_nvml: list[float]
    cold: dict[str, list[Cold]]
    speeds: dict[str, list[float]]


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status (0 good, 1 failed, 2 usage)."""
    arguments = _parse(argv)
    where = machine()
    try:
        found = _rows(f"mover_{arguments.transport}", measure(arguments.transport, arguments.repeats))
        where |= on_device.facts()
    except BenchFailed as error:
        return outcome.failed(error, arguments.json)
    document = {
        "ok": True, "rows": [asdict(row) for row in found], "machine": where, "repeats": arguments.repeats,
        "commit": commit(), "command": outcome.command("mover", argv),
    }  # fmt: skip
    show(found, where, document["commit"], arguments.json)
    return outcome.finished(document, arguments)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="refitd bench mover", description="Measure what a mover costs a GPU.")
    parser.add_argument("--device", choices=("cuda",), default="cuda", help="default: %(default)s")
    parser.add_argument("--transport", choices=("peer", "nccl"), default="peer", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=6, metavar="N", help="movers started (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    arguments = parser.parse_args(argv)
    if arguments.repeats < 2:
        parser.error("--repeats: at least 2")
    return arguments


def measure(transport: str, repeats: int) -> Found:
    """Half of the ``repeats`` starts compile. Raises BenchFailed."""
    cache = Path(tempfile.mkdtemp(prefix="refitd-triton-"))
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    beside = Process("tenant", tenant.Tenant)
    try:
        beside.ask("start")
        beside.answer()
        _busy(beside, 4 * WINDOWS)  # until it is warm
        alone = _busy(beside, WINDOWS)
        size = on_device.BUCKET_BYTES if transport == "peer" else on_device.NCCL_BUCKET_BYTES
        settings = Settings(bucket_bytes=size, traced=True)
        with contest.refit(models.model(MODELS[transport]), transport, "cuda", settings, PatientTrainer) as one:
            found = _beside(one, beside, cache, repeats)
        found.speeds["alone"] = alone + _busy(beside, WINDOWS)
        return found
    finally:
        beside.end()
        shutil.rmtree(cache)


def _beside(one: Contest, beside: Process, cache: Path, repeats: int) -> Found:
    steps = iter(range(1 << 20))
    for _ in range(on_device.WARM_UPS):
        one.round(next(steps))
    found = Found([], [], {"compiled": [], "cached": []}, {})
    for i in range(repeats):
        victim = f"engine/r0/{i // 2 % models.ENGINES}"  # each compiles, then does not
        since = len(one.lines())
        if i % 2 == 0:
            _empty(cache)
        freed, by_nvml = _end_mover(one, beside, victim)
        found.freed.append(freed)
        found.by_nvml.append(by_nvml)
        one.round(next(steps))
        found.cold["cached" if i % 2 else "compiled"].append(_cold(one.lines()[since:], victim))
    found.speeds["idle"] = _busy(beside, WINDOWS)
    found.speeds["refits"] = _busy(beside, 2 * REFITS, lambda: _refits(one, next(steps)))
    found.speeds["idle"] += _busy(beside, WINDOWS)
    one.round(next(steps))
    return found


def _busy(beside: Process, windows: int, meanwhile: Callable[[], object] | None = None) -> list[float]:
    """TFLOP/s of each window; ``meanwhile`` is called in every other."""
    found = []
    for i in range(windows):
        beside.ask("products", WINDOW_MS)
        if meanwhile is not None and i % 2 == 0:
            meanwhile()
        found.append(beside.answer())
    return found


def _refits(one: Contest, step: int) -> None:
    """One refit, without a look at what came: that would be work on the card, too."""
    one.move(step)


def _end_mover(one: Contest, beside: Process, key: str) -> tuple[float, float]:
    """Kill a mover; bytes that came free, and what NVML had said of it (0: nothing). Raises BenchFailed."""
    pid = one.daemon.movers()[key]
    beside.ask("used", pid)
    by_nvml = beside.answer()
    began = time.monotonic()
    one.daemon.send_signal(signal.SIGSTOP)
    try:
        before = _free(beside)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + GONE_SECONDS
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > deadline:
                raise BenchFailed(f"the mover {pid} of {key} does not end")
            time.sleep(0.01)
        return _free(beside) - before, by_nvml
    finally:
        one.daemon.send_signal(signal.SIGCONT)
        if time.monotonic() > began + BEAT_SECONDS:
            time.sleep(BEAT_SECONDS)


def _free(beside: Process) -> float:
    beside.ask("free")
    return beside.answer()


def _empty(cache: Path) -> None:
    for path in cache.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _cold(lines: Sequence[str], key: str) -> Cold:
    """What the daemon's log says of a mover's start. Raises BenchFailed where it does not say everything."""
    said = [event for event in map(_event, lines) if key in (event.get("key"), event.get("rank"))]
    found = {event["event"]: event for event in said}  # the last of each: of the mover that lives
    missing = {"mover_started", "mounted", "moved"} - found.keys()
    if missing:
        raise BenchFailed(f"the daemon's log does not show {', '.join(sorted(missing))} of {key}: {said}")
    started = found["mover_started"]
    wished = _monotonic(started["timestamp"]) - started["seconds"]
    return Cold(found["moved"]["first"] - wished, started["seconds"], found["mounted"]["spent"])


def _event(line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and "event" in said else {}


def _monotonic(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp() - time.time() + time.monotonic()


def _rows(name: str, found: Found) -> list[Row]:
    rows = [_limited(f"{name}_idle_memory", statistics.median(found.freed) / 1e6, "MB", LIMIT_BYTES / 1e6)]
    if any(found.by_nvml):
        nbytes = statistics.median(found.by_nvml)
        rows.append(_limited(f"{name}_idle_memory_nvml", nbytes / 1e6, "MB", LIMIT_BYTES / 1e6))
    for how, starts in found.cold.items():
        rows += _cold_rows(f"{name}_cold_start_{how}", starts)
    speeds = {when: statistics.median(found.speeds[when]) for when in ("alone", "idle")}
    speeds["refits"] = statistics.fmean(found.speeds["refits"])  # in every other window there is one
    rows.append(Row(f"{name}_busy_alone", speeds["alone"], "TFLOP/s"))
    for when in ("idle", "refits"):
        ratio = speeds[when] / speeds["alone"]
        rows.append(Row(f"{name}_busy_{when}", speeds[when], "TFLOP/s", speeds["alone"], ratio))
    rows.append(_limited(f"{name}_slowdown_idle", _percent_less(speeds, "idle"), "%", LIMIT_PERCENT))
    rows.append(Row(f"{name}_slowdown_refits", _percent_less(speeds, "refits"), "%"))
    return rows


def _percent_less(speeds: Mapping[str, float], when: str) -> float:
    return 100 * (1 - speeds[when] / speeds["alone"])


def _cold_rows(name: str, starts: Sequence[Cold]) -> list[Row]:
    """In all, and by parts; ``rest`` is what remains: words between processes, the lane's turn, the first launch."""
    parts = {part: statistics.median(one.parts.get(part, 0.0) for one in starts) for part in PARTS}
    parts = {"spawn": statistics.median(one.spawn for one in starts), **parts}
    total = statistics.median(one.total for one in starts)
    rows = [Row(name, total * 1e3, "ms")]
    rows += [Row(f"{name}_{part}", seconds * 1e3, "ms") for part, seconds in parts.items() if seconds]
    return [*rows, Row(f"{name}_rest", (total - sum(parts.values())) * 1e3, "ms")]


def _limited(name: str, value: float, unit: str, limit: float) -> Row:
    """The baseline is what it may be at most."""
    return Row(name, value, unit, limit, limit / value if value > 0 else None)
