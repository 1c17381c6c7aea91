"""Methods of repair over the fake library: what each is for, and that ranks never end with different ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refitd.bench.fake_nccl import FakeComm, FakeNccl, Faults
from refitd.bench.repair_rank import FolderMeeting
from refitd.errors import CommunicatorError
from refitd.mover.nccl.library import settle, usable
from refitd.mover.nccl.repair import FRESH, GROW, SHRINK, Change, Repaired, methods, repair


class Ranks:
    """Communicators of threads; ``libraries`` are one a rank."""

    def __init__(self, folder: Path, libraries: list[FakeNccl]) -> None:
        self.folder, self.libraries = folder, libraries
        self.buffers = [torch.zeros(128, dtype=torch.uint8) for _ in libraries]
        self.counted: list[tuple[str, float]] = []

    def make(self, size: int) -> list[FakeComm | None]:
        id_ = self.libraries[0].unique_id()
        comms: list[FakeComm | None] = [self.libraries[n].init(size, n, id_, "first") for n in range(size)]
        settle("init", [comm for comm in comms if comm is not None], 10, lambda: None)
        return comms

    def mend(
        self, old: list[FakeComm | None], method: str, gone: tuple[int, ...] = (), seconds: float = 5.0
    ) -> list[Repaired | CommunicatorError]:
        found: list[Repaired | CommunicatorError | None] = [None] * len(old)

        def one(rank: int) -> None:
            change = Change(method, len(old), rank, gone)
            meeting = FolderMeeting(self.folder, rank, len(old))
            try:
                found[rank] = repair(
                    self.libraries[rank], old[rank], change, meeting, seconds, self.buffers[rank].data_ptr(),
                    lambda *pair: self.counted.append(pair),
                )  # fmt: skip
            except CommunicatorError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(old))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [each for each in found if each is not None]


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., Ranks]:
    return lambda count, version="2.30.7": Ranks(tmp_path, [FakeNccl(Faults(), version) for _ in range(count)])


def close(found: list[Repaired | CommunicatorError]) -> None:
    for one in found:
        if isinstance(one, Repaired):
            one.comm.abort()


def test_a_planned_leave_shrinks_and_is_counted_by_its_method(ranks: Callable[..., Ranks]) -> None:
    """The old communicator is aborted, never destroyed."""
    rig = ranks(3)
    old = rig.make(3)
    found = rig.mend(old[:2], SHRINK, (2,))
    assert [one.method for one in found if isinstance(one, Repaired)] == [SHRINK, SHRINK]
    assert [comm.state() for comm in old[:2] if comm] == ["aborted", "aborted"]
    assert sorted(method for method, _seconds in rig.counted) == [SHRINK, SHRINK]
    close(found)
    assert old[2] is not None
    old[2].abort()


def test_a_library_that_cannot_grow_makes_a_fresh_communicator(ranks: Callable[..., Ranks]) -> None:
    """The reason is kept; the rank that joins comes without a communicator."""
    rig = ranks(3, "2.28.9")
    found = rig.mend([*rig.make(2), None], GROW)
    assert [(one.method, one.refused) for one in found if isinstance(one, Repaired)] == [
        (FRESH, "grow: NCCL 2.28.9 cannot")
    ] * 3
    close(found)


def test_where_one_rank_fails_all_fall_back(ranks: Callable[..., Ranks]) -> None:
    """Shrink refuses at rank 1 only: rank 0 does not keep what it got."""
    rig = ranks(3)
    old = rig.make(3)
    rig.libraries[1].faults.fail["shrink"] = "RemoteError"
    found = rig.mend(old[:2], SHRINK, (2,), seconds=1.0)
    assert [(one.method, bool(one.refused)) for one in found if isinstance(one, Repaired)] == [(FRESH, True)] * 2
    close(found)
    assert old[2] is not None
    old[2].abort()


def test_where_even_a_fresh_one_fails_it_is_an_error(ranks: Callable[..., Ranks]) -> None:
    """Within the deadline, at every rank."""
    rig = ranks(2)
    old = rig.make(2)
    for library in rig.libraries:
        library.faults.hang.add("init")
    found = rig.mend(old, FRESH, seconds=0.5)
    assert [str(one) for one in found] == ["init: not done within 0.5 s"] * 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fake nccl")]


def test_the_method_follows_from_the_change() -> None:
    """Fresh after any death; shrink and grow are for what was planned, grow where NCCL has it."""
    assert methods("2.30.7", [2], 0, died=True) == FRESH
    assert methods("2.28.9", [2], 0, died=False) == SHRINK
    assert methods("2.30.7", [], 1, died=False) == GROW
    assert methods("2.28.9", [], 1, died=False) == FRESH
    assert methods("2.30.7", [1], 1, died=False) == FRESH


def test_versions_that_can_be_used() -> None:
    """From 2.28.9 on."""
    assert usable("2.28.9") == usable("2.30.7") == ""
    assert usable("2.27.7") == "NCCL 2.27.7 is older than 2.28.9"
    assert usable("") == "NCCL is not installed"
