"""What is left after many turns, and after many moves of memory: usage: leaks.py turns|moved COUNT MODEL TRANSPORT
[SECONDS]. Prints one JSON; status 1 where anything grew but what NCCL is known to leave (`descriptors.excused`).

``turns``: a trainer loses the daemon and comes back, so the lane turns; the engines' movers live on. ``moved``: all
clients release their memory and lend other, at new addresses and at used ones. Every bit is compared after each refit,
and each has new values. ``SECONDS``: begin no other after so many.
"""

from __future__ import annotations

import json
import os
import sys
import time

import descriptors
from parties import FAKE, asked, beside

from refitd.bench import contest, models
from refitd.bench.daemon import Settings
from refitd.bench.party import ask_all, children

WARM = 4
SETTLE_SECONDS = 5.0
MOST_SHOWN = 60  # descriptors of a process that has more than it had
SLACK_BYTES = 0 if FAKE else 8 << 20  # torch's allocator takes small blocks 2 MiB at a time
READY = ("idle", "committed")


def turn(one, _step):
    """The lane under a new token, with all its sources."""
    before, deadline = one.daemon.lanes()[0]["token"], time.monotonic() + 30
    ask_all([one.trainers[1]], "again")
    while True:
        lane = one.daemon.lanes()[0]
        if lane["token"] > before and lane["stage"] in READY and len(lane["sources"]) == models.TRAINERS:
            return 0
        assert time.monotonic() < deadline, lane
        time.sleep(0.01)


def moved(one, step):
    """How many clients have memory at the address of what they had before."""
    return int(sum(ask_all([*one.engines, *one.trainers], "moved", step)))


def processes(one):
    """The pid of everybody who may keep something, by name."""
    pids = {"daemon": one.daemon.pid, **{f"mover {key}": pid for key, pid in one.daemon.movers().items()}}
    pids |= {f"fork server {i}": pid for i, pid in enumerate(children(one.daemon.pid))}
    pids |= {client.name: client.pid for client in (*one.engines, *one.trainers)}
    return {name: pid for name, pid in pids.items() if pid}


def look(one, card):
    """Free bytes of the card, and descriptors and threads of every process, by name."""
    pids = processes(one)
    return {
        "free": asked(card, "free"),
        "fds": {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
        "kinds": {name: descriptors.kinds(pid) for name, pid in pids.items()},
        "threads": {name: descriptors.threads(pid) for name, pid in pids.items()},
    }


def grown(before, after):
    """What is more than it was, by name."""
    found = {name: [n, after["fds"].get(name, 0)] for name, n in before["fds"].items() if after["fds"].get(name, 0) > n}
    movers = [name for name in before["threads"] if name.startswith("mover")]
    for what, names in (("kinds", list(found)), ("threads", movers)):
        for name in names:
            if more := descriptors.more(before[what][name], after[what].get(name, {})):
                found[f"{what} of {name}"] = more
    if after["free"] < before["free"] - SLACK_BYTES:
        found["device memory"] = [before["free"], after["free"]]
    return found


def main():
    what, count, name, transport, *more = sys.argv[1:]
    cycle, seconds = {"turns": turn, "moved": moved}[what], float(more[0]) if more else float("inf")
    card, clock = beside(), Clock(seconds)
    try:
        with contest.refit(models.model(name), transport, "cuda", Settings(bucket_bytes=8 << 20, traced=True)) as one:
            one.round(0)
            clock.lap("start")
            for step in range(1, WARM + 1):
                cycle(one, step)
                one.round(step)
            clock.lap("warm")
            before, same = look(one, card), 0
            done, movers, counts = 0, one.daemon.movers(), []
            while done < int(count) and (not clock.over or done % 2):
                done += 1
                same += cycle(one, WARM + done)
                clock.lap(what)
                one.round(WARM + done)
                clock.lap("refit")
                counts.append(list(look(one, card)["fds"].values()))
                print(f"{done}: {clock.last(2)} s, descriptors {counts[-1]}", file=sys.stderr, flush=True)
            after, deadline = look(one, card), time.monotonic() + SETTLE_SECONDS
            communicators = done if (what, transport) == ("turns", "nccl") else 0
            while True:
                left = grown(before, after)
                of_nccl = descriptors.excused(left, communicators) if communicators else {}
                if not left or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
                after = look(one, card)
            clock.lap("settle")
            named = {name: pid for name, pid in processes(one).items() if f"kinds of {name}" in left}
            open_now = {name: descriptors.each(pid)[-MOST_SHOWN:] for name, pid in named.items()}
            kept = [key for key, pid in one.daemon.movers().items() if pid == movers[key]]
            turned = sum('"lane_turned"' in line for line in one.lines())
    finally:
        card.end()
    print(json.dumps({
        "what": what, "model": name, "transport": transport, "cycles": done, "seconds": clock.laps, "turns": turned,
        "movers_that_lived": kept, "same_address": same, "grown": left, "of_nccl": of_nccl,
        "descriptors": counts, "open": open_now, "before": before, "after": after,
    }))  # fmt: skip
    return 1 if left else 0


class Clock:
    """Seconds between laps, by name; ``over`` when more than ``seconds`` have passed since it was made."""

    def __init__(self, seconds):
        self._began = self._at = time.monotonic()
        self._seconds, self._last, self.laps = seconds, [], {}

    def lap(self, name):
        now = time.monotonic()
        self._last.append(round(now - self._at, 3))
        self.laps.setdefault(name, []).append(self._last[-1])
        self._at = now

    def last(self, count):
        return self._last[-count:]

    @property
    def over(self):
        return time.monotonic() > self._began + self._seconds


if __name__ == "__main__":
    sys.exit(main())
