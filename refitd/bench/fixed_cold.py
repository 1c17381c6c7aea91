"""What a launch waits for on a card that was idle: ``python -m refitd.bench.fixed_cold``, on two cards.

Each launch comes after 3 ms of nothing; before that another process has used the card, or not; 1 ms before the launch
its memory is touched, or not; what it reads is on its own card or on the other. So it shows which of them costs what.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from refitd.bench import pull
from refitd.bench.machine import commit
from refitd.hook.gpu.driver import Driver
from refitd.mover.kernels import Launch, Touch, prepare, through

SIZES = {"1MiB": 1 << 20, "16MiB": 1 << 24}
IDLE_SECONDS, BEFORE_SECONDS = 0.003, 0.001
WARM_UPS = 3
START_SECONDS = 60.0
Call = Callable[[], Any]


class Work(NamedTuple):
    """A launch, and the memory that it works on."""

    launch: Launch
    touch: Touch
    memory: tuple[Any, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; what fails is named, and costs only itself."""
    parser = argparse.ArgumentParser(prog="python -m refitd.bench.fixed_cold", description="A launch on an idle card.")
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args(argv).repeats
    document: dict[str, Any] = {"ok": True, "commit": commit(), "cold_us": {}, "failed": {}}
    for far in (False, True):
        for size, nbytes in SIZES.items():
            name = f"{size} {'other' if far else 'own'} card"
            try:
                document["cold_us"][name] = _measured(nbytes, far, repeats)
            except Exception:  # noqa: BLE001  it is named, and the rest is measured
                document["ok"], document["failed"][name] = False, traceback.format_exc()[-3000:]
            print(f"{name}: {document['cold_us'].get(name, 'failed')}", file=sys.stderr, flush=True)
    print(json.dumps(document))
    return 0 if document["ok"] else 1


def _measured(nbytes: int, far: bool, repeats: int) -> dict[str, dict[str, float]]:
    with neighbour(_busy) as ask:
        work = _work(nbytes, far)
        calls = work.launch.run, work.launch.checksums
        return {
            "alone": timed(*calls, None, None, repeats), "alone, touched": timed(*calls, None, work.touch.run, repeats),
            "after another": timed(*calls, ask, None, repeats),
            "after another, touched": timed(*calls, ask, work.touch.run, repeats),
        }  # fmt: skip


def timed(run: Call, wait: Call, ask: Call | None, touch: Call | None, repeats: int) -> dict[str, float]:
    """Median µs of starting a launch, of waiting for it, and of the touch before it."""
    found: list[tuple[int, ...]] = []
    for _ in range(WARM_UPS + repeats):
        if ask is not None:
            ask()
        time.sleep(IDLE_SECONDS)
        at = [time.monotonic_ns()]
        if touch is not None:
            touch()
        at.append(time.monotonic_ns())
        while time.monotonic_ns() < at[-1] + BEFORE_SECONDS * 1e9 and touch is not None:
            pass
        for call in (run, wait):
            begun = time.monotonic_ns()
            call()
            at += [begun, time.monotonic_ns()]
        found.append((at[1] - at[0], at[3] - at[2], at[5] - at[4], at[5] - at[2]))
    medians = [round(statistics.median(part) / 1e3, 1) for part in zip(*found[WARM_UPS:], strict=True)]
    return dict(zip(("touch", "run", "sums", "all"), medians, strict=True))


def _work(nbytes: int, far: bool) -> Work:
    """On the last card, from memory of the first one where it is ``far``."""
    here = torch.cuda.device_count() - 1
    there = 0 if far else here
    torch.cuda.set_device(here)
    shape = pull.Pull("cold", 1, max(nbytes >> 15, 32), min(16384, nbytes >> 6))
    program = pull.program_of(shape, slice(0, shape.cols))
    source, target = (torch.zeros(shape.nbytes, dtype=torch.uint8, device=f"cuda:{card}") for card in (there, here))
    torch.cuda.synchronize(there)
    if far:
        driver = Driver(here)
        driver.enable_peer(there)
    table = through(program, program.buckets, {"w0/0": source.data_ptr()}, {"w0": target.data_ptr()})
    launch, touch = prepare(table, f"cuda:{here}"), Touch([table], f"cuda:{here}")
    for _ in range(2):
        launch.run()
        launch.checksums()
        touch.run()
    return Work(launch, touch, (source, target))


@contextmanager
def neighbour(target: Callable[[Connection], None]) -> Iterator[Call]:
    """Another process that does what ``target`` does for each word; a call that has it do so, and waits."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs,), daemon=True)
    child.start()
    theirs.close()

    def ask() -> None:
        ours.send("go")
        if not ours.poll(START_SECONDS):
            raise TimeoutError(f"the other process said nothing for {START_SECONDS:g} s")
        ours.recv()

    try:
        ask()
        yield ask
    finally:
        child.kill()
        child.join()
        ours.close()


def _busy(pipe: Connection) -> None:
    """A little work on the same card, and its end."""
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    weights = torch.zeros(1 << 20, device="cuda")
    while pipe.recv():
        weights.add_(1.0)
        torch.cuda.synchronize()
        pipe.send("done")


if __name__ == "__main__":
    sys.exit(main())
