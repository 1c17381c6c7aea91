"""Records to bytes and back, and the view that is made of them."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from epoch_records import T0, Book, info, standard
from hypothesis import given, settings

from refitd.epoch.codec import decode, encode
from refitd.epoch.records import (
    Ack,
    Exclusion,
    Lane,
    Leader,
    Member,
    Offer,
    Offers,
    PubId,
    ReportRecord,
    Slot,
    SlotId,
    check_name,
)
from refitd.epoch.view import View
from refitd.errors import InputError, ProtocolError

TEXT, COUNT = st.text(max_size=8), st.integers(0, 1 << 62)
KEYS = st.builds("{}/{}".format, TEXT, st.integers(0, 99))
SLOTS = st.builds(Slot, KEYS, TEXT, COUNT, TEXT, COUNT, TEXT)
IDS = st.builds(SlotId, KEYS, TEXT, COUNT, COUNT)
LANES = st.builds(
    Lane, TEXT, st.lists(SLOTS, max_size=2).map(tuple), st.lists(IDS, max_size=2).map(tuple),
    st.just(()), st.lists(st.builds(Exclusion, IDS, st.booleans(), TEXT), max_size=2).map(tuple), TEXT,
)  # fmt: skip
ACKS = st.builds(
    Ack, COUNT, TEXT, TEXT, COUNT, COUNT, st.dictionaries(TEXT, TEXT, max_size=2), st.tuples(COUNT, COUNT),
    st.lists(TEXT, max_size=2).map(tuple), TEXT, st.booleans(),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.one_of(LANES, ACKS))
def test_what_is_encoded_is_decoded(record: Lane | Ack) -> None:
    """Bytes and back gives an equal record, and equal records give equal bytes."""
    data = encode(record)
    assert decode(type(record), data, "key") == record
    assert encode(decode(type(record), data, "key")) == data


GOOD = json.loads(encode(Offers((Offer(T0, "i", "run1", 3, -1),))))


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"offers": 3}, "offers/n.offers", "a list"),
        ({"offers": [3]}, "offers/n.offers[0]", "an object"),
        ({"offers": [{**GOOD["offers"][0], "seq": "3"}]}, "offers/n.offers[0].seq", "int"),
        ({"offers": [{**GOOD["offers"][0], "seq": True}]}, "offers/n.offers[0].seq", "int"),
        ({"offers": [{k: v for k, v in GOOD["offers"][0].items() if k != "run"}]}, "offers/n.offers[0].run", "a value"),
    ],
)
def test_each_wrong_field_is_named(change: dict[str, object], field: str, expected: str) -> None:
    """The path below the key says where."""
    with pytest.raises(ProtocolError) as caught:
        decode(Offers, json.dumps({**GOOD, **change}).encode(), "offers/n")
    assert (caught.value.field, caught.value.expected) == (field, expected)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[", b"[" * 100_000])
def test_bytes_that_are_no_json_are_refused(data: bytes) -> None:
    """Whatever lies in the store."""
    with pytest.raises(ProtocolError) as caught:
        decode(Offers, data, "offers/n")
    assert (caught.value.field, caught.value.expected) == ("offers/n", "a JSON object")


def test_dicts_and_pairs_are_checked_inside() -> None:
    """Ack.held maps text to text and Ack.served is a pair."""
    ack = json.loads(encode(Ack(1, "d", "built", 0, 0, {"k": "v"}, (0, 0))))
    for change, field in (({"held": {"k": 1}}, "a.held.k"), ({"held": []}, "a.held"), ({"served": [1]}, "a.served")):
        with pytest.raises(ProtocolError) as caught:
            decode(Ack, json.dumps({**ack, **change}).encode(), "a")
        assert caught.value.field == field


def test_fields_of_a_newer_daemon_are_ignored_and_defaults_fill_in() -> None:
    """Records may grow."""
    old = {"token": 1, "digest": "d", "phase": "built", "generation": 0, "revision": 0, "held": {}, "served": [0, 0]}
    assert decode(Ack, json.dumps({**old, "mood": "good"}).encode(), "a") == Ack(1, "d", "built", 0, 0, {}, (0, 0))


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "a" * 129, "ä"])
def test_names_that_cannot_be_keys_are_refused(name: str) -> None:
    """InputError names the field."""
    with pytest.raises(InputError) as caught:
        check_name("job", name)
    assert caught.value.field == "job"
    assert check_name("job", "a.b_c:d@e-1") == "a.b_c:d@e-1"


def test_a_view_keeps_the_newest_whatever_the_order() -> None:
    """Events that are older than what is here change nothing; a deletion is an event like any other."""
    view, old, new = View(), encode(Leader("a", "1")), encode(Leader("b", "2"))
    assert view.put("leader", new, 5, 7)
    assert not view.put("leader", old, 5, 6)
    assert not view.put("leader", new, 5, 7)
    assert not view.delete("leader", 6)
    assert (view.leader and view.leader.value.node, view.revision_of("leader"), view.created_of("leader")) == (
        "b",
        7,
        5,
    )
    assert view.keys() == {"leader"}
    assert view.delete("leader", 8)
    assert (view.leader, view.keys(), view.revision_of("leader")) == (None, set(), 0)
    assert not view.delete("leader", 9)


def test_a_view_keeps_tables_by_name_and_ignores_what_it_does_not_know() -> None:
    """Unknown kinds are nobody's error; a broken record names its key and leaves the old one."""
    view = View()
    member = Member("n", "n", "n:1", "i", "b", (1,), ())
    assert not view.put("weather/today", b"{}", 1, 1)
    assert not view.put("lanes", b"{}", 1, 1)
    assert view.put("members/n", encode(member), 2, 2)
    with pytest.raises(ProtocolError, match=r"members/n\.node"):
        view.put("members/n", b"{}", 2, 3)
    assert view.members["n"].value == member
    assert view.keys() == {"members/n"}
    assert view.delete("members/n", 4)
    assert view.members == {}


