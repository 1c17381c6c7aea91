"""What the descriptors and threads of a process are, told from /proc: kinds without numbers, and each by itself."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections import Counter
from pathlib import Path

NOWHERE = "socket that is nowhere"
STATES = {"01": "open", "06": "time-wait", "08": "close-wait", "0A": "listens"}


def kinds(pid):
    """How many of each kind there are."""
    return dict(Counter(kind(one.partition(" ")[2]) for one in each(pid)))


def kind(what):
    """Without what differs between two of a kind."""
    return re.sub(r"\d+", "N", re.sub(r"(/nccl-(socket-)?)[^\s(]*", r"\1N", what))


def of_nccl(grown, communicators):
    """Those of ``grown`` (as `more` gives it) that NCCL leaves behind: at most two for each of so many communicators.

    Its abort leaves sockets that were never connected. Of a communicator that lives, more or less may be connected.
    """
    most = {NOWHERE: 2 * communicators, "tcp N.N.N.N:N to N.N.N.N:N open": 2}
    return {kind: counts for kind, counts in grown.items() if counts[1] - counts[0] <= most.get(kind, 0)}


def threads(pid):
    """How many of each name there are."""
    names = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            names[re.sub(r"\d+", "N", (task / "comm").read_text().strip())] += 1
    return dict(names)


def more(before, after):
    """What there is more of: [before, after] by kind."""
    return {kind: [before.get(kind, 0), n] for kind, n in after.items() if n > before.get(kind, 0)}


def excused(found, communicators):
    """Take out of what has grown (by ``NAME`` and ``kinds of NAME``) what NCCL leaves, see `of_nccl`; give it back."""
    taken = {}
    for name in [name.removeprefix("kinds of ") for name in found if name.startswith("kinds of mover")]:
        kinds = found[f"kinds of {name}"]
        taken[name] = of_nccl(kinds, communicators)
        if taken[name] == kinds:
            del found[name], found[f"kinds of {name}"]
    return taken


def each(pid):
    """``number what it is``, in the order of numbers; of a socket also its ends."""
    ends, found = sockets(pid), []
    for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{number}")
            inode = re.fullmatch(r"socket:\[(\d+)\]", link)
            found.append(f"{number} {ends.get(inode[1], NOWHERE) if inode else link}")
    return found


def sockets(pid):
    """What is said of each socket of the process's network, by inode."""
    found = {}
    for family in ("tcp", "tcp6", "udp", "udp6"):
        for words in _table(pid, family):
            state = STATES.get(words[3], words[3])
            found[words[9]] = f"{family} {_address(words[1])} to {_address(words[2])} {state}"
    for words in _table(pid, "unix"):
        found[words[6]] = f"unix {words[7] if len(words) > 7 else 'without a name'}"
    for words in _table(pid, "netlink"):
        found[words[9]] = "netlink"
    return found


def _table(pid, name):
    with contextlib.suppress(OSError):
        return [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return []


def _address(said):
    host, port = said.split(":")
    raw = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    return f"{socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)}:{int(port, 16)}"
