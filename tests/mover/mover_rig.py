"""Small plans, lent memory, and a stand-in for the daemon's data port, for tests of the mover."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from refitd.hook.memfd import create_memory
from refitd.hook.page import ControlPage
from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.board import LaneFacts
from refitd.mover.lane import Lane
from refitd.mover.memory import Memory, mount
from refitd.mover.round import RunOptions
from refitd.mover.transport.tcp import Address
from refitd.plan.execute import Array
from refitd.plan.program import NETWORK, Bucket, Program, StorageRef

SECRET, JOB, LANE, DIGEST = "s3cret", "job", "r0", "d" * 32
PATIENCE = 30.0  # seconds; a loaded machine may let a lane wait where nothing is wrong
TRAINERS = ("trainer/run/0", "trainer/run/1")
ENGINES = ("engine/r0/0", "engine/r0/1")


class Lent:
    """A rank's memory: one memfd a storage and a control page, as a client would lend them."""

    def __init__(self, key: str, storages: Mapping[str, tuple[int, str]]) -> None:
        self.key = key
        self.page = ControlPage.create()
        self.described: list[dict[str, Any]] = []
        self.fds: list[int] = []
        self.arrays: dict[str, Array] = {}
        for name, (numel, dtype) in storages.items():
            nbytes = numel * ITEMSIZE[dtype]
            self.described.append({"name": name, "fd": len(self.fds), "offset": 0, "nbytes": nbytes, "dtype": dtype})
            self.fds.append(create_memory(name, nbytes))
        self._own = mount(self.message(writable=True), [*self.fds, self.page.fd])
        self.arrays = self._own.arrays

    def message(self, writable: bool) -> dict[str, Any]:
        return {
            "kind": "mount", "memory": self.key, "storages": self.described, "writable": writable, "word_index": 0,
        }  # fmt: skip

    def mounted(self, writable: bool) -> Memory:
        return mount(self.message(writable), [*self.fds, self.page.fd])

    def close(self) -> None:
        self.page.close()
        for fd in self.fds:
            os.close(fd)


class Sketch:
    """A plan written down by hand: buckets with their moves, from which each rank's program follows."""

    def __init__(self, storages: Sequence[tuple[str, str, str, int]], digest: str = DIGEST) -> None:
        self.storages = [StorageRef(*row) for row in storages]
        self.digest = digest
        self._moves: list[list[int]] = []
        self.buckets: list[Bucket] = []

    def add(self, src: str, dst: str, link: str, moves: Sequence[tuple[Any, ...]], stage: int = 0) -> int:
        """A bucket; moves are rows of (src name, offset, strides, dst name, offset, strides, rows, columns)."""
        first, nbytes = len(self._moves), 0
        for row in moves:
            s, d = self._index(src, row[0]), self._index(dst, row[4])
            self._moves.append([s, *row[1:4], d, *row[5:]])
            nbytes += row[8] * row[9] * ITEMSIZE[self.storages[d].dtype]
        id_ = len(self.buckets)
        self.buckets.append(Bucket(id_, src, dst, link, stage, nbytes, first, len(self._moves)))
        return id_

    def program(self, rank: str) -> Program:
        mine = tuple(b for b in self.buckets if b.dst == rank or (b.src == rank and b.link == NETWORK))
        return Program(rank, self.digest, mine, np.array(self._moves, np.int64), tuple(self.storages))

    def _index(self, rank: str, name: str) -> int:
        return next(i for i, ref in enumerate(self.storages) if (ref.rank, ref.name) == (rank, name))


def column_cut(
    rows: int, cols: int, dtype: str = "bfloat16", pieces: int = 4, links: str = NETWORK, digest: str = DIGEST
) -> Sketch:
    """Two trainers hold halves of the rows of one matrix; one engine rank needs the left half of its columns."""
    half, width = rows // 2, cols // 2
    storages = [(key, "w", dtype, half * cols) for key in TRAINERS] + [(ENGINES[0], "w", dtype, rows * width)]
    sketch = Sketch(storages, digest)
    step = half // pieces
    for t, key in enumerate(TRAINERS):
        for piece in range(pieces):
            row = piece * step
            move = ("w", row * cols, cols, 1, "w", (t * half + row) * width, width, 1, step, width)
            sketch.add(key, ENGINES[0], links, [move])
    return sketch


