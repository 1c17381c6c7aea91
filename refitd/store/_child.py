"""A child process that dies with this one, also when this one is killed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from refitd.errors import StoreUnavailable

_STOP = 3.0  # seconds that it gets to end by itself
# Runs in the child first: die with the parent, also when it died before we could ask for that.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class Child:
    """A running child: ``pid``, ``running``. What it prints is appended to ``log``, or dropped."""

    def __init__(self, command: Sequence[str], log: pathlib.Path | None = None) -> None:
        self._command, self._log = command, log or pathlib.Path(os.devnull)
        self._started, self._ended = threading.Event(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        # The kernel sends the death signal when the *thread* that forked ends, so one thread stays with the child.
        self._keeper = threading.Thread(target=self._keep, name="refitd-child", daemon=True)
        self._keeper.start()
        self._started.wait()
        if self._error is not None:
            raise StoreUnavailable(f"{command[0]} did not start: {self._error}") from self._error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether it is alive."""
        return not self._ended.is_set()

    def send(self, sig: signal.Signals) -> None:
        """Send a signal; nothing happens when it has ended."""
        if self._process is not None and self.running:
            self._process.send_signal(sig)

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread of it stands: the signal's sender goes on before they do."""
        self.send(signal.SIGSTOP)
        while self.running and not _stands(self.pid):
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def wait(self, seconds: float) -> bool:
        """Whether it ends within ``seconds``."""
        return self._ended.wait(seconds)

    def stop(self) -> None:
        """End it; may be called twice."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            self.send(sig)
            if self.wait(_STOP):
                break
        self._keeper.join(_STOP)

    def kill(self) -> None:
        """End it at once, also when it is stopped; may be called twice."""
        self.send(signal.SIGKILL)
        self._keeper.join(_STOP)

    def _keep(self) -> None:
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *self._command]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(launch, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError as error:
            self._error = error
            self._ended.set()
        finally:
            self._started.set()
        if self._process is not None:
            self._process.wait()
            self._ended.set()


def _stands(pid: int) -> bool:
    """Whether no thread of a process runs or could run; a process that is gone stands."""
    states = []
    for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return not set(states) - set("TtZX")
