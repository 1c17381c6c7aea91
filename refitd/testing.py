"""For tests, ours and yours: a real daemon on this machine, a store in memory, and layouts of plain shards.

Needs no test framework. A daemon takes about a second to answer and some more until its movers run::

    with LocalDaemon() as daemon:
        trainer = connect_trainer("job", "run", 0, 1, socket=daemon.socket)
        ...
        daemon.kill()      # as the kernel would
        daemon.start()     # the same node again
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from refitd.errors import DaemonUnavailable, RefitdError
from refitd.hook.admin import ask
from refitd.layout import Layout
from refitd.layout.box import Box, Piece
from refitd.store import MemoryStore

__all__ = ["LocalDaemon", "MemoryStore", "free_port", "split_layout", "wait_until"]

T = TypeVar("T")
START_SECONDS = 20.0
STOP_SECONDS = 10.0
_ASK_SECONDS = 2.0
_PAUSE = 0.02
_TAIL = 2000


class LocalDaemon:
    """`refitd run` as a child in a session of its own, in a temporary folder; a context manager.

    ``socket`` is where trainers and engines connect. The folder goes when `stop` is called.
    """

    def __init__(
        self,
        store: str = "memory://",
        links: str = "auto",
        name: str = "node0",
        config: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        own_session: bool = True,
    ) -> None:
        """``config``: more keys, ``{"timeouts.offer": 0.5}``; ``environ``: added to this process's environment.

        ``memory://`` is private to one daemon. Metrics are off unless ``metrics.listen`` is given. Without
        ``own_session`` the daemon is in the caller's, and ends where somebody ends that as a whole.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="refitd-"))
        self.config = {
            "node.name": name, "node.state_dir": str(self.folder / "state"), "store.url": store,
            "hook.socket": str(self.folder / "hook.sock"), "metrics.listen": "", "data.links": links,
            "log.format": "json", **(config or {}),
        }  # fmt: skip
        self._own_session = own_session
        self._environ = {**os.environ, **(environ or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        """Path of the hook's socket."""
        return str(self.config["hook.socket"])

    @property
    def log(self) -> str:
        """Everything that the daemon has logged, a JSON object a line."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pid(self) -> int:
        """Process id of the daemon. Raises DaemonUnavailable before `start`."""
        return self._child().pid

    @property
    def returncode(self) -> int | None:
        """Exit status of a daemon that has ended, None while it runs."""
        return self._child().poll()

    def write_config(self) -> Path:
        """The configuration file, as it is at this moment."""
        path = self.folder / "refitd.toml"
        path.write_text(_toml(self.config))
        return path

    def launch(self) -> None:
        """Start the process and do not wait for it."""
        command = [sys.executable, "-m", "refitd.cli", "run", "--config", str(self.write_config())]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=self._own_session,
            )

    def start(self) -> None:
        """Start the process and wait until its socket answers. Raises DaemonUnavailable with the end of its log."""
        self.launch()
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if self.returncode is not None or time.monotonic() > deadline:
                raise DaemonUnavailable(f"the daemon did not start ({self.returncode}): {self.log[-_TAIL:]}")
            time.sleep(_PAUSE)

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Exit status of a daemon that ends by itself. Raises DaemonUnavailable where it does not in time."""
        try:
            return self._child().wait(seconds)
        except subprocess.TimeoutExpired:
            raise DaemonUnavailable(f"the daemon still runs after {seconds:g} s: {self.log[-_TAIL:]}") from None

    def status(self) -> dict[str, Any]:
        """What ``refitd status`` shows. Raises DaemonUnavailable."""
        return ask("status", self.socket)

    def pause(self) -> None:
        """Stop the daemon's process (SIGSTOP); its movers go on."""
        self._child().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused daemon go on."""
        self._child().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the daemon with SIGKILL; its movers die with it, its clients do not. It may be started again."""
        self._child().kill()
        self._child().wait()

    def stop(self) -> None:
        """End the daemon (SIGTERM, and SIGKILL when that does not help) and delete its folder; may be called twice."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            if self._own_session:
                with contextlib.suppress(ProcessLookupError):  # nobody of the session is left, as it should be
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except RefitdError:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise DaemonUnavailable("the daemon was not started")
        return self._process

    def answers(self) -> bool:
        """Whether its socket answers."""
        try:
            ask("status", self.socket, timeout=_ASK_SECONDS)
        except DaemonUnavailable:
            return False
        except RefitdError:
            return True  # it says no, which is an answer
        return True


def _toml(config: Mapping[str, object]) -> str:
    sections: dict[str, list[str]] = {}
    for name, value in config.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    return "\n".join(line for section, lines in sections.items() for line in (f"[{section}]", *lines)) + "\n"


def split_layout(tensors: Mapping[str, tuple[Sequence[int], str]], rank: int, world: int, dim: int = 0) -> Layout:
    """Layout of one rank that holds an even share, along ``dim``, of each tensor (name -> global shape, dtype name).

    Each share is a dense storage of the tensor's name. The last ranks get less where the size does not divide.
    """
    storages, pieces = {}, []
    for name, (shape, dtype) in tensors.items():
        step = -(-shape[dim] // world)
        cut = [min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])]
        low = [cut[0] if axis == dim else 0 for axis in range(len(shape))]
        high = [cut[1] if axis == dim else size for axis, size in enumerate(shape)]
        box = Box(tuple(low), tuple(high))
        storages[name] = (box.volume, dtype)
        if box.volume:
            pieces.append(Piece(name, box, name, 0, _dense(box.shape)))
    described = {name: (tuple(shape), dtype) for name, (shape, dtype) in tensors.items()}
    return Layout.from_pieces(described, storages, pieces)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(probe: Callable[[], T], what: str, seconds: float = 10.0) -> T:
    """Call ``probe`` until it returns something true, and return that. Raises TimeoutError saying ``what``."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(_PAUSE)
    return found