class Party:
    """One rank in this process: its lane, the memory it has mounted, what it reported, its daemon's data port."""

    def __init__(self, rank: str) -> None:
        self.rank = rank
        self.memories: dict[str, Memory] = {}
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.port = DataPort(self._on_edge)
        self.lane: Lane | None = None

    def build(
        self, program: Program, token: int = 1, connect: Sequence[Address] = (), accept: Sequence[str] = (),
        timeout: float = PATIENCE, secret: str = SECRET,
    ) -> Lane:  # fmt: skip
        facts = LaneFacts(JOB, LANE, token, self.rank, secret, program.plan_digest)
        lane = Lane(facts, program, self.memories, self.messages.put, connect, accept, timeout)
        self.lane = lane
        lane.start()
        return lane

    def address(self, dst: str) -> Address:
        return Address(dst, "127.0.0.1", self.port.number)

    def wait_for(self, kind: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """The next message of ``kind``; others are dropped. A failure that was not waited for fails the test."""
        deadline = time.monotonic() + timeout
        while True:
            message = self.messages.get(timeout=max(0.01, deadline - time.monotonic()))
            if message["kind"] == kind:
                return message
            assert message["kind"] != "failed", message

    def wait_landed(self, timeout: float = PATIENCE) -> None:
        """Return when stage 0 has landed: who is done at once says only that, and it can still be waited for."""
        while (message := self.messages.get(timeout=timeout))["kind"] not in ("landed", "done"):
            assert message["kind"] != "failed", message
        if message["kind"] == "done":
            self.messages.put(message)

    def wait_for_failure(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """The next ``failed``; everything before it is dropped."""
        while (message := self.messages.get(timeout=timeout))["kind"] != "failed":
            pass
        return message

    def close(self) -> None:
        self.port.close()
        if self.lane is not None:
            self.lane.revoke()

    def _on_edge(self, hello: dict[str, Any], sock: socket.socket) -> None:
        if self.lane is None or hello.get("secret") != SECRET or hello.get("token") != self.lane.token:
            sock.close()
        else:
            self.lane.attach(hello["src"], sock)


class DataPort:
    """Plays the daemon's data port: reads the first frame of each connection and hands the rest over."""

    def __init__(self, on_edge: Callable[[dict[str, Any], socket.socket], None]) -> None:
        self._on_edge = on_edge
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.number: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _address = self._listener.accept()
            except OSError:
                return
            length = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
            self._on_edge(json.loads(sock.recv(length, socket.MSG_WAITALL)), sock)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()


class Rig:
    """All ranks of a sketch in this process, with memory filled by rank and their lanes built over loopback."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch = sketch
        ranks = list(dict.fromkeys(ref.rank for ref in sketch.storages))
        self.lent = {key: Lent(key, _storages_of(sketch, key)) for key in ranks}
        self.parties = {key: Party(key) for key in ranks}
        for key, party in self.parties.items():
            party.memories[key] = self.lent[key].mounted(writable=key.startswith("engine"))
            for bucket in sketch.program(key).receives():
                if bucket.link != NETWORK and bucket.src != key:
                    party.memories[bucket.src] = self.lent[bucket.src].mounted(writable=False)

    def fill(self, seed: int = 0) -> None:
        """Random bits in every trainer's storages."""
        rng = np.random.default_rng(seed)
        for key in TRAINERS:
            for array in self.lent[key].arrays.values() if key in self.lent else ():
                array.view(np.uint8)[:] = rng.integers(0, 256, array.nbytes, np.uint8)

    def build(self, token: int = 1, timeout: float = PATIENCE, only: Sequence[str] | None = None) -> None:
        for key in only or self.parties:
            program = self.sketch.program(key)
            connect = [self.parties[dst].address(dst) for dst in sorted({b.dst for b in program.sends()})]
            accept = sorted({b.src for b in program.receives() if b.link == NETWORK})
            self.parties[key].build(program, token, connect, accept, timeout)

    def built(self) -> None:
        for party in self.parties.values():
            party.wait_for("built")

    def run(self, attempt: int = 1, only: Sequence[str] | None = None, **options: Any) -> None:
        words = {key: lent.page.loan_word for key, lent in self.lent.items()} | options.pop("words", {})
        for key in only or self.parties:
            lane = self.parties[key].lane
            assert lane is not None
            lane.run(RunOptions(attempt, (1, attempt), words, **{"progress_timeout": PATIENCE, **options}))

    def expected(self, key: str) -> dict[str, Array]:
        """What ``key``'s storages hold once all its stage 0 buckets of equal dtype have landed."""
        program = self.sketch.program(key)
        out = {name: np.zeros_like(array) for name, array in self.lent[key].arrays.items()}
        for b in (b for b in program.receives() if b.stage == 0):
            for s, so, s0, s1, d, do, d0, d1, n, m in program.moves_of(b).tolist():
                source = self.lent[b.src].arrays[program.storages[s].name]
                rows, columns = np.indices((n, m))
                out[program.storages[d].name][do + rows * d0 + columns * d1] = source[so + rows * s0 + columns * s1]
        return out

    def close(self) -> None:
        for party in self.parties.values():
            party.close()
        for lent in self.lent.values():
            lent.close()


def _storages_of(sketch: Sketch, key: str) -> dict[str, tuple[int, str]]:
    return {ref.name: (ref.numel, ref.dtype) for ref in sketch.storages if ref.rank == key}
