"""Bad luck, one case after the other, each with a real daemon: usage: bad_luck.py CASE... Prints one JSON; status 1
where a case did not go as it must.

Every case: a refit that meets the bad luck, the typed error in the daemon's log, a new mover for whoever had it, the
refit committed when luck is better, and one more, both compared bit by bit. Trainers and engines are the same processes
all the while.

oom, oom-nccl: another process has filled the card when staging is first needed. illegal: a kernel runs on addresses
where nothing is. hung: one does not end. garbage, dead: a trainer lends a handle that is none, or that of a process
that has ended. no-peer: the driver refuses peer access (planted: one card cannot show it). versions: two nodes with
other versions of NCCL.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from parties import FAKE, PLANTS, Deceased, Engine, Trainer, asked, beside, plant_everywhere

from refitd.bench import clients, contest, models
from refitd.bench.daemon import Settings
from refitd.bench.party import Process, ask_all
from refitd.store.spawn import spawn_etcd
from refitd.testing import LocalDaemon

SEEN_SECONDS = 20.0
MODEL = "1GiB" if FAKE else "big"  # which the fake makes small
ENGINES, TRAINERS = ("engine/r0/0", "engine/r0/1"), ("trainer/run/0", "trainer/run/1")
OTHER_NCCL = "2.99.1"


class Case(NamedTuple):
    """``victims``: whose movers must be new ones afterwards, or ``anybody``'s. ``do``: what trainers do to publish."""

    error: str
    victims: tuple[str, ...]
    arm: Callable[[Process], object]
    heal: Callable[[Process], object] = lambda _card: None
    transport: str = "peer"
    do: str = "move"
    warm: bool = True
    anybody: bool = False


def _mark(name, text=""):
    return lambda _card: (PLANTS / name).write_text(text)


def _unmark(name):
    return lambda _card: (PLANTS / name).unlink()


def _fill(card):
    left = asked(card, "fill", 0)
    assert left < 8 << 20, f"{left} bytes are free"


def _deceased(_card):
    one = Process("deceased", Deceased)
    try:
        asked(one, "move")
    finally:
        one.end()
    (PLANTS / "lie").write_text("dead")


OOM = Case(
    r"DeviceError: [^\"]*(?:OutOfMemoryError: CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY)", (), _fill,
    lambda card: asked(card, "drop"), "tcp", warm=False, anybody=True,
)  # fmt: skip
CANNOT_OPEN = r"it cannot map trainer/run/1: DeviceError: cuIpcOpenMemHandle: CUDA_ERROR_\w+"
CASES = {
    "oom": OOM,
    "oom-nccl": OOM._replace(error=r"DeviceError: staging for a bucket: OutOfMemoryError: ", transport="nccl"),
    "illegal": Case(
        r"DeviceError: move buckets: \w+: CUDA error: an illegal memory access", ENGINES[:1],
        _mark("illegal", ENGINES[0]),
    ),
    "hung": Case("it did not answer a ping in time", ENGINES[:1], _mark("hung", ENGINES[0])),
    "garbage": Case(CANNOT_OPEN, ENGINES, _mark("lie", "garbage"), _mark("heal"), do="lying"),
    "dead": Case(CANNOT_OPEN, ENGINES, _deceased, _mark("heal"), do="lying"),
    "no-peer": Case(
        r"it cannot map trainer/run/1: DeviceError: cuCtxEnablePeerAccess: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        ENGINES, _mark("no-peer"), _unmark("no-peer"), do="far",
    ),
}  # fmt: skip


def meet(case, card):
    """What was seen, whose movers are new, and how long the refit took."""
    settings = Settings(bucket_bytes=8 << 20, traced=True)
    with contest.refit(models.model(MODEL), case.transport, "cuda", settings) as one:
        if case.warm:
            one.round(0)
        before = one.daemon.movers()
        ask_all(one.trainers, "fill", 1)
        case.arm(card)
        if case.do == "far":
            ask_all(one.trainers[1:], "far")
        began, everybody = time.monotonic(), [*one.engines, *one.trainers]
        for party in everybody:
            party.ask("lying" if case.do == "lying" and party in one.trainers else "move", 1)
        error = wait_for(lambda: seen(one.lines(), case.error), one, "the error")
        wait_for(lambda: renewed(case, before, one.daemon.movers()), one, "new movers")
        healed = time.monotonic()
        case.heal(card)
        for party in everybody:
            party.answer()
        took, exact = time.monotonic() - began, all(ask_all(one.engines, "exact", 1))
        after = one.daemon.movers()
        return {
            "error": error, "new_movers": sorted(key for key in after if after[key] != before.get(key)),
            "seconds": took, "after_heal_s": took - (healed - began), "bit_exact": exact,
            "next_refit_s": one.round(2), "deaths": sum("mover_died" in line for line in one.lines()),
        }  # fmt: skip


