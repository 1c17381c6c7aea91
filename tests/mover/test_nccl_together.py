"""Several communicators of a lane: steps go over them in turn, and all of them end together."""

from __future__ import annotations

import pytest

from refitd.bench.fake_nccl import FakeComm, FakeNccl, Faults
from refitd.errors import CommunicatorError
from refitd.mover.nccl import together
from refitd.mover.nccl.library import ID_BYTES, settle
from refitd.mover.nccl.together import Together, new_ids


def made(library: FakeNccl) -> Together:
    """Of one rank, which needs no other."""
    found = Together()
    found.make(library, 1, 0, new_ids(library), "lane-7", lambda comm: settle("init", [comm], 10.0, lambda: None))
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_has_an_id_and_a_name_of_its_own_and_steps_take_turns(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step k goes by communicator k modulo their number."""
    monkeypatch.setattr(together, "COUNT", count)
    library = FakeNccl()
    ids = new_ids(library)
    assert len({ids[at : at + 2 * ID_BYTES] for at in range(0, len(ids), 2 * ID_BYTES)}) == count
    several = made(library)
    comms = list(several)
    assert [comm.name for comm in comms if isinstance(comm, FakeComm)] == [f"lane-7-{i}" for i in range(count)]
    assert [several.of(step) for step in range(4)] == [comms[step % count] for step in range(4)]
    several.abort()


def test_all_are_revoked_and_aborted_though_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers cannot be told apart from those that are sound: nothing of a lane goes on."""
    monkeypatch.setattr(together, "COUNT", 2)
    faults = Faults()
    several = made(FakeNccl(faults))
    faults.fail["revoke"] = "InvalidUsage"
    several.revoke(0.1)
    several.abort()
    assert [comm.state() for comm in several] == ["aborted"] * 2


def test_those_that_were_made_are_ended_where_the_next_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first settles, the second fails."""
    monkeypatch.setattr(together, "COUNT", 2)
    faults, several = Faults(), Together()
    library = FakeNccl(faults)
    ids = new_ids(library)

    def wait(_comm: object) -> None:
        faults.fail["init"] = "SystemError"

    with pytest.raises(CommunicatorError, match="SystemError"):
        several.make(library, 1, 0, ids, "lane", wait)
    several.abort()
    assert [comm.state() for comm in several] == ["aborted"]
