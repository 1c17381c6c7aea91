"""Who holds a publication, whom a lane asks, whom it does without."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
from epoch_records import E0, E1, NONE, T0, T1, Book, all_ack, covers, info, standard

from refitd.epoch.holders import Group, Side, choose_sources, holders, trainers
from refitd.epoch.lanes import NOBODY, desired_lane, differs, target_of
from refitd.epoch.records import Exclusion, Lane, PubId, SlotId, Suspicion
from refitd.epoch.suspicion import judge

R1 = "engine/r1/0"


def with_neighbour() -> tuple[Book, PubId]:
    """The standard book with a replica r1 of one whole rank on e0."""
    book, target = standard()
    book.node("e0", info(E0, "a", 2), info(R1, "ab"))
    book.lane("r0", (E0, E1), (T0, T1))
    return book, target


def test_trainers_are_the_ranks_of_the_present_run() -> None:
    """Other runs and engines are not."""
    book, _target = standard()
    book.node("t2", info("trainer/run2/0", "ab"))
    assert sorted(trainers(book.view)) == [T0, T1]
    assert trainers(Book("").view) == {}


def test_holders_are_open_loans_and_committed_replicas() -> None:
    """A loan that ended, or that another life of the rank gave, holds nothing."""
    book, target = with_neighbour()
    assert sorted(holders(book.view, target)) == [T0, T1]
    book.offer("t1")
    assert sorted(holders(book.view, target)) == [T0]
    book.node("t0", info(T0, "a", 2, life="2"))
    assert holders(book.view, target) == {}
    book.commit("r0", target)
    assert sorted(holders(book.view, target)) == [E0, E1]
    book.node("e1", info(E1, "b", 2, life="2"))
    assert sorted(holders(book.view, target)) == [E0]


def test_a_replica_that_goes_for_another_publication_holds_the_old_one_no_more() -> None:
    """Its memory changes under the reader."""
    book, target = with_neighbour()
    book.commit("r0", target)
    newer = book.publish(step=2)
    book.refit("r0", newer)
    assert holders(book.view, target) == {}


def test_sources_are_committed_replicas_before_trainers() -> None:
    """A joiner leaves the trainers alone where a neighbour has it all; halves from both sides are the last choice."""
    book, target = with_neighbour()

    def chosen() -> tuple[list[str], str]:
        slots, reason = choose_sources(book.view, None, "r1", target, set(), covers)
        return [slot.key for slot in slots], reason

    assert chosen() == ([T0, T1], "trainer ranks of the generation")
    book.commit("r0", target)
    assert chosen() == ([E0, E1], "replicas that committed it")
    book.node("e1")
    assert chosen() == ([T0, T1], "trainer ranks of the generation")
    book.offer("t0")
    assert chosen() == ([E0, T1], "replicas and trainers together")
    book.offer("t1")
    assert chosen() == ([], "no live holder of every region")


def test_sources_stay_as_long_as_they_hold_what_is_needed() -> None:
    """A refit under way is not turned for a better idea, and is turned when one of them is excluded."""
    book, target = with_neighbour()
    lane = book.lane("r1", [R1], (T0, T1))
    book.commit("r0", target)
    assert choose_sources(book.view, lane, "r1", target, set(), covers) == (
        lane.sources,
        "the sources are as before",
    )
    slots, reason = choose_sources(book.view, lane, "r1", target, {book.slot(T0).id}, covers)
    assert ([slot.key for slot in slots], reason) == ([E0, E1], "replicas that committed it")


FROM_R1 = next(
    name for name in map(str, range(99)) if zlib.crc32(name.encode()) % 3 == 0
)  # where three are in a circle


def replicas(*names: str) -> Side:
    """Committed replicas of two ranks each; a rank's layout is named by its number."""
    slots = {name: [SlotId(f"{name}/{rank}", name, 1, 1) for rank in range(2)] for name in names}
    return Side.of(Group(name, tuple(ids), ("half 0", "half 1")) for name, ids in slots.items())


def chosen(own: str, world: int, before: set[str]) -> list[str]:
    side = replicas("r1", "r2", "r3", "r4", "r5")
    few = side.few(own, set(), 2 * world, lambda digests: len(set(digests)) == 2, before)
    assert few is not None
    names = [group.name for group in few.groups]
    assert [slot.key for slot in few.ids] == [f"{name}/{rank}" for name in names for rank in range(2)]
    return names


