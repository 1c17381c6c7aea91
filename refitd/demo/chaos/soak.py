"""Turn after turn of one lane, and what is left behind: ``python -m refitd.demo.chaos soak``.

Two daemons on a real etcd. One engine rank of a replica leaves and comes back, as a new process would, so that its lane
is closed and made anew; a second replica is left alone; now and then a publication goes to both. I8: descriptors,
threads, memory, mappings, shared memory and keys are where they were.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import refitd
from refitd.demo.cluster import descendants
from refitd.hook.engine import Engine
from refitd.hook.memory import shared_empty
from refitd.hook.trainer import Trainer
from refitd.store import Store, open_store
from refitd.store.cluster import EtcdCluster
from refitd.testing import LocalDaemon, split_layout, wait_until

JOB = "soak"
SPEC = {"w": ((64, 64), "float32")}
WARM_TURNS = 30
PUBLISH_EVERY = 3
SECONDS = 60.0
SETTLE_SECONDS = 1.0
MEMORY_MARGIN = 24 << 20  # bytes of a process that allocators may keep
_QUICK = {"job.join_debounce": 0.01, "job.flaps": 1_000_000, "job.pause": 0.1}  # a rank that nobody calls is slow


def settled(daemons: list[LocalDaemon], store: Store) -> dict[str, int]:
    """`measure`, once two looks in a row have found the same processes, descriptors and threads."""
    last: dict[str, int] = {}

    def same() -> bool:
        nonlocal last
        before = last
        try:
            last = measure(daemons, store)
        except FileNotFoundError:  # a process that is just ending
            last = {}
        counts = ("processes", "descriptors", "threads", "keys")
        return bool(last and before) and all(last[name] == before[name] for name in counts)

    time.sleep(SETTLE_SECONDS)
    wait_until(same, "two equal looks", SECONDS)
    return last


def measure(daemons: list[LocalDaemon], store: Store) -> dict[str, int]:
    """What the daemons, their fork servers and movers hold, all together; and keys of the store."""
    pids = [pid for daemon in daemons for pid in (daemon.pid, *descendants(daemon.pid))]
    maps = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    status = [dict(_lines(Path(f"/proc/{pid}/status").read_text())) for pid in pids]
    return {
        "processes": len(pids),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "threads": sum(int(s["Threads"]) for s in status),
        "memory": sum(int(s["VmRSS"].split()[0]) << 10 for s in status),
        "mappings": sum("memfd:refitd" in line for line in maps),
        "shared files": len(os.listdir("/dev/shm")),
        "keys": len(store.list(f"/refitd/{JOB}/")[0]),
    }


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def grown(before: dict[str, int], after: dict[str, int], processes: int) -> list[str]:
    """What is not at its baseline; memory may grow by what allocators keep."""
    margins = dict.fromkeys(before, 0) | {"memory": MEMORY_MARGIN * processes}
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if after[name] > before[name] + margins[name]]


class Soak:
    """The cluster, and a turn of it."""

    def __init__(self, stack: ExitStack) -> None:
        etcd = stack.enter_context(EtcdCluster(1))
        self.store = open_store(etcd.url)
        stack.callback(self.store.close)
        self.daemons = [stack.enter_context(LocalDaemon(etcd.url, name=name, config=_QUICK)) for name in "ab"]
        self._trainer = stack.enter_context(self._connect_trainer())
        self._memory = {key: {"w": shared_empty((64 * 64 // 2,), torch.float32)} for key in ("r0 0", "r0 1", "r1 0")}
        self._memory["r1 0"] = {"w": shared_empty((64 * 64,), torch.float32)}
        self._staying = {
            "r0 0": stack.enter_context(self._engine("r0", 0, 2)),
            "r1 0": stack.enter_context(self._engine("r1", 0, 1)),
        }
        self._weights = {"w": shared_empty((64 * 64,), torch.float32)}
        self._step = 0

    @contextmanager
    def _connect_trainer(self) -> Iterator[Trainer]:
        with refitd.connect_trainer(JOB, "run", 0, 1, self.daemons[0].socket) as trainer:
            trainer.plan_seconds = SECONDS
            trainer.register(split_layout(SPEC, 0, 1))
            yield trainer

    @contextmanager
    def _engine(self, replica: str, rank: int, world: int) -> Iterator[Engine]:
        with refitd.connect_engine(JOB, replica, rank, world, self.daemons[1].socket) as engine:
            engine.register(split_layout(SPEC, rank, world))
            yield engine

    def turn(self, publish: bool) -> None:
        """The rank comes, its lane is made, and perhaps used; the rank goes, and its lane is closed."""
        with self._engine("r0", 1, 2) as coming:
            wait_until(lambda: self._members() == 2, "the lane is made", SECONDS)
            if publish:
                self._refit(coming)
        wait_until(lambda: self._members() == 0, "the lane is closed", SECONDS)

    def _members(self) -> int:
        lanes = self.daemons[1].status()["jobs"].get(JOB, {}).get("lanes", [])
        return next((len(lane["members"]) for lane in lanes if lane["replica"] == "r0"), 0)

    def _refit(self, coming: Engine) -> None:
        self._step += 1
        self._weights["w"].fill_(self._step)
        offer = self._trainer.publish(self._step, self._weights)
        engines = {**self._staying, "r0 1": coming}
        try:
            _receive_all(engines, self._memory)
        except RuntimeError as error:
            raise RuntimeError(f"{error}; the offer was {offer.released(1.0)}: {offer.reason}") from error
        offer.released(SECONDS)
        report = offer.committed(SECONDS)
        wrong = [key for key, memory in self._memory.items() if not bool((memory["w"] == self._step).all())]
        if wrong or sorted(report.committed) != ["r0", "r1"]:
            raise RuntimeError(f"step {self._step}: {wrong} have other weights; {report}")


def _receive_all(engines: dict[str, Engine], memory: dict[str, dict[str, torch.Tensor]]) -> None:
    """Every rank in a thread of its own, as workers would: the ticket of the lead goes to all ranks of its replica."""
    from concurrent.futures import ThreadPoolExecutor

    tickets = {replica: engines[f"{replica} 0"].pending(wait=SECONDS) for replica in ("r0", "r1")}
    with ThreadPoolExecutor(len(engines)) as pool:
        jobs = []
        for key, engine in engines.items():
            ticket = tickets[key.split()[0]]
            if ticket is None:
                raise RuntimeError(f"{key}: no ticket within {SECONDS:g} s")
            jobs.append(pool.submit(engine.receive, ticket, memory[key], SECONDS))
        for job in jobs:
            job.result()


def main(turns: int) -> int:
    """Run it; the exit status is 1 where anything has grown."""
    with ExitStack() as stack:
        soak = Soak(stack)
        began = time.monotonic()
        for number in range(WARM_TURNS):
            soak.turn(number % PUBLISH_EVERY == 0)
        before = settled(soak.daemons, soak.store)
        for number in range(turns):
            soak.turn(number % PUBLISH_EVERY == 0)
            if number % 100 == 99:
                print(f"{number + 1} turns: {settled(soak.daemons, soak.store)}", file=sys.stderr, flush=True)
        after = settled(soak.daemons, soak.store)
        why = grown(before, after, before["processes"])
    seconds = round(time.monotonic() - began, 1)
    result: dict[str, Any] = {"ok": not why, "turns": turns, "seconds": seconds, "before": before, "after": after}
    print(json.dumps({**result, "grown": why}))
    return 1 if why else 0
