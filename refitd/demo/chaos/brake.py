"""A slow disk under processes: few writes a second by the block layer where it lets us, else by holding them still."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from signal import Signals

from refitd.demo.cluster import kill

_GROUPS = Path("/sys/fs/cgroup/blkio")
_WRITES_A_SECOND = 8
_HELD, _FREE = 0.25, 0.1  # seconds


class Brake:
    """In force from its making until `release`. ``name`` says which kind it is."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._group = _GROUPS / f"refitd-chaos-{os.getpid()}"
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._throttle()
            self.name = f"{_WRITES_A_SECOND} writes a second"
        except OSError:
            self._loosen()
            self._thread = threading.Thread(target=self._hold, daemon=True)
            self._thread.start()
            self.name = f"held still {_HELD:g} of {_HELD + _FREE:g} s"

    def release(self) -> None:
        """Full speed again."""
        self._end.set()
        if self._thread:
            self._thread.join()
        self._loosen()

    def _throttle(self) -> None:
        device = os.stat(tempfile.gettempdir()).st_dev
        self._group.mkdir(exist_ok=True)
        limit = f"{os.major(device)}:{os.minor(device)} {_WRITES_A_SECOND}"
        (self._group / "blkio.throttle.write_iops_device").write_text(limit)
        for pid in self._pids:
            (self._group / "cgroup.procs").write_text(str(pid))

    def _loosen(self) -> None:
        with contextlib.suppress(OSError):
            for pid in (self._group / "cgroup.procs").read_text().split():
                (_GROUPS / "cgroup.procs").write_text(pid)
            self._group.rmdir()

    def _hold(self) -> None:
        while not self._end.is_set():
            for number, seconds in ((Signals.SIGSTOP, _HELD), (Signals.SIGCONT, _FREE)):
                for pid in self._pids:
                    kill(pid, number)
                self._end.wait(seconds)
        for pid in self._pids:
            kill(pid, Signals.SIGCONT)