def test_a_lane_reads_from_some_of_many_replicas() -> None:
    """Two ranks for each of its own, or all there are, but its own; from those that it reads from, as far as they hold
    it; and not all lanes from the same."""
    assert [len(chosen("r9", world, set())) for world in (1, 2, 3, 5, 9)] == [1, 2, 3, 5, 5]
    assert chosen("r2", 9, set()) == ["r1", "r3", "r4", "r5"]
    assert chosen("r9", 2, {"r2", "r4", "r7"}) == ["r2", "r4"]
    assert len({tuple(chosen(f"r{number}", 1, set())) for number in range(10, 40)}) == 5


def test_more_replicas_are_asked_where_few_do_not_hold_everything() -> None:
    """Excluded ranks hold nothing; what the same layouts did not hold is not asked again; none where all do not do."""
    side, asked = replicas("r1", "r2", "r3"), list[tuple[str, ...]]()

    def covers(digests: tuple[str, ...]) -> bool:
        asked.append(digests)
        return set(digests) == {"half 0", "half 1"}

    out = {SlotId(f"r{number}/1", f"r{number}", 1, 1) for number in (1, 2)}
    few = side.few(FROM_R1, out, 1, covers)
    assert few is not None
    assert [slot.key for slot in few.ids] == ["r1/0", "r2/0", "r3/0", "r3/1"]
    assert asked == [("half 0",), ("half 0", "half 0", "half 0", "half 1")]
    assert side.few(FROM_R1, {*out, SlotId("r3/1", "r3", 1, 1)}, 1, covers) is None
    assert replicas().few(FROM_R1, set(), 1, covers) is None


def test_a_replica_is_no_source_of_its_own() -> None:
    """Idle lanes name the trainers of the generation, whatever they hold."""
    book, target = standard()
    book.commit("r0", target)
    book.offer("t0")
    book.offer("t1")
    slots, _reason = choose_sources(book.view, None, "r0", target, set(), covers)
    assert slots == ()
    slots, reason = choose_sources(book.view, None, "r0", None, set(), covers)
    assert ([slot.key for slot in slots], reason) == ([T0, T1], "trainer ranks of the generation")


def wanted(book: Book, replica: str = "r0") -> Lane:
    lane = desired_lane(book.view, replica, covers)
    assert isinstance(lane, Lane), lane
    return lane


def test_a_whole_replica_gets_its_ranks_in_order() -> None:
    """Rank 0 leads; the trainers are the sources."""
    book, _target = standard()
    book.delete("lanes/r0")
    lane = wanted(book)
    assert [slot.key for slot in lane.members] == [E0, E1]
    assert [slot.key for slot in lane.sources] == [T0, T1]
    assert (lane.lead.key, lane.nodes, lane.neighbours, lane.excluded) == (E0, ("e0", "e1", "t0", "t1"), (), ())


@pytest.mark.parametrize(
    ("rank", "why"),
    [((), "rank 1 is not registered"), ((info(E1, "b", 2, mover=0),), "engine/r0/1: no working mover")],
)
def test_a_replica_that_is_not_whole_has_no_lane(rank: tuple[object, ...], why: str) -> None:
    """A missing rank, or one without a mover, is named."""
    book, _target = standard()
    book.node("e1", *rank)  # type: ignore[arg-type]
    assert desired_lane(book.view, "r0", covers) == why


def test_a_replica_that_nobody_knows_has_no_lane() -> None:
    """Its lane record may outlive all of its ranks."""
    book, _target = standard()
    assert desired_lane(book.view, "r9", covers) == "rank 0 is not registered"


def test_ranks_of_a_replica_take_weights_in_one_way() -> None:
    """A ticket to apply is none for a rank that would have to receive: it would serve the older publication."""
    book, _target = standard()
    shadow = dataclasses.replace(info(E1, "b", 2), mode="host_shadow")
    book.node("e0", dataclasses.replace(info(E0, "a", 2), mode="in_place"))
    book.node("e1", shadow)
    assert desired_lane(book.view, "r0", covers) == "some of its ranks take weights in_place, and others in a shadow"
    book.node("e0", dataclasses.replace(info(E0, "a", 2), mode="device_shadow"))
    assert isinstance(desired_lane(book.view, "r0", covers), Lane)


@pytest.mark.parametrize("anew", [False, True])
def test_a_lane_whose_sources_died_needs_none_where_its_ranks_have_all(anew: bool) -> None:
    """What a node verified under the token before counts, but not for a process that came after that token."""
    book, target = standard()
    all_ack(book, "verified", target)
    if anew:
        book.node("e0", dataclasses.replace(info(E0, "a", 2, mover=2, life="2"), claim=book.revision))
    for node in ("t0", "t1"):
        book.delete(f"members/{node}")
    book.lane("r0", (E0, E1), ())
    wanted = desired_lane(book.view, "r0", covers)
    if anew:
        assert wanted == "no live holder of every region"
    else:
        assert isinstance(wanted, Lane)
        assert (wanted.sources, wanted.reason) == ((), "its own ranks hold it")