def test_slots_are_ranks_that_have_a_mover_on_the_member_that_joined_last() -> None:
    """A rank without a mover has no slot; a key on two nodes belongs to the younger member."""
    book = Book()
    book.node("n0", info("engine/r0/0"), info("engine/r0/1", mover=0))
    younger = book.node("n1", info("engine/r0/0", mover=4))
    book.node("n0", info("engine/r0/0"), info("engine/r0/1", mover=0))
    assert list(book.view.slots()) == ["engine/r0/0"]
    assert book.slot("engine/r0/0") == Slot("engine/r0/0", "n1", younger, "engine/r0/0#1", 4, "ab")
    assert {name: sorted(ranks) for name, ranks in book.view.replicas().items()} == {"r0": [0, 1]}


def test_of_two_processes_of_a_rank_the_later_counts_wherever_it_is() -> None:
    """The one before hangs, perhaps on the node that joined last; with the later one in its place it has no say."""
    book = Book()
    older = book.node("n0", info("engine/r0/0"))
    book.node("n1", replace(info("engine/r0/0", mover=7), claim=book.revision))
    assert book.slot("engine/r0/0") == Slot("engine/r0/0", "n1", 3, "engine/r0/0#1", 7, "ab")
    book.node("n0", replace(info("engine/r0/0", mover=0, life="2"), claim=book.revision))
    assert book.view.slots() == {}, "the later one has no mover yet"
    book.node("n0", replace(info("engine/r0/0", mover=3, life="2"), claim=3))
    assert book.slot("engine/r0/0") == Slot("engine/r0/0", "n0", older, "engine/r0/0#2", 3, "ab")
    assert [(member.value.node, rank.incarnation) for member, rank in book.view.ranks()] == [("n0", "engine/r0/0#2")]
    owner = book.view.owner("engine/r0/0")
    assert owner is not None
    assert (owner[0].value.node, owner[1].mover) == ("n0", 3)
    assert book.view.owner("engine/r0/1") is None
    asked = [("n1", 1), ("n1", 3), ("n1", 4), ("n1", 0), ("n0", 1)]  # of n0's, which came at 3: earlier, at once, later
    assert [book.view.later_on("engine/r0/0", *each) for each in asked] == ["n0", "", "", "", ""]
    assert book.view.later_on("engine/r0/1", "n1", 1) == ""
    book.delete("members/n0")
    assert book.slot("engine/r0/0").node == "n1", "nobody else has it now"


