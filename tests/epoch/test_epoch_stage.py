"""Where a lane stands, by its name and with its reason."""

from __future__ import annotations

import pytest
from epoch_records import E0, E1, NONE, T0, T1, all_ack, info, standard

from refitd.epoch.records import PubId
from refitd.epoch.stage import committed, hopeless, served, stable, stage, started, verified

ALL = ("t0", "t1", "e0", "e1")


def test_a_replica_without_lane_or_members_is_gone() -> None:
    """The record of an empty lane says why."""
    book, _target = standard()
    assert stage(book.view, "r9") == ("gone", None, "the replica has no lane")
    book.lane("r0", (), ())
    assert stage(book.view, "r0") == ("gone", None, "test")


def test_build_lasts_until_every_node_has_built() -> None:
    """Silent nodes are named, members and sources alike."""
    book, target = standard()
    all_ack(book, "built", NONE, ["t0", "e1"])
    assert stage(book.view, "r0") == ("build", target, "waiting for e0, t1 to build")
    assert not stable(book.view, book.view.lanes["r0"].value)


def test_one_failure_fails_the_lane() -> None:
    """Whoever is silent meanwhile; a permanent failure leaves no hope."""
    book, target = standard()
    book.ack("r0", "e1", "failed", edge=(T0, E1))
    lane = book.view.lanes["r0"].value
    assert stage(book.view, "r0") == ("failed", target, "e1: broke")
    assert hopeless(book.view, lane) == ""
    book.ack("r0", "e1", "failed", permanent=True)
    assert hopeless(book.view, lane) == "e1: broke"


def test_different_plans_park_the_lane() -> None:
    """I10: one plan digest in a lane."""
    book, target = standard()
    all_ack(book, "built", NONE)
    book.ack("r0", "t1", "built", digest="other")
    assert stage(book.view, "r0") == ("parked", target, "the nodes computed different plans")


def test_a_lane_without_a_refit_is_idle() -> None:
    """Built, and nothing published."""
    book, _target = standard()
    book.delete("refits/r0")
    all_ack(book, "built", NONE)
    assert stage(book.view, "r0") == ("idle", None, "nothing is published")


@pytest.mark.parametrize(
    ("phases", "name", "reason"),
    [
        ({"e1": "built"}, "prepare", "waiting for e1 to lend memory"),
        ({"t0": "built"}, "prepare", "waiting for t0 to lend memory"),
        ({}, "transfer", "waiting for e0, e1 to verify"),
        ({"e0": "verified"}, "transfer", "waiting for e1 to verify"),
        ({"e0": "verified", "e1": "verified"}, "commit", "every member verified every planned byte"),
    ],
)
def test_prepare_transfer_and_commit_follow_the_acks(phases: dict[str, str], name: str, reason: str) -> None:
    """Everybody must have lent before a byte moves; only members must verify."""
    book, target = standard()
    all_ack(book, "prepared", target)
    for node, phase in phases.items():
        book.ack("r0", node, phase, NONE if phase == "built" else target)
    lane = book.view.lanes["r0"].value
    assert stage(book.view, "r0") == (name, target, reason)
    assert started(book.view, lane, target) is (name != "prepare")
    assert verified(book.view, lane, target) is (name == "commit")


def test_acks_for_another_publication_do_not_count() -> None:
    """Prepared for an older one is not prepared for this one."""
    book, target = standard()
    all_ack(book, "verified", PubId(1, target.revision - 1))
    assert stage(book.view, "r0").name == "prepare"


def test_a_commit_counts_for_the_same_incarnations_only() -> None:
    """Committed whatever the acks say; a member that was restarted has nothing."""
    book, target = standard()
    book.commit("r0", target)
    lane = book.view.lanes["r0"].value
    assert stage(book.view, "r0").name == "committed"
    assert committed(book.view, lane, target)
    assert verified(book.view, lane, target)
    book.node("e1", info(E1, "b", 2, life="2"))
    lane = book.lane("r0", (E0, E1), (T0, T1))
    assert not committed(book.view, lane, target)
    assert stage(book.view, "r0").name == "build"


def test_served_is_what_every_member_node_says() -> None:
    """One node that is behind or silent is enough; the token does not matter."""
    book, target = standard()
    lane = book.view.lanes["r0"].value
    book.ack("r0", "e0", "verified", target, served=target, token=1)
    assert not served(book.view, lane, target)
    book.ack("r0", "e1", "verified", target, served=NONE)
    assert not served(book.view, lane, target)
    book.ack("r0", "e1", "verified", target, served=PubId(target.generation, target.revision + 1))
    assert served(book.view, lane, target)
