"""A fake NCCL for machines without a GPU: ranks are threads or processes of one host, and bytes go over Unix sockets.

It keeps to the library's manners: calls return before they are done, a dead peer of the same host gives no error at
all, one of another host gives ncclRemoteError which shrink then repeats, and abort frees everything. `Faults` makes
any call hang or fail, at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from refitd.errors import CommunicatorError
from refitd.mover.nccl.library import GROWS_FROM, ID_BYTES, IN_PROGRESS, SETTLED, Part, numbers

_REMOTE = "RemoteError"
_RANK_BYTES = 4


class Faults:
    """Which calls hang or fail: names are ``init, exchange, revoke, abort, shrink, grow``. May change at any time.

    ``network``: ranks are on hosts of their own, so that a peer's death is an error. ``file``: a JSON object with the
    same fields, read at each call, for processes.
    """

    def __init__(self, network: bool = False, file: Path | None = None) -> None:
        self.hang: set[str] = set()
        self.fail: dict[str, str] = {}
        self.network, self._file = network, file

    def check(self, call: str) -> None:
        """Raises CommunicatorError where ``call`` is to fail."""
        self._read()
        if call in self.fail:
            raise CommunicatorError(call, self.fail[call])

    def hangs(self, call: str) -> bool:
        self._read()
        return call in self.hang

    def _read(self) -> None:
        if self._file is not None and self._file.exists():
            said = json.loads(self._file.read_text())
            self.hang, self.fail = set(said.get("hang", ())), dict(said.get("fail", {}))
            self.network = bool(said.get("network", self.network))


class FakeNccl:
    """One process's library, or one thread's: each rank may have its own ``faults``."""

    def __init__(self, faults: Faults | None = None, version: str = "2.30.7") -> None:
        self.faults, self.version = faults or Faults(), version

    def unique_id(self) -> bytes:
        self.faults.check("init")
        return os.urandom(16).hex().encode().ljust(ID_BYTES, b"\0")

    def init(self, size: int, rank: int, id_: bytes, name: str) -> FakeComm:
        self.faults.check("init")
        return FakeComm(self, size, rank, f"{id_.rstrip(bytes(1)).decode()}", name, "init")

    def join(self, size: int, rank: int, id_: bytes, name: str) -> FakeComm:
        self._require_grow()
        self.faults.check("grow")
        return FakeComm(self, size, rank, f"{id_.rstrip(bytes(1)).decode()}", name, "grow")

    def _require_grow(self) -> None:
        if numbers(self.version) < GROWS_FROM:
            raise CommunicatorError("grow", "FunctionNotFoundError: ncclCommGrow is not found")


class FakeComm:
    """A socket to each peer, made by a thread of its own, and two more threads a peer that move bytes."""

    def __init__(self, library: FakeNccl, size: int, rank: int, id_: str, name: str, call: str) -> None:
        self.size, self.rank, self.name = size, rank, name
        self._library, self._id, self._call = library, id_, call
        self._peers: dict[int, _Peer] = {}
        self._state, self._revoked, self._children = IN_PROGRESS, False, 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._connect, name="fake nccl connects", daemon=True)]
        self._threads[0].start()

    def state(self) -> str:
        if self._revoked and self._library.faults.hangs("revoke"):
            return IN_PROGRESS
        return self._state

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], after: Sequence[object] = ()) -> _FakeWork:
        del after  # a device that is the host has no events
        self._library.faults.check("exchange")
        if self._state != SETTLED or self._revoked:
            raise CommunicatorError("exchange", self._state or "InvalidUsage: revoked")
        work = _FakeWork(self, len(sends) + len(receives))
        own = [[part for part in parts if part.peer == self.rank] for parts in (sends, receives)]
        for sent, got in zip(*own, strict=True):
            ctypes.memmove(got.address, sent.address, got.nbytes)
            work.parts_done(2)
        for part in (part for part in sends if part.peer != self.rank):
            self._peers[part.peer].outgoing.put((part, work))
        for part in (part for part in receives if part.peer != self.rank):
            self._peers[part.peer].incoming.put((part, work))
        return work

    def revoke(self) -> None:
        self._library.faults.check("revoke")
        self._revoked = True

    def abort(self) -> None:
        while self._library.faults.hangs("abort"):
            time.sleep(0.01)
        self._stop.set()
        self._threads[0].join()
        for peer in self._peers.values():
            peer.close()
        self._state = "aborted"

    def shrink(self, excluded: Sequence[int], broken: bool, name: str) -> FakeComm:  # noqa: ARG002  it always works
        faults = self._library.faults
        faults.check("shrink")
        if self._state not in (SETTLED, IN_PROGRESS):
            raise CommunicatorError("shrink", self._state)
        kept = [rank for rank in range(self.size) if rank not in set(excluded)]
        child = f"{self._id}.s{self._next()}-{'-'.join(map(str, kept))}"
        return FakeComm(self._library, len(kept), kept.index(self.rank), child, name, "shrink")

    def grow_id(self) -> bytes:
        self._library._require_grow()
        self._library.faults.check("grow")
        return f"{self._id}.g{self._children + 1}".encode().ljust(ID_BYTES, b"\0")

    def grow(self, size: int, id_: bytes | None, name: str) -> FakeComm:  # noqa: ARG002  ranks know the next id
        self._library._require_grow()
        self._library.faults.check("grow")
        return FakeComm(self._library, size, self.rank, f"{self._id}.g{self._next()}", name, "grow")

    def _next(self) -> int:
        self._children += 1
        return self._children

    def lost(self) -> None:
        """A peer is gone: on another host that is an error, on this one nobody says so."""
        if self._library.faults.network and not self._stop.is_set():
            self._state = _REMOTE

    def holds(self) -> bool:
        """Whether work is to hang for now."""
        return self._revoked or self._library.faults.hangs("exchange")

    @property
    def stopped(self) -> threading.Event:
        return self._stop

    def _connect(self) -> None:
        """All to all: to the lower ranks, from the higher ones."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address(self.rank))
        listener.listen(self.size)
        listener.settimeout(0.02)
        with listener:
            while len(self._peers) < self.size - 1 and not self._stop.is_set():
                if self._library.faults.hangs(self._call):
                    time.sleep(0.01)
                    continue
                for rank in range(self.rank):
                    if rank not in self._peers:
                        self._reach(rank)
                with contextlib.suppress(TimeoutError):
                    sock, _address = listener.accept()
                    self._peers[int.from_bytes(sock.recv(_RANK_BYTES), "little")] = _Peer(self, sock)
        if not self._stop.is_set():
            self._state = SETTLED

    def _address(self, rank: int) -> str:
        return f"\0refitd-nccl/{self._id}/{rank}"

    def _reach(self, rank: int) -> None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(self._address(rank))
            sock.sendall(self.rank.to_bytes(_RANK_BYTES, "little"))
        except OSError:
            sock.close()
        else:
            self._peers[rank] = _Peer(self, sock)


