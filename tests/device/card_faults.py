"""A refit over several cards with a fault in it: card_faults.py FAULT LAYOUT TRANSPORT SIZE [VICTIM] [per-card=N].

Prints one JSON.
``kill``, ``stop``: SIGKILL, SIGSTOP for the mover of VICTIM (a rank key; else the last engine), half of the movers'
usual time after it has begun; ``missed`` says that it was done by then.
On the fake GPU, where no time says anything of the next: when its first bucket is done and others are not.
``per-card``: so many of the layout's cards are one.
``leave``: the last replica leaves, is done without, and joins again. Everything is on the fake GPU where
``REFITD_FAKE_GPU`` says so. Times are seconds; ``events``: what the daemons logged, milliseconds after the fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import datetime
from functools import partial

import faults

if faults.FAKE:
    import fake_bench  # noqa: F401  makes tensors of the fake GPU's memory

from refitd.bench import on_device
from refitd.bench.cards import card, contest, layouts, measure
from refitd.bench.party import Process, ask_all
from refitd.testing import wait_until

# A round that brings something in is opened; the first bucket is done.
BEGUN = ("transfer",) if faults.FAKE else ("skip-trailer", "transfer")
TOLD = ("edge", "reason", "rank", "stage", "replica", "lane", "transport", "why", "token")


def hit_victim(victim, said):
    """As the file ``armed`` says, where it is there: at once or some time after a round of the victim has begun."""
    armed = faults.folder / "armed"
    if said.get("name") in BEGUN and said.get("key") == victim and armed.exists():
        name, delay = armed.read_text().split()
        armed.unlink()
        if faults.FAKE:
            hit(said["pid"], signal.Signals[name])
            wait_until(lambda: faults.at_rest(said["pid"]), "the victim's threads to stop", faults.STOP_SECONDS)
        else:
            threading.Timer(float(delay), hit, (said["pid"], signal.Signals[name])).start()


def hit(pid, number):
    at = time.monotonic()
    os.kill(pid, number)
    (faults.folder / "hitting").write_text(str(at))
    (faults.folder / "hitting").rename(faults.folder / "hit")


def usual_span(one):
    """Seconds that the movers took in the last round."""
    marks = [found for found in map(on_device.mark, one.lines()) if found is not None]
    return on_device.round_of(one.times, marks, len(one.scene.engines)).moved


def events(one, began, ended):
    """(milliseconds since ``began``, node, event, the telling fields) of all that was said until ``ended``."""
    skew, found = time.monotonic() - time.time(), []
    for node, daemon in enumerate(one.daemons):
        for line in daemon.log.splitlines():
            try:
                said = json.loads(line)
                at = datetime.fromisoformat(said["timestamp"]).timestamp() + skew
            except (ValueError, KeyError, TypeError):
                continue
            if began - 0.002 <= at <= ended + 0.002:
                told = {name: said[name] for name in TOLD if said.get(name)}
                found.append((round((at - began) * 1e3, 1), said.get("node", node), said.get("event"), told))
    return sorted(found, key=lambda event: event[0])


def repair_steps(told):
    """Seconds from the fault to the last word of the movers that stopped (revoke and abort are done), and from the
    lane's last wiring until all had a communicator again (init).
    """
    wired = max((event[0] for event in told if event[2] == "lane_wired"), default=None)
    revoked = [event[0] for event in told if event[2] == "revoked" and (wired is None or event[0] < wired)]
    built = [event[0] for event in told if event[2] == "built" and wired is not None]
    return {
        "revoked_s": max(revoked) / 1e3 if revoked else None,
        "init_s": (max(built) - wired) / 1e3 if built else None,
    }


def first(told, *names):
    """Seconds to the first event of one of these names; None where there is none."""
    times = [event[0] for event in told if event[2] in names]
    return times[0] / 1e3 if times else None


def hit_mover(one, name, victim):
    one.round(0)
    one.round(1)
    before, ends = one.round(2), dict(one.ends)
    usual = {key: end - one.times[0] for key, end in ends.items()}
    span = usual_span(one)
    (faults.folder / "arming").write_text(f"{name} {span / 2}")
    (faults.folder / "arming").rename(faults.folder / "armed")
    during = one.round(3)
    wait_until((faults.folder / "hit").exists, "the fault", 10.0)
    hit = float((faults.folder / "hit").read_text())
    told = events(one, hit, max(one.ends.values()))
    left = dict.fromkeys(one.ends, 0)  # of an engine that nothing disturbed: all that it needs
    for (_src, dst, _link), nbytes in one.edges().items():
        left[dst] += nbytes
    return {
        "victim": victim,
        "missed": hit > max(one.ends.values()),
        "before_s": before,
        "movers_before_s": span,
        "during_s": during,
        "engines_usual_s": usual,
        "engines_with_fault_s": {key: end - one.times[0] for key, end in one.ends.items()},
        "notice_s": first(told, "mover_died", "mover_killed", "lane_failed"),
        "turn_s": first(told, "lane_turned"),
        **repair_steps(told),
        "mover_started_s": first(told, "mover_started"),
        "wired_s": first(told, "lane_wired"),
        "finish_s": max(one.ends.values()) - hit,
        "last_attempt_bytes": left,
        "refits": {replica: refits(one, replica)[0] for replica in one.scene.replicas},
        "after_s": one.round(4),
        "repairs": repairs(one),
        "events": told[:80],
    }


def repairs(one):
    """Turns by lane and why, as the daemons show them."""
    return sorted({f"{lane['replica']}: {lane['turned']}" for job in one.jobs() for lane in job["lanes"]})


def refits(one, replica):
    """The newest refits of a replica, the newest first: publication, bytes by link, outcome and what failed."""
    rows = [row for job in one.jobs() for row in job["refits"] if row["replica"] == replica]
    newest = sorted(rows, key=lambda row: (row["publication"], sum(row["moved"].values())), reverse=True)[:3]
    return [{name: row[name] for name in ("publication", "moved", "outcome", "failures")} for row in newest]


def leave_and_join(one):
    gone = one.scene.replicas[-1]
    leavers = [seat.key for seat in one.scene.engines if seat.group == gone]
    stay = [seat.key for seat in one.scene.engines if seat.group != gone]
    one.round(0)
    one.round(1)
    before = one.round(2)
    left = time.monotonic()
    ask_all([one.processes[key] for key in leavers], "close")
    closed = time.monotonic() - left
    for key in leavers:
        one.processes.pop(key).end()
    without = part(one, stay, 3)
    joined = time.monotonic()
    fresh = {key: Process(key, one.makers[key]) for key in leavers}
    one.processes.update(fresh)
    ask_all(list(fresh.values()), "start")
    registered = time.monotonic() - joined
    ends = ask_all(list(fresh.values()), "move", 3)
    assert all(ask_all(list(fresh.values()), "exact", 3)), "the joiner does not hold the newest publication"
    read = refits(one, gone)[0]["moved"]
    told = events(one, joined, max(ends))
    one.engines = [one.processes[seat.key] for seat in one.scene.engines]
    one.wait_lanes()
    return {
        "before_s": before,
        "closed_s": closed,
        "without_s": without,
        "join_registered_s": registered,
        "join_to_commit_s": max(ends) - joined,
        "joiner_read": read,
        "after_s": one.round(4),
        "repairs": repairs(one),
        "events": told[:80],
    }


def part(one, keys, step):
    """A refit of the ranks ``keys`` alone."""
    ask_all(one.trainers, "fill", step)
    engines = [one.processes[key] for key in keys]
    times = ask_all([*engines, *one.trainers], "move", step)
    assert all(ask_all(engines, "exact", step))
    return max(times[: len(keys)]) - min(times[len(keys) :])


def main():
    what, layout, transport, size, *more = [word for word in sys.argv[1:] if not word.startswith("per-card=")]
    card.share(next((int(word.partition("=")[2]) for word in sys.argv if word.startswith("per-card=")), 1))
    scene = next(scene for scene in layouts.SCENES if scene.name == layout)
    cell = measure.Cell(scene, transport, size, "512")
    victim = more[0] if more else scene.engines[-1].key
    if what == "leave":
        del os.environ["REFITD_FAILPOINTS"]
    server = faults.serve_failpoints(partial(hit_victim, victim)) if what != "leave" else 0
    settings = contest.Settings(bucket_bytes=min(cell.bucket_bytes(), measure.SIZES[size] // 16), patient=True)
    try:
        with contest.refit(scene, cell.model(), transport, settings) as one:
            found = leave_and_join(one) if what == "leave" else hit_mover(one, f"SIG{what.upper()}", victim)
            found["transports"] = one.transports()
    finally:
        if server:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
    print(json.dumps({"fault": what, "layout": layout, "transport": transport, "size": size, **found}))


if __name__ == "__main__":
    main()
