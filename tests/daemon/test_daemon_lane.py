"""A lane on one node, driven by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from refitd.daemon import lane as lane_module
from refitd.daemon.attempt import Attempt
from refitd.daemon.job import Job
from refitd.daemon.lane import LaneDriver
from refitd.daemon.voice import Failure, Voice
from refitd.epoch.records import Ack, Lane, PubId, Slot
from refitd.epoch.stage import Stage
from refitd.errors import TransportError

PUBLISHED = PubId(1, 7)


def test_an_attempt_that_cannot_begin_is_told_to_the_leader_and_not_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the lane would fail again before it had said so, and movers would be given the same run for ever.

    People are told the edge and the phase.
    """
    tries, said, told = [], [], []

    async def start(*_args: Any) -> Attempt:
        tries.append(1)
        raise TransportError(("a", "b"), "the rank went while its attempt was planned")

    async def speak(voice: Voice) -> bool:
        said.append(voice.failure)
        return False

    async def scenario() -> None:
        record = SimpleNamespace(value=Lane("r0", (), (), (), (), ""), revision=5)
        view = SimpleNamespace(lanes={"r0": record}, ack=lambda *_: None)
        context = MagicMock(node="a", agreement=SimpleNamespace(view=view, away=False))
        context.metrics.refit = lambda *words: told.append(words)
        driver = LaneDriver(context, "r0")
        driver.token, driver.lane = 5, Lane("r0", (), (), (), (), "")
        driver.built = cast("Any", SimpleNamespace(ready=True))
        driver._preparer.prepared = PUBLISHED
        monkeypatch.setattr(Lane, "nodes", property(lambda _lane: {"a"}))
        for _poke in range(5):
            driver.poke()
            await asyncio.sleep(0.01)
        await driver.close()

    monkeypatch.setattr(Attempt, "start", start)
    monkeypatch.setattr(Voice, "speak", speak)
    monkeypatch.setattr(lane_module, "stage", lambda _view, _replica: Stage("transfer", PUBLISHED, ""))
    asyncio.run(scenario())
    assert len(tries) == 1
    assert [words[2] for words in told] == ["in transfer: edge a -> b: the rank went while its attempt was planned"]
    assert said[-1] == ((), "edge a -> b: the rank went while its attempt was planned", False)