def seen(lines, pattern):
    """The first place where it is said."""
    return next((found.group(0) for found in map(re.compile(pattern).search, lines) if found), "")


def renewed(case, before, now):
    changed = {key for key in before if now.get(key) and now[key] != before[key]}
    return bool(changed) if case.anybody else set(case.victims) <= changed


def wait_for(probe, one, what):
    deadline = time.monotonic() + SEEN_SECONDS
    while not (found := probe()):
        tail = "\n".join(one.lines()[-30:])
        assert time.monotonic() < deadline, f"{what} did not come within {SEEN_SECONDS:g} s; the daemon:\n{tail}"
        time.sleep(0.02)
    return found


# -- two nodes


def versions(_card):
    """With ``nccl`` asked for, the lane says which versions differ; with equal ones it is built, and refits."""
    model, config = models.model(MODEL), {
        "data.transport": "nccl", "timeouts.build": 30.0, "timeouts.offer": 20.0, "log.level": "debug",
    }  # fmt: skip
    etcd = spawn_etcd(prefer="distro")
    processes, daemons = [], []
    try:
        # NCCL refuses two ranks of a host on one card: all edges count as leaving their host, so each rank is one
        daemons += [LocalDaemon(etcd.url, links="network", name=name, config=config) for name in ("a", "b")]
        daemons[1]._environ["REFITD_PLANT_NCCL"] = OTHER_NCCL
        for daemon in daemons:
            daemon.start()
        mates = socket.socketpair()
        sockets = [daemon.socket for daemon in daemons]
        trainers = [partial(Trainer, model, rank, sockets[0], "cuda") for rank in range(models.TRAINERS)]
        engines = [partial(Engine, model, rank, sockets[1], mates[rank], "cuda") for rank in range(models.ENGINES)]
        one = contest._start("versions", trainers, engines, None, processes)
        error = _wait_for_log(daemons, r"wants nccl, but [^\"]*" + re.escape(OTHER_NCCL) + r"[^\"]*")
        daemons[1]._process.terminate()
        daemons[1].wait()
        del daemons[1]._environ["REFITD_PLANT_NCCL"]
        daemons[1].start()
        ask_all(one.engines, "back")
        began = time.monotonic()
        one.round(1)
        took = time.monotonic() - began
        lane = daemons[0].status()["jobs"][clients.JOB]["lanes"][0]
        found = {
            "error": error, "seconds": took, "bit_exact": True, "transport": lane.get("transport"),
            "next_refit_s": one.round(2),
        }  # fmt: skip
        one.close()
        return found
    except BaseException:
        print(*(daemon.log[-3000:] for daemon in daemons), sep="\n", file=sys.stderr)
        raise
    finally:
        for process in processes:
            process.end()
        for daemon in daemons:
            daemon.stop()
        etcd.stop()


def _wait_for_log(daemons, pattern):
    deadline = time.monotonic() + SEEN_SECONDS
    while not (found := seen([line for daemon in daemons for line in daemon.log.splitlines()], pattern)):
        assert time.monotonic() < deadline, f"no {pattern}"
        time.sleep(0.05)
    return found


def run(name, card):
    for left in PLANTS.iterdir():
        left.unlink()
    try:
        return (versions(card) if name == "versions" else meet(CASES[name], card)) | {"ok": True}
    except Exception as error:  # noqa: BLE001  the other cases are met all the same
        asked(card, "drop")
        print(f"== {name}", traceback.format_exc()[-6000:], sep="\n", file=sys.stderr)
        return {"ok": False, "reason": f"{type(error).__name__}: {error}"[:1000]}


def main():
    plant_everywhere()
    card = beside()
    try:
        found = {name: run(name, card) for name in sys.argv[1:]}
    finally:
        card.end()
    good = all(case["ok"] and case["bit_exact"] for case in found.values())
    print(json.dumps({"ok": good, "fake": FAKE, "cases": found}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