def test_without_holders_there_is_no_lane() -> None:
    """One half is missing."""
    book, _target = standard()
    book.delete("lanes/r0")
    book.offer("t1")
    assert desired_lane(book.view, "r0", covers) == "no live holder of every region"


def test_neighbours_are_members_of_earlier_lanes_on_the_same_nodes() -> None:
    """Waiting runs one way: r1 may wait for r0, never the other way round, and never for other nodes."""
    book, _target = with_neighbour()
    book.lane("r1", [R1], (T0, T1))
    assert [slot.key for slot in wanted(book, "r1").neighbours] == [E0]
    assert wanted(book, "r0").neighbours == ()


def test_a_lane_that_reads_from_replicas_has_no_neighbours() -> None:
    """They hold the publication already."""
    book, target = with_neighbour()
    book.commit("r0", target)
    lane = wanted(book, "r1")
    assert ([slot.key for slot in lane.sources], lane.neighbours) == ([E0, E1], ())


def test_a_verified_lane_keeps_sources_that_have_died() -> None:
    """They have done their part; a member that dies turns it all the same."""
    book, target = standard()
    lane = book.view.lanes["r0"].value
    all_ack(book, "prepared", target)
    all_ack(book, "verified", target, ["e0", "e1"])
    book.delete("members/t0")
    assert wanted(book) == lane
    book.node("e1", info(E1, "b", 2, mover=2))
    assert desired_lane(book.view, "r0", covers) == "no live holder of every region"


def test_the_target_is_the_refit_until_it_is_committed() -> None:
    """Then there is none; without members, or in a new generation, it is the newest publication."""
    book, target = standard()
    newer = book.publish(step=2)
    lane = book.view.lanes["r0"].value
    assert target_of(book.view, "r0", lane) == target
    assert target_of(book.view, "r0", None) == newer
    book.commit("r0", target)
    assert target_of(book.view, "r0", lane) is None
    book.refit("r0", PubId(0, target.revision))
    assert target_of(book.view, "r0", lane) == newer


def test_differences_name_who_goes_and_who_comes() -> None:
    """Members before sources before neighbours; the reason and the exclusions make no difference."""
    book, _target = with_neighbour()
    lane = book.view.lanes["r0"].value
    assert differs(
        lane, Lane("r0", lane.members, lane.sources, (), (Exclusion(book.slot(T0).id, False, ""),), "x")
    ) == ("", False)
    less = Lane("r0", lane.members, lane.sources[:1], (), (), "")
    assert differs(lane, less) == (f"sources changed: -({T1})", True)
    assert differs(less, lane) == (f"sources changed: +({T1})", False)
    other = Lane("r0", (lane.members[0], book.slot(R1)), lane.sources, (), (), "")
    assert differs(lane, other) == (f"members changed: -({E1}) +({R1})", True)
    more = Lane("r0", lane.members, lane.sources, (book.slot(R1).id,), (), "")
    assert differs(lane, more) == (f"neighbours changed: +({R1})", False)


def excluded(book: Book, replica: str = "r0") -> list[tuple[str, bool, str]]:
    lane = book.view.lanes[replica].value
    found = judge(book.view, lane, target_of(book.view, replica, lane), NOBODY, covers)
    return [(exclusion.slot.key, exclusion.passing, exclusion.reason) for exclusion in found.excluded]


def spare() -> Book:
    """The standard book with a third trainer rank that holds everything, among the sources of r0."""
    book, _target = standard()
    book.node("t2", info("trainer/run1/2", "ab", 3))
    book.lane("r0", (E0, E1), (T0, T1, "trainer/run1/2"))
    return book


def test_the_source_is_blamed_by_the_destination() -> None:
    """A failed edge costs the source its place where others hold its region."""
    book = spare()
    book.ack("r0", "e0", "failed", edge=(T0, E0))
    assert excluded(book) == [(T0, False, "e0: broke")]


def test_the_destination_is_blamed_by_the_source_alone() -> None:
    """Only the other end may say so, and not when the destination complains of the same edge."""
    book = spare()
    book.ack("r0", "t0", "failed", edge=(T0, E0))
    assert excluded(book) == [(E0, False, "t0: broke")]
    book.ack("r0", "e0", "failed", edge=(T0, E0))
    assert excluded(book) == [(T0, False, "e0: broke")]


def test_the_last_holder_is_never_excluded() -> None:
    """Without a spare the blamed source stays."""
    book, _target = standard()
    book.ack("r0", "e0", "failed", edge=(T0, E0))
    assert excluded(book) == []