def test_the_other_ranks_hear_of_a_commit_as_soon_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when the records were looked at again: until then they are not used."""
    happened = []

    async def write(key: str, *_rest: Any, **_options: Any) -> bool:
        happened.append(key)
        return True

    async def scenario() -> None:
        lane = Lane("r0", (), (), (), (), "")
        refits = {"r0": SimpleNamespace(value=SimpleNamespace(step=3, number=1))}
        agreement = SimpleNamespace(
            view=SimpleNamespace(refits=refits, revision_of=lambda _key: 0), write=write, compare_path=str
        )
        context = MagicMock(node="a", job="job", agreement=agreement)
        driver = LaneDriver(context, "r0")
        mate = SimpleNamespace(
            key="engine/r0/1",
            receiving=True,
            holds=PUBLISHED.__eq__,
            told=None,
            told_at=0.0,
            step=0,
            since=None,
            say=lambda name, **_fields: happened.append(name),
        )
        monkeypatch.setattr(driver, "meant_members", lambda: [mate])
        await driver._committer.report(lane, PUBLISHED)
        await driver.close()

    asyncio.run(scenario())
    assert happened == ["commits/r0", "commit"]


@pytest.mark.parametrize("life", ["old", "new"])
def test_what_was_verified_is_not_said_of_a_process_that_came_since(life: str) -> None:
    """While the store is away no lane turns, and ranks come and go all the same: the new one has an empty memory."""
    page = MagicMock()
    rank = cast("Any", SimpleNamespace(
        key="engine/r0/0", session=SimpleNamespace(incarnation=life), digest="d", complete=None, shadowed=True,
        page=page, fills=lambda _publication: True,
    ))  # fmt: skip
    context = MagicMock(node="a", ranks={rank.key: rank})
    attempt = cast("Any", SimpleNamespace(verified=True, declared=False, received=dict))

    async def scenario() -> None:
        driver = LaneDriver(context, "r0")
        driver.lane = Lane("r0", (Slot(rank.key, "a", 1, "old", 1, "d"),), (), (), (), "")
        driver.attempt = attempt
        await driver._transfer(PUBLISHED)
        await driver.close()

    asyncio.run(scenario())
    same = life == "old"
    assert attempt.declared is same
    assert rank.complete == (PUBLISHED if same else None)
    assert page.set_shadow_publication.called is same


@pytest.mark.parametrize("again", [False, True])
def test_what_arrives_after_a_rank_lent_anew_makes_nothing_whole(again: bool) -> None:
    """It held the publication and was to receive nothing; its movers' word on that came after the loan of other memory,
    and the rank would have committed that, under every token to come."""
    rank = cast("Any", SimpleNamespace(
        key="engine/r0/0", session=SimpleNamespace(incarnation="i"), digest="d", complete=None, shadowed=False,
        fills=lambda _publication: True,
    ))  # fmt: skip
    context = MagicMock(node="a", ranks={rank.key: rank})
    attempt = cast("Any", SimpleNamespace(verified=True, declared=False, received=dict))

    async def scenario() -> None:
        driver = LaneDriver(context, "r0")
        driver.lane = Lane("r0", (Slot(rank.key, "a", 1, "i", 1, "d"),), (), (), (), "")
        driver.attempt, driver._preparer.prepared = attempt, PUBLISHED
        if again:
            driver.lends_anew(rank, PUBLISHED)
        await driver._transfer(PUBLISHED)
        await driver.close()

    asyncio.run(scenario())
    assert (attempt.declared, rank.complete) == ((False, None) if again else (True, PUBLISHED))


@pytest.mark.parametrize(
    ("stage", "lent_for", "failure"),
    [
        ("committed", PubId(1, 8), None),
        ("committed", PubId(2, 6), None),
        ("committed", PUBLISHED, "engine/r0/0 lends what it held"),
        ("prepare", PubId(1, 8), None),
        ("prepare", PUBLISHED, "engine/r0/0 lends what it held"),
        ("commit", PubId(1, 8), "engine/r0/0 lends what it held"),
        ("transfer", PubId(1, 8), "engine/r0/0 lends what it held"),
    ],
)
def test_a_rank_that_lends_for_what_its_node_has_not_heard_of_yet(
    stage: str, lent_for: PubId, failure: str | None
) -> None:
    """The lead's node heard of the next publication first, as when the leader of etcd dies: no other attempt is needed
    for that where the one before is over."""

    async def scenario() -> None:
        driver = LaneDriver(MagicMock(node="a"), "r0")
        driver.lane = Lane("r0", (), (), (), (), "")
        driver._stage, driver._preparer.prepared = Stage(stage, PUBLISHED, ""), PUBLISHED
        driver.lends_anew(cast("Any", SimpleNamespace(key="engine/r0/0")), lent_for)
        said.append(driver._voice.failure)
        await driver.close()

    said: list[Any] = []
    asyncio.run(scenario())
    assert said == [None if failure is None else ((), failure, False)]


@pytest.mark.parametrize("life", ["old", "new"])
def test_a_ticket_is_for_the_process_that_verified(life: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may come back before the lease of its records ends, and hear of a commit stage of its former processes."""
    slot, told = Slot("engine/r0/0", "a", 1, "old", 1, "d"), list[str]()
    lead = SimpleNamespace(
        session=SimpleNamespace(incarnation=life),
        digest="d",
        shadowed=True,
        taken=PubId(0, 0),
        served=PubId(0, 0),
        holds=lambda _about: True,
    )
    view = SimpleNamespace(slots=lambda: {slot.key: slot})
    context = MagicMock(node="a", ranks={slot.key: lead}, agreement=SimpleNamespace(view=view))

    async def scenario() -> None:
        driver = LaneDriver(context, "r0")
        driver.lane = Lane("r0", (slot,), (), (), (), "")
        monkeypatch.setattr(driver, "tell", lambda _rank, kind, about: told.append(f"{kind} {tuple(about)}"))
        await driver._committer.commit(PUBLISHED)
        await driver.close()

    asyncio.run(scenario())
    assert told == (["apply (1, 7)"] if life == "old" else [])


