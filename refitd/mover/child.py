"""The mover process: a control loop over the daemon's commands. Lanes do the work in threads of their own."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from refitd.errors import DeviceError, InputError, ProtocolError
from refitd.failpoints import effect
from refitd.hook.memfd import read_document
from refitd.hook.wire import Connection, Message
from refitd.mover.board import LaneFacts
from refitd.mover.commands import check_command, parse_connect, parse_run
from refitd.mover.lane import NOTHING, Lane
from refitd.mover.limit import NO_LIMIT, Limit
from refitd.mover.memory import Memory, mount, raise_descriptor_limit
from refitd.mover.transport.peer import Warm
from refitd.plan.program import SENT, Program
from refitd.stamps import stamp

if TYPE_CHECKING:
    from refitd.mover.cuda.mounts import Devices
    from refitd.mover.nccl.transport import Group

STAND_BY_SECONDS, AWAKE_SECONDS = 0.003, 0.001  # how long to watch for a run, and how often to wake a device for it
MOST_COMMUNICATORS = 500  # NCCL's abort leaves a descriptor open now and then; a process may have 4096 of them, or more


class Mover:
    """Carries out commands for rank ``key``. ``send`` reports to the daemon and may be called from any thread.

    A ``guest`` runs in the process of the client whose rank it is.
    """

    def __init__(self, key: str, send: Callable[[Message], None], guest: bool = False) -> None:
        self.key, self._guest = key, guest
        self._send = send
        self._memories: dict[str, Memory] = {}
        self._lanes: dict[str, Lane] = {}
        self._limit = NO_LIMIT
        self._store_away = False
        self._devices: Devices | None = None
        self._communicators = 0  # that were wanted of this process so far
        self._standing: Lane | None = None  # that was told to stand by, and has not yet
        self._revoked: dict[str, int] = {}
        self._early: dict[tuple[str, int], list[tuple[str, socket.socket]]] = {}
        self._handlers: Mapping[str, Callable[[Message, list[int]], None]] = {
            "mount": self._mount, "unmount": self._unmount, "build": self._build, "edge": self._edge,
            "run": self._run, "ready": self._ready, "revoke": self._revoke, "ping": self._ping,
            "limit": self._take_limit, "store": self._heed_store, "stand_by": self._take_stand_by,
        }  # fmt: skip

    def handle(self, message: Message, fds: list[int]) -> bool:
        """Carry out one command and close its ``fds``; False after ``quit``. Raises InputError where it is corrupt."""
        try:
            kind = check_command(message)
            if kind == "quit":
                return False
            self._handlers[kind](message, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def stand_by(self, is_called: Callable[[], bool]) -> None:
        """After a `stand_by`: wake the device, and watch for the next command instead of sleeping, for a moment.

        A guest only wakes the device: its process's time is the client's. Raises DeviceError.
        """
        lane, self._standing = self._standing, None
        end = time.monotonic() + STAND_BY_SECONDS
        while lane is not None and not is_called() and time.monotonic() < end:
            if not lane.stand_by() or self._guest:
                return
            soon = time.monotonic() + AWAKE_SECONDS
            while not is_called() and time.monotonic() < soon:
                pass

    def close(self) -> None:
        """Revoke every lane and let go of all memory. A device that is broken is said, and stands in nobody's way."""
        for lane in self._lanes.values():
            lane.revoke()
        self._lanes.clear()
        for key in list(self._memories):
            try:
                self._let_go(key)
            except DeviceError as error:
                print(f"mover {self.key}: memory of {key}: {error}", file=sys.stderr)  # noqa: T201
        self._drop_early(lambda _key: True)
        if self._devices is not None:
            self._devices.close()
        if self._limit is not NO_LIMIT:
            self._limit.close()
            self._limit = NO_LIMIT

    # -- memory

    def _mount(self, message: Message, fds: list[int]) -> None:
        key, present = message["memory"], self._memories.get(message["memory"])
        spent: dict[str, float] = {}
        try:
            if message.get("device") is not None:
                self._let_go(key)
                devices = self._on_devices()
                self._memories[key], spent = devices.mount(message, fds), devices.spent.seconds
            else:
                self._memories[key] = mount(message, fds, present)
                if present is not None:
                    present.close()
        except (ProtocolError, DeviceError, OSError) as error:
            self._let_go(key)
            self._send({"kind": "failed", "memory": key, "reason": f"{type(error).__name__}: {error}"})
        else:
            self._send({"kind": "mounted", "memory": key, "spent": dict(spent)})

    def _unmount(self, message: Message, _fds: list[int]) -> None:
        self._let_go(message["memory"])
        if message["memory"] == self.key:
            for lane in self._lanes.values():
                lane.let_go()
        self._send({"kind": "unmounted", "memory": message["memory"]})

    def _let_go(self, key: str) -> None:
        memory = self._memories.pop(key, None)
        if memory is not None:
            memory.close()
            if memory.on_device:
                self._on_devices().forget(key)

    def _on_devices(self) -> Devices:
        """Made when something of a device is first heard of: a mover without one loads nothing for it."""
        if self._devices is None:
            from refitd.mover.cuda.mounts import Devices

            self._devices = Devices(self.key, guest=self._guest)
        return self._devices

    # -- lanes

    def _build(self, message: Message, fds: list[int]) -> None:
        name, token = message["lane"], message["token"]
        current = self._lanes.get(name)
        if self._is_stale(message) or (current is not None and current.token >= token):
            self._refuse(message, "stale token")
            return
        if current is not None:
            current.revoke()
            self._revoked[name] = max(current.token, self._revoked.get(name, 0))
        program = self._program(message["rank"], fds)
        facts = LaneFacts(message["job"], name, token, message["rank"], message["secret"], program.plan_digest)
        connect, accept = parse_connect(message), message["accept"]
        timeout = message.get("timeout", 10.0)
        warm = self._warm(message.get("device"), program)
        group = self._group(message)
        lane = Lane(facts, program, self._memories, self._send, connect, accept, timeout, self._limit, warm, group)
        self._lanes[name] = lane
        lane.heed_store(self._store_away)
        lane.start()
        for src, sock in self._early.pop((name, token), ()):
            lane.attach(src, sock)
        self._drop_early(lambda key: key[0] == name and key[1] < token)

    def _warm(self, uuid: str | None, program: Program) -> Warm | None:
        """What gets kernels ready for what this rank will read on its host, if its weights are on a device."""
        if uuid is None or all(bucket.link in SENT for bucket in program.receives()):
            return None
        return lambda done: self._on_devices().warm(uuid, program, done)

    def _group(self, message: Message) -> Group | None:
        """The communicator that the daemon wants for the lane's network edges; without one they go by TCP."""
        if (said := message.get("nccl")) is None:
            return None
        from refitd.mover.nccl.transport import Group

        self._communicators += 1
        uuid, host = message.get("device"), said["host"]
        return Group(tuple(said["ranks"]), lambda: self._on_devices().nccl(uuid, host))

    def _edge(self, message: Message, fds: list[int]) -> None:
        if len(fds) != 1:
            raise ProtocolError("edge fds", "one connection", str(len(fds)))
        sock = socket.socket(fileno=fds.pop())
        name, token = message["lane"], message["token"]
        lane = self._lanes.get(name)
        if lane is not None and lane.token == token:
            lane.attach(message["src"], sock)
        elif self._is_stale(message) or (lane is not None and lane.token > token):
            sock.close()
        else:
            self._early.setdefault((name, token), []).append((message["src"], sock))

    def _run(self, message: Message, fds: list[int]) -> None:
        stamp("run.heard", self.key)
        lane = self._current(message)
        if lane is not None:
            lane.run(parse_run(message), self._program(lane.facts.rank, fds) if fds else None)

    def _take_stand_by(self, message: Message, _fds: list[int]) -> None:
        """Nobody waits for it, so nobody is told where it is stale."""
        lane = self._lanes.get(message["lane"])
        self._standing = lane if lane is not None and lane.token == message["token"] else None

    def _ready(self, message: Message, _fds: list[int]) -> None:
        lane = self._current(message)
        if lane is not None:
            lane.ready(message["attempt"], message["src"], message["word"])

    def _revoke(self, message: Message, _fds: list[int]) -> None:
        name, token = message["lane"], message["token"]
        self._revoked[name] = max(token, self._revoked.get(name, 0))
        state = NOTHING
        if (lane := self._lanes.get(name)) is not None and lane.token <= token:
            state = self._lanes.pop(name).revoke()
        self._drop_early(lambda key: key[0] == name and key[1] <= token)
        self._send({"kind": "revoked", "lane": name, "token": token, **state})
        self._say_worn()

    def _say_worn(self) -> None:
        """Between lanes, ask to be replaced where NCCL may have left much behind. A guest's process is not ours."""
        if self._communicators < MOST_COMMUNICATORS or self._lanes or self._guest:
            return
        left = len(os.listdir("/proc/self/fd"))
        self._send({"kind": "worn", "reason": f"{self._communicators} communicators, {left} descriptors are open"})

    def _take_limit(self, _message: Message, fds: list[int]) -> None:
        """The page of the job's bandwidth cap; lanes that are built from here on draw on it."""
        if len(fds) != 1:
            raise ProtocolError("limit page", "one memfd", f"{len(fds)} descriptors")
        self._limit = Limit.map(fds.pop())

    def _heed_store(self, message: Message, _fds: list[int]) -> None:
        """Whether daemons can hear of each other at present: without that, no neighbour is late."""
        self._store_away = message["away"]
        for lane in self._lanes.values():
            lane.heed_store(self._store_away)

    def _ping(self, message: Message, _fds: list[int]) -> None:
        """No answer where a device hangs, as where this thread waits for it itself: the daemon starts another mover."""
        if hung := [name for name, lane in self._lanes.items() if lane.hung]:
            print(f"mover {self.key}: a launch for {', '.join(hung)} does not end", file=sys.stderr)  # noqa: T201
            return
        self._send({"kind": "pong", "n": message["n"]})

    # -- helpers

    def _current(self, message: Message) -> Lane | None:
        """The lane that the message is about, or None after it was refused."""
        lane = self._lanes.get(message["lane"])
        if lane is not None and lane.token == message["token"]:
            return lane
        stale = self._is_stale(message) or (lane is not None and lane.token > message["token"])
        self._refuse(message, "stale token" if stale else "lane is not built")
        return None

    def _is_stale(self, message: Message) -> bool:
        return int(message["token"]) <= self._revoked.get(message["lane"], -1)

    def _refuse(self, message: Message, reason: str) -> None:
        known = {name: message[name] for name in ("lane", "token")}
        attempt = message.get("attempt", 0)
        self._send({"kind": "failed", **known, "attempt": attempt, "edge": None, "reason": reason, "verified": []})

    def _program(self, rank: str, fds: list[int]) -> Program:
        if len(fds) != 1:
            raise ProtocolError("program", "one sealed memfd", f"{len(fds)} descriptors")
        program = Program.from_bytes(read_document(fds[0], "program"))
        if program.rank != rank:
            raise ProtocolError("program rank", rank, program.rank)
        return program

    def _drop_early(self, chosen: Callable[[tuple[str, int]], bool]) -> None:
        for key in [key for key in self._early if chosen(key)]:
            for _src, sock in self._early.pop(key):
                sock.close()


