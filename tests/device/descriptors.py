"""What the descriptors and threads of a process are, told from /proc: kinds without numbers, and each by itself."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections import Counter
from pathlib import Path

STATES = {"01": "open", "06": "time-wait", "08": "close-wait", "0A": "listens"}


def kinds(pid):
    """How many of each kind there are."""
    return dict(Counter(re.sub(r"\d+", "N", one.partition(" ")[2]) for one in each(pid)))


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


def each(pid):
    """``number what it is``, in the order of numbers; of a socket also its ends."""
    ends, found = sockets(pid), []
    for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{number}")
            inode = re.fullmatch(r"socket:\[(\d+)\]", link)
            found.append(f"{number} {ends.get(inode[1], 'socket that is nowhere') if inode else link}")
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