def test_a_replica_is_of_the_size_that_its_rank_0_says() -> None:
    """Ranks that hang are left of a larger deployment, and ranks of a new one come before its rank 0."""
    book = Book()
    book.node("n0", *(info(f"engine/r0/{rank}", world=3) for rank in range(3)))
    book.node("n1", *(replace(info(f"engine/r0/{rank}", world=2), claim=1) for rank in range(2)))
    assert {rank: found.world for rank, found in book.view.replicas()["r0"].items()} == {0: 2, 1: 2}
    book.node("n1", replace(info("engine/r0/1", world=2), claim=1))
    assert {rank: found.world for rank, found in book.view.replicas()["r0"].items()} == {0: 3, 2: 3}
    book.delete("members/n0")
    assert {rank: found.world for rank, found in book.view.replicas()["r0"].items()} == {1: 2}


def test_the_newest_publication_is_of_the_present_generation() -> None:
    """What an older generation published is nobody's aim any more."""
    book = Book()
    assert book.view.newest is None
    target = book.publish()
    assert book.view.newest == target == (1, 2)
    book.publish(generation=2)
    assert book.view.newest is None


def test_acks_count_under_the_present_token_only() -> None:
    """I4: an ack of an earlier token is silence."""
    book = Book()
    book.node("n", info("engine/r0/0"), info(T0))
    book.lane("r0", ["engine/r0/0"], [T0])
    book.ack("r0", "n", "built")
    assert [ack.phase if ack else None for ack in book.view.lane_acks("r0", ("n", "m"))] == ["built", None]
    book.lane("r0", ["engine/r0/0"], [T0])
    assert book.view.lane_acks("r0", ("n",)) == [None]


def test_reports_know_their_fields() -> None:
    """A report is text for people and comes back as it was."""
    report = ReportRecord(
        1, 9, 3, ("r0",), {"r1": "it has not verified every byte yet"}, "every whole replica has ended"
    )
    assert decode(ReportRecord, encode(report), "reports/9") == report


def test_what_was_computed_for_a_publication_goes_two_publications_later() -> None:
    """A leader's picture lives as long as the job: it must not keep who held each step of it."""
    book, target = standard()
    computed: list[PubId] = []

    def ask() -> None:
        book.view.memo(("who holds", target), ("members",), lambda: computed.append(target))

    for step in range(2, 6):
        ask()
        ask()
        book.publish(step=step)
    assert computed == [target], "it is kept while it is asked for"
    book.publish(step=6)
    assert not {("who holds", target)} & (book.view._memo.keys() | book.view._before.keys())
    ask()
    assert computed == [target] * 2


def test_a_view_forgets_the_records_that_were_replaced_or_deleted() -> None:
    """Ranks come and go for as long as a job lives; the rows of each member record were kept for 16,384 of them."""
    book = Book()

    def alive() -> int:
        return sum(type(item) is Member for item in gc.get_objects())

    before = alive()
    for mover in range(1, 20):
        for node in ("n0", "n1"):
            book.node(node, info(f"engine/{node}/0", mover=mover))
            assert book.view.copy().slots() == book.view.slots()
    assert {key: slot.mover for key, slot in book.view.slots().items()} == {"engine/n0/0": 19, "engine/n1/0": 19}
    assert alive() == before + 2
    book.delete("members/n0")
    assert list(book.view.slots()) == ["engine/n1/0"]
    assert alive() == before + 1


def test_a_replica_of_which_no_ack_is_left_is_not_looked_at_any_more() -> None:
    """Replicas may have a new name each time they start."""
    book, target = standard()
    for node in ("e0", "e1"):
        book.ack("r0", node, "verified", target)
    assert book.view.acked() == ["r0"]
    book.delete("acks/r0/e0")
    assert (book.view.acked(), book.view.ackers("r0")) == (["r0"], {"e1"})
    book.delete("acks/r0/e1")
    assert (book.view.acked(), book.view.ackers("r0")) == ([], set())