class _FakeWork:
    def __init__(self, comm: FakeComm, parts: int) -> None:
        self._comm, self._left, self._lock = comm, parts, threading.Lock()

    def parts_done(self, count: int) -> None:
        with self._lock:
            self._left -= count

    def done(self) -> bool:
        state = self._comm.state()
        if state not in (SETTLED, IN_PROGRESS):
            raise CommunicatorError("exchange", state)
        return self._left == 0


class _Peer:
    """One connection; each direction has a queue and a thread."""

    def __init__(self, comm: FakeComm, sock: socket.socket) -> None:
        self._comm, self._sock = comm, sock
        self.outgoing: queue.Queue[tuple[Part, _FakeWork] | None] = queue.Queue()
        self.incoming: queue.Queue[tuple[Part, _FakeWork] | None] = queue.Queue()
        sock.settimeout(None)
        self._threads = [
            threading.Thread(target=self._serve, args=(self.outgoing, self._send), name="fake nccl sends", daemon=True),
            threading.Thread(
                target=self._serve, args=(self.incoming, self._receive), name="fake nccl takes", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, parts: queue.Queue[tuple[Part, _FakeWork] | None], move: object) -> None:
        while (item := parts.get()) is not None:
            part, work = item
            while self._comm.holds() and not self._comm.stopped.wait(0.005):
                pass
            if self._comm.stopped.is_set():
                return
            view = memoryview((ctypes.c_uint8 * part.nbytes).from_address(part.address)).cast("B")
            try:
                move(view)  # type: ignore[operator]
            except OSError:
                self._comm.lost()
                return
            work.parts_done(1)

    def _send(self, view: memoryview) -> None:
        self._sock.sendall(view)

    def _receive(self, view: memoryview) -> None:
        while view:
            got = self._sock.recv_into(view)
            if not got:
                raise ConnectionResetError
            view = view[got:]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for parts in (self.outgoing, self.incoming):
            parts.put(None)
        for thread in self._threads:
            thread.join()
        self._sock.close()
