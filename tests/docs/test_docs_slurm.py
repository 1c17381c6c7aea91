"""The recipe for Slurm, with two nodes that are two loopback addresses, and an srun of ours."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from pages import DOCS, ROOT

from refitd.testing import wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
NODES = ("127.0.0.1", "127.0.0.2")
ON_NODE = (
    f"cd {DOCS}/examples; if [ $SLURM_NODEID = 0 ]; then exec {sys.executable} train.py 2; fi; "
    f"exec {sys.executable} engine.py r0 2"
)


class Job:
    """A submitted job: the batch script in a session of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self._batch = folder, None
        programs = folder / "bin"
        programs.mkdir()
        shutil.copy(pathlib.Path(__file__).parent / "srun", programs)
        for name, text in {
            "scontrol": 'echo "$3" | tr , "\\n"',
            "refitd": f'exec {sys.executable} -m refitd.cli "$@"',
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)

    def submit(self, *command: str, **more: str) -> subprocess.Popen[str]:
        environ = {
            **os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": ",".join(NODES),
            "NODES": str(self.folder / "nodes"), "REFITD_SHARED": str(self.folder / "shared"),
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more,
        }  # fmt: skip
        batch = ["bash", str(DOCS / "examples" / "slurm.sh"), *command]
        self._batch = subprocess.Popen(
            batch, cwd=self.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self._batch

    def events(self, node: int) -> list[str]:
        """The names of what a node's daemon has logged."""
        path = self.folder / f"refitd-{os.getpid()}-{node}.log"
        return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []

    def left(self) -> list[str]:
        """Folders and processes that the job has left behind."""
        folders = [*self.folder.glob("nodes/*/refitd*"), *self.folder.glob("shared/*")]
        return [*map(str, folders), *self.processes()]

    def processes(self) -> list[str]:
        """Command lines of living processes that have this job's environment."""
        mark = f"NODES={self.folder}/nodes".encode()
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes():
                    found.append(path.name + " " + (path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found

    def end(self) -> None:
        for line in self.processes():
            os.kill(int(line.split()[0]), signal.SIGKILL)
        if self._batch:
            self._batch.communicate()


@pytest.fixture
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="refitd-") as folder:  # short: a socket's path has 107 bytes
        made = Job(pathlib.Path(folder))
        try:
            yield made
        finally:
            made.end()


def test_a_job_refits_and_leaves_nothing_behind(job: Job) -> None:
    """Two daemons share an etcd that the first one spawned; trainer and engine meet; all ends with the work."""
    batch = job.submit("bash", "-c", ON_NODE)
    said, _ = batch.communicate(timeout=200)
    assert batch.returncode == 0, said
    trained, served = (
        re.search(rf"^{who}\b.*checksum (\S+)$", said, re.MULTILINE) for who in ("step 2", "r0 serves step 2")
    )
    assert trained
    assert served
    assert trained[1] == served[1]
    assert job.left() == []
    assert [job.events(node)[-1] for node in (0, 1)] == ["stopped", "stopped"]


def test_a_daemon_that_cannot_start_ends_the_job(job: Job) -> None:
    """The work does not wait for a daemon that will not come."""
    batch = job.submit("sleep", "1000", REFITD_DATA__PORT="none")
    said, _ = batch.communicate(timeout=100)
    assert batch.returncode == 1
    assert "a daemon has ended: see refitd-" in said
    assert job.processes() == []


def test_a_cancelled_job_ends_in_order(job: Job) -> None:
    """Every process of the job is told to end, more than once: daemons stop in order, and nothing is left."""
    batch = job.submit("sleep", "1000")
    wait_until(lambda: all("ready" in job.events(node) for node in (0, 1)), "both daemons are ready", 100)
    for line in job.processes():
        with contextlib.suppress(ProcessLookupError):  # some end as soon as others do
            os.kill(int(line.split()[0]), signal.SIGTERM)
    batch.communicate(timeout=100)
    assert batch.returncode != 0
    wait_until(lambda: job.left() == [], "daemons, which were told directly, to have tidied up", 30)
    assert [job.events(node)[-1] for node in (0, 1)] == ["stopped", "stopped"]
