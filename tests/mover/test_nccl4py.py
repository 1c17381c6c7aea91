"""What `refitd.mover.nccl.nccl4py` makes of nccl4py's objects, with objects that behave as nccl4py 0.6's do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refitd.errors import CommunicatorError
from refitd.mover.nccl import streams
from refitd.mover.nccl.library import IN_PROGRESS, SETTLED, settle
from refitd.mover.nccl.nccl4py import Nccl, _Comm

RESULTS = SimpleNamespace(Success=0, InProgress=7)


class Made:
    """A communicator of nccl4py: ``polls`` until it has settled; one that shrink makes is empty until then."""

    def __init__(self, polls: int, valid: bool = True) -> None:
        self.polls, self.is_valid, self.child = polls, valid, None

    def get_async_error(self) -> int:
        if not self.is_valid:
            raise ValueError("Cannot get async error: Communicator not initialized")
        self.polls -= 1
        if self.polls > 0:
            return RESULTS.InProgress
        if self.child is not None:
            self.child.is_valid = True
        return RESULTS.Success

    def abort(self) -> None:
        self.is_valid = False

    def shrink(self, _excluded: list[int], _config: Any, _flag: Any) -> Made:
        self.child = Made(1, valid=False)
        self.polls = 3
        return self.child


class Stream:
    """Of a device that may be at work on it."""

    def __init__(self, device: str) -> None:
        self.device, self.idle = device, True

    def query(self) -> bool:
        return self.idle


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """Without NCCL and without a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(streams, "_free", {})
    made = Nccl.__new__(Nccl)
    flags = SimpleNamespace(ABORT=1, DEFAULT=0)
    made._core, made._results = SimpleNamespace(CommShrinkFlag=flags, NCCLConfig=lambda **_: None), RESULTS
    return made


def test_a_shrunk_communicator_is_under_way_until_it_is_there(library: Nccl) -> None:
    """NCCL hands it out when the parent settles; to ask it before would be an error, and no reason to give up."""
    parent = _Comm(library, Made(1))
    child = parent.shrink([1], broken=False, name="shrunk")
    assert child.state() == IN_PROGRESS
    settle("shrink", [parent, child], 5, lambda: None)
    assert child.state() == SETTLED


def test_one_that_never_comes_is_late_and_not_ready(library: Nccl) -> None:
    """Its parent may have settled with nothing made."""
    with pytest.raises(CommunicatorError, match=r"shrink.*not done within 0\.01 s"):
        settle("shrink", [_Comm(library, Made(1)), _Comm(library, Made(1, valid=False))], 0.01, lambda: None)


def test_a_stream_serves_the_next_communicator_once_nothing_runs_on_it(library: Nccl) -> None:
    """A new one for each would cost memory of the device with each turn of a lane."""
    first = _Comm(library, Made(1))
    beside = _Comm(library, Made(1))
    assert beside._stream is not first._stream
    first.abort()
    first.abort()
    second = _Comm(library, Made(1))
    assert second._stream is first._stream
    assert _Comm(library, Made(1))._stream not in (first._stream, beside._stream)
    second._stream.idle = False
    second.abort()
    assert _Comm(library, Made(1))._stream is not second._stream
