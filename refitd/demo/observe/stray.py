"""A daemon that an upgrade forgot: of another version, on a store of its own, later with a job of the same name."""

from __future__ import annotations

from pathlib import Path

import refitd
from refitd.demo.scene import JOB
from refitd.hook.trainer import Trainer
from refitd.store.spawn import free_port
from refitd.testing import LocalDaemon, split_layout

VERSION = "0.0.1"
NAME = "node-z"


class Stray:
    """Its methods wait: call them in threads. ``address``: where its metrics are."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._daemon = LocalDaemon(name="z", config={"metrics.listen": self.address}, environ=_older(folder))
        self._trainer: Trainer | None = None

    def start(self) -> None:
        """Start it, without any job. Raises DaemonUnavailable."""
        self._daemon.start()

    def lead(self) -> None:
        """Give it a trainer of the job: the job has a leader in each of two stores."""
        self._trainer = refitd.connect_trainer(JOB, "stray", 0, 1, self._daemon.socket)
        self._trainer.register(split_layout({"w": ((4, 4), "float32")}, 0, 1))

    def stop(self) -> None:
        """End it."""
        if self._trainer:
            self._trainer.close()
        self._daemon.stop()


def _older(folder: Path) -> dict[str, str]:
    """An environment in which this code says that it is another version: metadata that is found before its own."""
    metadata = folder / "older" / f"refitd-{VERSION}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: refitd\nVersion: {VERSION}\n")
    root = Path(refitd.__file__).parents[1]
    return {"PYTHONPATH": f"{metadata.parent}:{root}", "PYTHONSAFEPATH": "1"}