class Reporter:
    """One socket, many threads. ``lost`` is called where the daemon is gone: nobody is left to work for."""

    def __init__(self, connection: Connection, lost: Callable[[], None]) -> None:
        self._connection, self._lost, self._lock = connection, lost, threading.Lock()

    def send(self, message: Message) -> None:
        if message["kind"] not in ("pong", "progress"):
            effect(f"word of a mover {message['kind']}")
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            self._lost()


def obey(connection: Connection, mover: Mover, reporter: Reporter) -> None:
    """Carry out the daemon's commands until it hangs up or says quit. Raises InputError for one that is corrupt."""
    reporter.send({"kind": "started", "pid": os.getpid()})
    try:
        while mover.handle(*connection.receive()):
            mover.stand_by(connection.has_more)
    except (EOFError, ConnectionError):
        return


def main(sock: socket.socket, key: str) -> int:
    """A process that is the mover of rank ``key``; its exit status."""
    raise_descriptor_limit()
    threading.excepthook = _fatal
    connection = Connection(sock)
    reporter = Reporter(connection, lambda: os._exit(1))
    try:
        obey(connection, Mover(key, reporter.send), reporter)
    except InputError as error:
        print(f"mover {key}: corrupt command: {error}", file=sys.stderr)  # noqa: T201  the daemon's log has our stderr
        return 1
    return 0


def _fatal(args: Any) -> None:
    """A thread that dies of an error nobody foresaw takes the mover with it: the daemon starts a sound one."""
    sys.__excepthook__(args.exc_type, args.exc_value, args.exc_traceback)
    sys.stderr.flush()
    os._exit(1)
