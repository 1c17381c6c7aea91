"""Who is asked to lend when somebody does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.daemon.lane import LaneDriver
from refitd.daemon.prepare import Preparer
from refitd.epoch.records import PubId

OLD, NEW = PubId(1, 28), PubId(1, 30)


class Clock:
    """Monotonic time by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("refitd.daemon.prepare.time.monotonic", lambda: self.now)


def preparer(*ranks: Any, why: str = "") -> Preparer:
    """Of a lane with these ranks, all here; ``why`` receives are void."""
    judged: list[Any] = []
    slots = [SimpleNamespace(key=rank.key, node="a") for rank in ranks]
    driver = SimpleNamespace(
        context=SimpleNamespace(ranks={rank.key: rank for rank in ranks}, agreement=SimpleNamespace(away=False)),
        lane=SimpleNamespace(lead=slots[0], members=slots),
        calls=SimpleNamespace(
            void=lambda rank: why if judged and rank.receiving else "", judge=lambda *asked: judged.append(asked)
        ),
        my_members=lambda: ranks,
    )
    return Preparer(cast("LaneDriver", driver))


def test_a_lead_that_holds_the_publication_is_to_call_a_mate_that_came_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the ticket after a second: until then those who are in a receive may lend by themselves."""
    clock = Clock(monkeypatch)
    told: list[tuple[str, str, PubId]] = []
    lead = SimpleNamespace(
        key="engine/r0/0", shadowed=False, told=None, receiving=None, sent_away=None, holds=lambda asked: asked == NEW
    )
    found = preparer(lead)
    driver = cast("Any", found._driver)
    driver.tell = lambda rank, kind, publication: told.append((rank.key, kind, publication))
    for clock.now in (100.0, 101.0):
        found._call(driver.lane, NEW)
    assert told == []
    clock.now = 101.1
    found._call(driver.lane, NEW)
    assert told == [(lead.key, "receive", NEW)]
    found.reset()
    clock.now = 110.0
    found._call(driver.lane, OLD)
    clock.now = 112.0
    found._call(driver.lane, OLD)
    assert told == [(lead.key, "receive", NEW)], "a lead that does not hold it is asked to lend, as always"


def test_who_is_in_a_void_receive_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second; and again where it is in the next one that is void. Its client lets go of the memory itself."""
    clock, told = Clock(monkeypatch), list[str]()
    rank = SimpleNamespace(
        key="engine/r0/0", shadowed=False, holds=lambda _asked: False, receiving=object(), sent_away=None,
        say=lambda name, reason: told.append(f"{name}: {reason}"),
    )  # fmt: skip
    found = preparer(rank, why="somebody came anew")
    cast("Any", found._driver).tell = lambda _rank, kind, publication: told.append(f"{kind} {tuple(publication)}")
    for clock.now in (100.0, 101.0):
        found._call(cast("Any", found._driver).lane, NEW)
    assert told == []
    for clock.now in (101.1, 102.0):
        found._call(cast("Any", found._driver).lane, NEW)
    words = ["receive (1, 30)", "failed: somebody came anew"]
    assert told == words, "a new ticket first, or a lead would take the old one again"
    for rank.receiving in (None, object()):
        found._call(cast("Any", found._driver).lane, NEW)
    assert told == words * 2


def test_a_second_without_the_store_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mate says may not have come yet."""
    clock, told = Clock(monkeypatch), list[str]()
    rank = SimpleNamespace(
        key="engine/r0/0", shadowed=False, holds=lambda _asked: False, receiving=object(), sent_away=None, told=None,
        say=lambda name, reason: told.append(name),
    )  # fmt: skip
    found = preparer(rank, why="somebody came anew")
    driver = cast("Any", found._driver)
    driver.tell, agreement = lambda *_asked: None, driver.context.agreement
    for clock.now, agreement.away in ((100.0, False), (101.5, True), (102.0, False), (102.4, False)):
        found._call(driver.lane, NEW)
    assert told == []
    clock.now = 102.6
    found._call(driver.lane, NEW)
    assert told == ["failed"]


def member(held: bool, memory: bool) -> Any:
    """An in_place rank that holds NEW or not, and whose memory we know or not."""
    return SimpleNamespace(
        key="engine/r0/0", trains=False, shadowed=False, receiving=None, holds=lambda _asked: held,
        readable=lambda _asked: held and memory,
    )  # fmt: skip


@pytest.mark.parametrize(("sends", "memory", "ready"), [(True, True, True), (True, False, False), (False, False, True)])
def test_a_holder_whose_memory_was_released_lends_before_its_mates_are_sent_from_it(
    sends: bool, memory: bool, ready: bool
) -> None:
    """The plan may have it spread what it holds; its mover would find nothing to send from."""
    rank, told = member(True, memory), list[str]()
    found = preparer(rank)
    driver = cast("Any", found._driver)
    program = SimpleNamespace(sends=lambda: ["bucket"] * sends, receives=lambda: [SimpleNamespace(id=7)])
    plan = SimpleNamespace(program=lambda _key: program, held=lambda key, ids: (key, ids))
    driver.built, driver.held = SimpleNamespace(plan=plan), {}
    driver.tell = lambda asked, kind, publication: told.append(f"{asked.key} {kind} {tuple(publication)}")
    assert found._member_ready(rank, NEW) is ready
    assert driver.held == ({rank.key: (rank.key, [7])} if ready else {})
    assert told == ([] if ready else ["engine/r0/0 receive (1, 30)"])


@pytest.mark.parametrize("memory", [True, False])
def test_a_neighbour_is_a_source_only_while_its_memory_is_lent(memory: bool) -> None:
    """It holds the publication either way."""
    rank = member(True, memory)
    assert preparer(rank)._source_ready(rank, NEW) is memory


@pytest.mark.parametrize(
    ("newest", "lends", "failed"),
    [(NEW, None, ["trainer/run/0 took its offer back"]), (NEW, object(), []), (PubId(1, 31), None, [])],
    ids=["taken back", "lent, perhaps a newer one", "superseded"],
)
def test_a_source_that_lends_no_more_fails_the_token(newest: PubId, lends: object, failed: list[str]) -> None:
    """Also one that was ready: engines would go out of service for what is not there."""
    source = cast("Any", SimpleNamespace(key="trainer/run/0", trains=True, offer=lends))
    found = preparer(source)
    driver, said = cast("Any", found._driver), list[str]()
    driver.context.agreement.view = SimpleNamespace(newest=newest, publication=None)
    driver.my_slots = lambda: driver.lane.members
    driver.is_current = lambda _slot: True
    driver.my_members = list
    driver.calls = SimpleNamespace(judge=lambda *_: None)
    driver.context.ranks["trainer/run/0"] = source
    driver.fail = lambda _edge, reason: said.append(reason)
    driver.lane.lead = SimpleNamespace(key="engine/r0/0")
    found.prepared = NEW
    found.prepare(NEW)
    assert said == failed
