"""What is left after many turns, and after many moves of memory: usage: leaks.py turns|moved COUNT MODEL TRANSPORT
[SECONDS]. Prints one JSON; status 1 where anything grew.

``turns``: a trainer loses the daemon and comes back, so the lane turns; the engines' movers live on. ``moved``: all
clients release their memory and lend other, at new addresses and at used ones. Every bit is compared after each refit,
and each has new values. ``SECONDS``: begin no other after so many.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections import Counter

from parties import FAKE, asked, beside

from refitd.bench import contest, models
from refitd.bench.daemon import Settings
from refitd.bench.party import ask_all, children

WARM = 4
SETTLE_SECONDS = 15.0
SLACK_BYTES = 0 if FAKE else 32 << 20  # torch's allocator takes blocks of 2 and 20 MiB
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


def look(one, card):
    """Free bytes of the card, and descriptors and threads of every process, by name."""
    pids = {"daemon": one.daemon.pid, **{f"mover {key}": pid for key, pid in one.daemon.movers().items()}}
    pids |= {f"fork server {i}": pid for i, pid in enumerate(children(one.daemon.pid))}
    pids |= {client.name: client.pid for client in (*one.engines, *one.trainers)}
    return {
        "free": asked(card, "free"),
        "fds": {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items() if pid},
        "kinds": {name: kinds(pid) for name, pid in pids.items() if pid},
        "threads": {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in pids.items() if pid},
    }


def kinds(pid):
    """How many descriptors of each kind a process has: what they link to, without numbers."""
    found = Counter()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found[re.sub(r"\d+", "N", os.readlink(f"/proc/{pid}/fd/{number}"))] += 1
    return dict(found)


def grown(before, after):
    """What is more than it was, by name."""
    found = {name: [n, after["fds"].get(name, 0)] for name, n in before["fds"].items() if after["fds"].get(name, 0) > n}
    if after["free"] < before["free"] - SLACK_BYTES:
        found["device memory"] = [before["free"], after["free"]]
    return found


def main():
    what, count, name, transport, *more = sys.argv[1:]
    cycle, seconds = {"turns": turn, "moved": moved}[what], float(more[0]) if more else float("inf")
    card = beside()
    try:
        with contest.refit(models.model(name), transport, "cuda", Settings(bucket_bytes=8 << 20, traced=True)) as one:
            one.round(0)
            for step in range(1, WARM + 1):
                cycle(one, step)
                one.round(step)
            before, began, same = look(one, card), time.monotonic(), 0
            done, movers = 0, one.daemon.movers()
            while done < int(count) and (time.monotonic() < began + seconds or done % 2):
                done += 1
                same += cycle(one, WARM + done)
                one.round(WARM + done)
            took = time.monotonic() - began
            after, deadline = look(one, card), time.monotonic() + SETTLE_SECONDS
            while (left := grown(before, after)) and time.monotonic() < deadline:
                time.sleep(0.2)
                after = look(one, card)
            kept = [key for key, pid in one.daemon.movers().items() if pid == movers[key]]
            turned = sum('"lane_turned"' in line for line in one.lines())
    finally:
        card.end()
    print(json.dumps({
        "what": what, "model": name, "transport": transport, "cycles": done, "seconds": took, "turns": turned,
        "movers_that_lived": kept, "same_address": same, "grown": left, "before": before, "after": after,
    }))  # fmt: skip
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
