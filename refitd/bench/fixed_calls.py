"""What the calls of a small launch cost: ``python -m refitd.bench.fixed_calls``, on one card, in one process.

Each call is timed at once after the last (hot), and after a sleep in which the caches were swept (cold), as a mover
that waits for its daemon finds them. Then two readers of one card beside one: what taking turns costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from refitd.bench import pull
from refitd.bench.machine import commit
from refitd.mover.kernels import Launch, prepare, through
from refitd.mover.kernels.starts import Event, current_stream

SIZES = {"1MiB": 1 << 20, "16MiB": 1 << 24, "256MiB": 1 << 28}
SLEEP_SECONDS, SWEEP_BYTES = 0.005, 64 << 20
_sweep = np.zeros(SWEEP_BYTES // 8)
Parts = list[tuple[str, Callable[[], Any]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; what fails is named, and costs only itself."""
    parser = argparse.ArgumentParser(prog="python -m refitd.bench.fixed_calls", description="Calls of a launch.")
    parser.add_argument("--repeats", type=int, default=100)
    repeats = parser.parse_args(argv).repeats
    document: dict[str, Any] = {"ok": True, "commit": commit(), "hot_us": {}, "cold_us": {}, "pulls": {}, "failed": {}}
    for name, measure in (("calls", _calls), ("waking", _waking), ("pulls", _pulls)):
        try:
            measure(document, repeats)
        except Exception:  # noqa: BLE001  it is named, and the rest is measured
            document["ok"], document["failed"][name] = False, traceback.format_exc()[-3000:]
    print(json.dumps(document))
    return 0 if document["ok"] else 1


def _calls(document: dict[str, Any], repeats: int) -> None:
    for size, nbytes in SIZES.items():
        kept, launch = _launch(nbytes)
        for name, parts in _ways(launch).items():
            for kind in ("hot", "cold"):
                count = repeats if kind == "hot" else repeats // 3
                document[f"{kind}_us"][f"{size} {name}"] = timed(parts, count, kind == "cold")
        document["hot_us"][f"{size} kernels on the card"] = _on_card(launch, repeats)
        del kept


