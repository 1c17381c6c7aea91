"""The one daemon of a contest: a real ``refitd run`` with the store in its memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from refitd.bench.clients import JOB, REPLICA
from refitd.bench.models import ENGINES, TRAINERS
from refitd.bench.party import BenchFailed, children, peak_bytes
from refitd.errors import DaemonUnavailable
from refitd.hook.admin import ask

START_SECONDS = 60.0
_LINKS = {"peer": "auto", "tcp": "network", "nccl": "network"}
_CONFIG = """\
[node]
name = "bench"
state_dir = "{folder}/state"
[store]
url = "memory://"
[hook]
socket = "{folder}/hook.sock"
[metrics]
listen = ""
[data]
links = "{links}"
transport = "{transport}"
verify = "{verify}"
bucket_bytes = {bucket_bytes}
path = "{path}"
[timeouts]
build = 60.0
offer = 20.0
[log]
level = "{level}"
format = "json"
"""


class Settings(NamedTuple):
    """What a contest may want other than usual. With ``traced`` the daemon writes everything down.

    ``path``: who moves the weights, see data.path. With ``stamped`` all processes keep `refitd.stamps`.
    """

    verify: str = "checksum"
    bucket_bytes: int = 4 << 20
    traced: bool = False
    path: str = "auto"
    stamped: bool = False


USUAL = Settings()


class Daemon:
    """``transport``: peer, tcp or nccl. Everything of it is in ``folder``."""

    def __init__(self, folder: Path, transport: str, settings: Settings = USUAL) -> None:
        self.socket, self._log = str(folder / "hook.sock"), folder / "daemon.log"
        self.peaks: dict[str, int] = {}
        config = folder / "refitd.toml"
        level = "debug" if settings.traced else "warning"
        config.write_text(
            _CONFIG.format(
                folder=folder,
                links=_LINKS[transport],
                transport="tcp" if transport == "peer" else transport,
                verify=settings.verify,
                level=level,
                bucket_bytes=settings.bucket_bytes,
                path=settings.path,
            )
        )
        command = [sys.executable, "-m", "refitd.cli", "run", "--config", str(config)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_answer(self) -> None:
        """Return when it answers. Raises BenchFailed."""
        self._wait("no answer", lambda: self._job() is not None)

    def wait_lane(self) -> None:
        """Return when the lane from all trainers to all engines is built. Raises BenchFailed."""
        self._wait("no lane", self._lane_is_built)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BenchFailed(f"the daemon: {what}: {self.log()}")
            time.sleep(0.05)

    def _job(self) -> dict[str, Any] | None:
        try:
            jobs: dict[str, dict[str, Any]] = ask("status", self.socket)["jobs"]
        except DaemonUnavailable:
            return None
        return jobs.get(JOB, {})

    def _lane_is_built(self) -> bool:
        open_ones = [lane for lane in self.lanes() if lane["replica"] == REPLICA and lane["stage"] == "idle"]
        return any((len(lane["sources"]), len(lane["members"])) == (TRAINERS, ENGINES) for lane in open_ones)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def movers(self) -> dict[str, int]:
        """Pids of the movers by rank key, 0 for one that is not there."""
        return {rank["key"]: int(rank["mover"] or 0) for rank in (self._job() or {}).get("ranks", [])}

    def lanes(self) -> list[dict[str, Any]]:
        """As in ``refitd status``."""
        return list((self._job() or {}).get("lanes", []))

    def look(self) -> None:
        """Note the peaks of the memory of the daemon, its fork server and its movers so far."""
        self.peaks = {"daemon": peak_bytes(self.pid), "forkserver": sum(map(peak_bytes, children(self.pid)))}
        for key, pid in self.movers().items():
            side, _group, number = key.split("/")
            self.peaks[f"mover_{side}{number}"] = peak_bytes(pid)

    def lines(self) -> list[str]:
        """Everything that it said."""
        return self._log.read_text(errors="replace").splitlines()

    def log(self) -> str:
        """The end of what it said."""
        return self._log.read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """Stop it and wait for its end."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