@pytest.mark.parametrize(
    ("token", "phase", "delay"), [(5, "verified", 0.0), (5, "prepared", 2.0), (4, "verified", 2.0)]
)
def test_who_said_that_it_has_verified_says_at_once_that_it_has_not(token: int, phase: str, delay: float) -> None:
    """However often tokens have failed: a commit may rest on that word as long as it stands. It fails slowly else."""
    ack = Ack(token, "d", phase, *PUBLISHED, {}, PUBLISHED)
    view = SimpleNamespace(ack=lambda _replica, _node: ack)
    context = SimpleNamespace(agreement=SimpleNamespace(view=view), node="b")
    voice = Voice(cast("Any", SimpleNamespace(context=context, replica="r0", token=5)))
    voice._failures = 9
    assert voice.fail(Failure((), "took its memory back", permanent=False)) == delay
    voice.committed()
    assert voice.fail(Failure((), "took its memory back", permanent=False)) == 0.0


@pytest.mark.parametrize(("kind", "left"), [("receive", False), ("apply", True)])
def test_a_ticket_to_receive_goes_with_a_token_that_failed(
    monkeypatch: pytest.MonkeyPatch, kind: str, left: bool
) -> None:
    """There may be nothing to receive any more, and who takes it is dirty. What is to be applied is there."""
    said: list[Any] = []
    session = SimpleNamespace(incarnation="i", event=lambda name, ticket: said.append((name, ticket)))
    lead = cast("Any", SimpleNamespace(
        key="engine/r0/0", session=session, told=(kind, PUBLISHED, 5), receiving=None, page=SimpleNamespace(taken=None),
    ))  # fmt: skip

    async def scenario() -> None:
        driver = LaneDriver(MagicMock(node="a", ranks={lead.key: lead}), "r0")
        driver._stage = Stage("failed", PUBLISHED, "")
        await driver._act()
        await driver.close()

    asyncio.run(scenario())
    assert (bool(lead.told), said) == (left, [] if left else [("ticket", None)])


BREAK = {"kind": "failed", "token": 5, "attempt": 0, "edge": ["t", "e"], "reason": "EOF"}


@pytest.mark.parametrize(("members", "declared", "stage"), [
    ({"e"}, True, "transfer"), ({"e"}, True, "commit"),
    ({"e"}, False, "transfer"), (set(), True, "transfer"), ({"e"}, True, "committed"),
])  # fmt: skip
def test_an_edge_that_nobody_needs_any_more_takes_nothing_back(
    members: set[str], declared: bool, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that ends when all have verified: a commit may rest on that. The lane fails when it is committed."""
    monkeypatch.setattr(lane_module, "stage", lambda _view, _replica: Stage("committed", PUBLISHED, ""))

    async def scenario() -> list[Failure | None]:
        driver = LaneDriver(MagicMock(node="a"), "r0")
        driver.token, driver.lane = 5, Lane("r0", (), (), (), (), "")
        driver.built, driver._stage = cast("Any", SimpleNamespace()), Stage(stage, PUBLISHED, "")
        driver.attempt = cast("Any", SimpleNamespace(members=members, declared=declared, publication=PUBLISHED))
        monkeypatch.setattr(Voice, "fail", lambda voice, failure: setattr(voice, "failure", failure) or 0.0)
        driver.on_message(cast("Any", SimpleNamespace(key="e")), BREAK)
        said = [driver._voice.failure]
        driver._enter(Stage("committed", PUBLISHED, ""))
        await driver.close()
        return [*said, driver._voice.failure]

    failure = Failure(("t", "e"), "EOF", False)
    late = bool(members) and declared and stage != "committed"
    assert asyncio.run(scenario()) == [None if late else failure, failure]


@pytest.mark.parametrize(("here", "left"), [(True, ["r0"]), (False, [])])
def test_lanes_of_replicas_that_are_no_more_are_forgotten(here: bool, left: list[str]) -> None:
    """Each would look ten times a second, for ever; one whose engine is here waits for its replica."""

    async def scenario() -> None:
        driver = LaneDriver(MagicMock(node="a"), "r0")
        rank = SimpleNamespace(session=SimpleNamespace(group="r0"))
        ranks, agreement = {"engine/r0/0": rank} if here else {}, SimpleNamespace(view=SimpleNamespace(lanes={}))
        job = cast("Any", SimpleNamespace(lanes={"r0": driver}, ranks=ranks, agreement=agreement))
        await Job._forget_lanes(job)
        assert (list(job.lanes), driver._task.done()) == (left, not here)
        await driver.close()

    asyncio.run(scenario())