def _launch(nbytes: int) -> tuple[Any, Launch]:
    shape = pull.Pull("calls", 1, max(nbytes >> 15, 32), min(16384, nbytes >> 6))
    program = pull.program_of(shape, slice(0, shape.cols))
    source, target = (torch.zeros(shape.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    launch = prepare(through(program, program.buckets, {"w0/0": source.data_ptr()}, {"w0": target.data_ptr()}), "cuda")
    launch.run()
    launch.checksums()
    launch.run()
    launch.checksums()
    return (source, target), launch


def _ways(launch: Launch) -> dict[str, Parts]:
    """Ways to start a launch and wait for it, in parts."""
    stream = current_stream(torch.cuda.current_device())
    made: Any = torch.cuda.Event
    event, other = made(), Event()
    starts = launch._starts[True]
    current: Any = torch.cuda.current_stream()

    def start_all() -> None:
        for start in starts:
            start(stream)

    def spin() -> None:
        while not event.query():
            pass

    ways: dict[str, Parts] = {
        "as it is": [("run", launch.run), ("sums", launch.checksums)],
        "driver": [
            ("stream", lambda: current_stream(0)), ("move", lambda: starts[0](stream)),
            ("hand over", lambda: starts[1](stream)), ("record", lambda: other.record(stream)), ("wait", other.wait),
        ],
        "torch's event": [("start", start_all), ("record", event.record), ("wait", event.synchronize)],
        "a loop of queries": [("start", start_all), ("record", event.record), ("wait", spin)],
        "the stream": [("start", start_all), ("wait", current.synchronize)],
        "nothing": [("record", lambda: other.record(stream)), ("wait", other.wait)],
    }  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for start in starts:
            start(current_stream(0))
    ways["a graph"] = [("replay", graph.replay), ("record", lambda: other.record(stream)), ("wait", other.wait)]
    triton = _by_triton(launch)
    ways["Triton's launcher"] = [("move", triton), ("record", lambda: other.record(stream)), ("wait", other.wait)]
    return ways


def _by_triton(launch: Launch) -> Callable[[], Any]:
    from refitd.mover.kernels.launch import WARPS, load_kernels

    arguments = launch._arguments(True)
    compiled = load_kernels().move[len(launch._tiles), 1, 1](**arguments, num_warps=WARPS)
    return lambda: compiled[len(launch._tiles), 1, 1](*arguments.values())


def timed(parts: Parts, repeats: int, cold: bool) -> dict[str, float]:
    """Median µs of each part and of all."""
    found: list[list[int]] = []
    for _ in range(repeats):
        if cold:
            time.sleep(SLEEP_SECONDS)
            _sweep.sum()
        at = [time.monotonic_ns()]
        for _name, call in parts:
            call()
            at.append(time.monotonic_ns())
        found.append(at)
    names = [name for name, _call in parts]
    made = {n: statistics.median(at[i + 1] - at[i] for at in found) / 1e3 for i, n in enumerate(names)}
    return {**made, "all": statistics.median(at[-1] - at[0] for at in found) / 1e3}


def _on_card(launch: Launch, repeats: int) -> dict[str, float]:
    """By the card's own clock: the kernel, and the one that hands its sums over."""
    stream = current_stream(torch.cuda.current_device())
    make: Any = torch.cuda.Event
    found: list[list[float]] = []
    for _ in range(repeats):
        events = [make(enable_timing=True) for _ in range(3)]
        events[0].record()
        for start, event in zip(launch._starts[True], events[1:], strict=True):
            start(stream)
            event.record()
        events[2].synchronize()
        found.append([events[0].elapsed_time(events[1]) * 1e3, events[1].elapsed_time(events[2]) * 1e3])
    return {"move": statistics.median(one[0] for one in found), "hand over": statistics.median(one[1] for one in found)}


def _waking(document: dict[str, Any], repeats: int) -> None:
    """From one thread's word to another's hearing it: what a hop costs."""
    word, there, heard = threading.Condition(), threading.Event(), [0]

    def listen() -> None:
        with word:
            there.set()
            while word.wait():
                heard[0] = time.monotonic_ns()
                there.set()
                if stopping:
                    return

    stopping: list[bool] = []
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    found: dict[bool, list[int]] = {False: [], True: []}
    for cold in (False, True):
        for _ in range(repeats // 3):
            there.wait()
            there.clear()
            time.sleep(SLEEP_SECONDS if cold else 0.0002)
            if cold:
                _sweep.sum()
            begun = time.monotonic_ns()
            with word:
                word.notify()
            there.wait()
            there.set()
            found[cold].append(heard[0] - begun)
    stopping.append(True)
    with word:
        word.notify()
    thread.join(5)
    for cold, name in ((False, "hot_us"), (True, "cold_us")):
        document[name]["waking a thread"] = statistics.median(found[cold]) / 1e3


def _pulls(document: dict[str, Any], repeats: int) -> None:
    """Two readers share a card by turns: beside one that has all, and one that has half. ms, and GB/s."""
    shapes = (
        pull.Pull("two of half", 1, 16384, 32768, 2, 2), pull.Pull("one of all", 1, 16384, 32768, 2, 1),
        pull.Pull("one of half", 1, 16384, 16384, 2, 1), pull.Pull("two of nothing", 1, 64, 512, 2, 2),
        pull.Pull("one of nothing", 1, 64, 512, 2, 1),
    )  # fmt: skip
    for shape in shapes:
        seconds, copied = pull._run(shape, min(repeats, 30), "sum")
        took = statistics.median(seconds)
        rate = shape.nbytes / took / 1e9
        document["pulls"][shape.name] = {"ms": took * 1e3, "least_ms": min(seconds) * 1e3, "rate": rate, "copy": copied}


if __name__ == "__main__":
    sys.exit(main())
