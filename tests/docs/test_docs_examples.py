"""The examples of docs/training.md run as they stand there."""

from __future__ import annotations

import re

import pytest
from pages import Start, lines

from refitd.testing import LocalDaemon

pytestmark = pytest.mark.timeout(240)
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
)


def last(said: list[str], who: str) -> tuple[str, str]:
    """The step and checksum of the last line of a trainer (``step``) or an engine (its replica)."""
    found = [re.fullmatch(rf"{who} (?:serves step )?(\d+).*, checksum (\S+)", line) for line in said]
    return next((match[1], match[2]) for match in reversed(found) if match)


def test_a_plain_trainer_and_an_engine(daemon: LocalDaemon, start: Start) -> None:
    """The engine ends with the trainer's last weights, to the last bit."""
    engine = start("engine.py", "r0", "2", REFITD_SOCKET=daemon.socket)
    trainer = start("train.py", "2", REFITD_SOCKET=daemon.socket)
    assert last(lines(trainer), "step") == last(lines(engine), "r0") != ("2", "0.0")


def test_fsdp2_and_a_tensor_parallel_engine(daemon: LocalDaemon, start: Start) -> None:
    """Two FSDP2 ranks publish their shards; two engine ranks receive theirs, and the sums are equal."""
    engine = start(*TORCHRUN, "engine.py", "r1", "2", REFITD_SOCKET=daemon.socket)
    trainer = start(*TORCHRUN, "train_fsdp2.py", "2", REFITD_SOCKET=daemon.socket)
    assert last(lines(trainer), "step") == last(lines(engine), "r1") != ("2", "0.0")