def test_two_holders_of_a_region_do_not_go_together() -> None:
    """Either may, and the other is the last one then: a lane without sources would never be written, nor heard of."""
    book, third = spare(), "trainer/run1/2"
    offers = [offer for node, key in (("t0", T0), ("t1", T1), ("t2", third)) for offer in book.offer(node, key, seq=2)]
    book.refit("r0", book.publish(*offers))
    book.lane("r0", (E0, E1), (T0, T1, third))
    book.ack("r0", "e0", "failed", edge=(third, E0))
    book.ack("r0", "e1", "failed", edge=(T0, E1))
    assert excluded(book) == [(third, False, "e0: broke")]
    lane = desired_lane(book.view, "r0", covers)
    assert isinstance(lane, Lane)
    assert [slot.key for slot in lane.sources] == [T0, T1]


def test_edges_of_strangers_and_failures_without_edge_blame_nobody() -> None:
    """A name that is not in the lane, or none at all."""
    book = spare()
    book.ack("r0", "e0", "failed", edge=("trainer/run1/9", E0))
    book.ack("r0", "e1", "failed")
    assert excluded(book) == []


def test_an_edge_of_which_one_end_has_ended_blames_nobody() -> None:
    """The other end is innocent, whoever of the two complained."""
    book = spare()
    book.ack("r0", "e0", "failed", edge=(T0, E0))
    book.node("e0", info(E0, "a", 2, mover=2))
    assert excluded(book) == []
    book = spare()
    book.ack("r0", "t0", "failed", edge=(T0, E0))
    book.delete("members/t0")
    assert excluded(book) == []


def test_a_neighbour_is_excluded_in_passing() -> None:
    """Until the refit ends; a lasting exclusion stays, and both end with the slot's life."""
    book, _target = with_neighbour()
    book.lane("r1", [R1], (T0, T1), [E0])
    book.ack("r1", "e0", "failed", edge=(E0, R1))
    assert excluded(book, "r1") == [(E0, True, "e0: broke")]
    kept = [Exclusion(book.slot(E0).id, True, "was slow"), Exclusion(book.slot(E1).id, False, "was dead")]
    book.lane("r1", [R1], (T0, T1), excluded=kept)
    book.refit("r1", PubId(1, book.view.publication.revision if book.view.publication else 0))
    assert excluded(book, "r1") == [(E0, True, "was slow"), (E1, False, "was dead")]
    book.commit("r1", PubId(1, book.view.publication.revision if book.view.publication else 0))
    assert excluded(book, "r1") == [(E1, False, "was dead")]
    book.node("e1", info(E1, "b", 2, mover=2))
    assert excluded(book, "r1") == []


def test_a_closed_lane_blames_nobody_and_opens_again() -> None:
    """It has no sources any more: by its own record every slot could be spared, the last holder too, and for ever."""
    book, target = standard()
    t1 = book.slot(T1).id
    suspicions = tuple(Suspicion(t1, book.slot(key).id, node) for key, node in ((E0, "e0"), (E1, "e1")))
    book.put("lanes/r0", Lane("r0", (), (), (), (), "rank 1 is not registered", suspicions))
    assert excluded(book) == []
    opened = desired_lane(book.view, "r0", covers)
    assert isinstance(opened, Lane)
    assert [source.key for source in opened.sources] == [T0, T1]
    assert opened.suspicions == suspicions
    book.put("lanes/r0", opened)
    assert excluded(book) == []
    assert target_of(book.view, "r0", opened) == target


def test_an_excluded_member_closes_the_lane() -> None:
    """Its replica is not whole without it."""
    book = spare()
    book.ack("r0", "t0", "failed", edge=(T0, E0))
    assert desired_lane(book.view, "r0", covers) == f"{E0}: no working mover"


def test_nothing_is_kept_of_a_lane_that_never_was() -> None:
    """No lane, no exclusions."""
    book, _target = standard()
    assert judge(book.view, None, NONE, NOBODY, covers) == ((), ())


def test_a_source_of_the_few_is_blamed_where_replicas_that_are_not_read_from_hold_it_too() -> None:
    """Who is the last holder does not depend on whom the lane reads from."""
    book, target = with_neighbour()
    lane = book.lane("r1", [R1], (E0, E1))
    book.commit("r0", target)
    book.refit("r1", target)
    book.ack("r1", lane.lead.node, "failed", edge=(E0, R1))
    assert excluded(book, "r1") == [(E0, False, f"{lane.lead.node}: broke")]
    book.offer("t0")
    book.offer("t1")
    assert excluded(book, "r1") == [], "nobody else has it now"
