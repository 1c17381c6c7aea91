"""The processes of one contest: forked from a parent that has imported torch, told what to do over a socket each."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from refitd.errors import RefitdError
from refitd.hook.wire import Connection, Message

ANSWER_SECONDS = 120.0
_PR_SET_PDEATHSIG = 1


class BenchFailed(RefitdError):
    """A benchmark did not come to its end, or moved wrong bytes."""


class Asked(Protocol):
    """What a process does: methods that take a step, or another number, and return a number, or nothing."""

    def close(self) -> None: ...


class Party(Asked, Protocol):
    """One trainer or engine. Steps are told apart by their number; times are CLOCK_MONOTONIC seconds."""

    def fill(self, step: int) -> None:
        """Trainers: write new values."""

    def move(self, step: int) -> float:
        """The timed part. Trainers return when they began, engines when they had everything."""

    def exact(self, step: int) -> bool:
        """Engines: whether they have the values of ``step``, bit for bit."""


class Process:
    """A forked party. ``make`` runs in the child; what it raises, and what it made raises, comes back here."""

    def __init__(self, name: str, make: Callable[[], Asked]) -> None:
        self.name, self.peak = name, 0
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _child(parent, Connection(theirs), make)
        theirs.close()
        self._connection = Connection(ours)

    def ask(self, what: str, step: int = 0) -> None:
        """Have the party begin something."""
        self._connection.send({"do": what, "step": step})

    def answer(self) -> float:
        """What came of it. Raises BenchFailed where it raised, died or is silent."""
        try:
            message, _fds = self._connection.receive(ANSWER_SECONDS)
        except (EOFError, OSError) as error:
            raise BenchFailed(f"{self.name}: {error}") from error
        if "error" in message:
            raise BenchFailed(f"{self.name}: {message['error']}")
        return float(message["value"])

    def look(self) -> None:
        """Note the peak of its memory so far."""
        self.peak = peak_bytes(self.pid)

    def end(self) -> None:
        """Kill it and wait for its end; harmless when repeated."""
        if self.pid:
            kill(self.pid)
            self.pid = 0
            self._connection.close()


def kill(pid: int) -> None:
    """SIGKILL for a child, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def ask_all(processes: list[Process], what: str, step: int = 0) -> list[float]:
    """Have all of them do it at the same time; their answers (0 for None) in order. Raises BenchFailed."""
    for process in processes:
        process.ask(what, step)
    return [process.answer() for process in processes]


def _child(parent: int, connection: Connection, make: Callable[[], Asked]) -> NoReturn:
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _serve(connection, make)
            status = 0
    except BaseException:  # noqa: BLE001  a fork must never return into the parent's code
        with contextlib.suppress(OSError):
            connection.send({"error": traceback.format_exc()})
    finally:
        os._exit(status)


def _serve(connection: Connection, make: Callable[[], Asked]) -> None:
    party: Asked | None = None
    while True:
        message, _fds = connection.receive()
        if party is None:
            party = make()
        value = _do(party, message)
        connection.send({"value": value})
        if message["do"] == "close":
            return


def _do(party: Asked, message: Message) -> float:
    """``start`` only has the party made; everything else is a method of it, called with the step."""
    what = message["do"]
    if what == "close":
        party.close()
    return 0.0 if what in ("start", "close") else float(getattr(party, what)(message["step"]) or 0.0)


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever had resident (VmHWM, shared memory counts); 0 where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def children(pid: int) -> list[int]:
    """The processes that a process started and that still run."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return sorted(found)
