"""A daemon and the processes of a guide, in a folder; all of them end with the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pages import DOCS, ROOT, Start

from refitd.testing import LocalDaemon


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    """A daemon of one node."""
    with LocalDaemon() as made:
        yield made


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program of docs/examples with this Python; each in a session of its own, which ends with the test."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*command: str, **environ: str) -> subprocess.Popen[str]:
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                cwd=DOCS / "examples",
                env={**os.environ, **quiet, **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return processes[-1]

    yield begin
    for process in processes:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    continue
        process.communicate()
