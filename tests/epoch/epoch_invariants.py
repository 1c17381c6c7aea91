"""The invariants of the design (section 9), by name, as far as records and a model of nodes can break them.

I9 (no fault of ours ends a trainer or an engine) is of processes and is asserted where there are some. The rest are
promises of a leader: what its writes may never do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.holders import draining, holders
from refitd.epoch.lanes import target_of
from refitd.epoch.records import Ack, Lane, PubId, Slot
from refitd.epoch.stage import committed
from refitd.epoch.view import View


def assert_i1_no_mix(key: str, chunks: Mapping[str, int], weights: int) -> None:
    """A replica never serves a mix."""
    assert set(chunks.values()) == {weights}, f"I1: {key} serves a mix"


def assert_i2_commits_are_whole(slot: Slot, incarnation: str, chunks: Mapping[str, int], weights: int) -> None:
    """Every byte was verified by incarnations that still live."""
    assert incarnation == slot.incarnation, f"I2: {slot.key} verified in another life"
    assert set(chunks.values()) == {weights}, f"I2: {slot.key} was not whole"


def assert_i3_never_back(key: str, before: PubId, after: PubId) -> None:
    """A replica's publication never goes back, and generations never do."""
    assert before <= after, f"I3: {key} goes back"


def assert_i4_acks_are_of_the_token(said: int, known: int, present: int) -> None:
    """Acks under an old token never count."""
    assert said == known == present, "I4: an ack under an old token"


def assert_i5_quiet_after_the_turn(token: int, present: int) -> None:
    """Nobody moves data under an old token."""
    assert token == present, "I5: bytes moved under an old token"


def assert_i6_no_changed_memory(key: str, chunks: Mapping[str, int], weights: int) -> None:
    """What was read while its lender changed it never becomes part of a commit."""
    assert set(chunks.values()) == {weights}, f"I6: {key} verified bytes that had changed"


def assert_i7_newest_reached(lagging: Iterable[str]) -> None:
    """Once faults stop, all live replicas reach the newest publication."""
    assert list(lagging) == [], "I7: not all serve the newest publication"


def assert_i8_records_at_baseline(view: View, nodes: Iterable[str]) -> None:
    """At rest the records are those of the present nodes, lanes and reports, and no others."""
    lanes = {replica: stored.value for replica, stored in view.lanes.items()}
    stray = [name for name in view.acks if name.partition("/")[2] not in lanes[name.partition("/")[0]].nodes]
    assert stray == [], "I8: acks of nodes that are in no lane"
    assert len(view.reports) <= 8, "I8: old reports"
    assert set(view.parked) | set(view.drains) <= set(nodes), "I8: records of nodes that are gone"


def assert_operators_are_heard(view: View, facts: Facts) -> None:
    """At rest no lane has members on a draining node, and nodes that flap are parked."""
    for replica, lane in view.open_lanes().items():
        kept = sorted(draining(view).intersection(lane.member_nodes))
        assert not kept, f"drain: {replica} keeps {kept}"
    free = sorted(node for node, _flaps in facts.flapping if node in view.members and node not in view.parked)
    assert not free, f"parked: {free} flaps, and is not"


def assert_i10_one_plan(acks: Iterable[Ack | None]) -> None:
    """One plan digest in a lane."""
    assert len({ack.digest for ack in acks if ack}) == 1, "I10: several plans in a lane"


def assert_decision(before: View, after: View, facts: Facts, write: Write) -> None:
    """What no write of a leader may do."""
    kind, _, name = write.key.partition("/")
    assert write.reason, f"{write.key} is written for no reason"
    if kind in ("publication", "refits"):
        assert not (before.control and before.control.value.paused), f"{write.key} is begun while the job is paused"
    if kind == "refits" and name in before.refits:
        assert_i3_never_back(name, before.refits[name].value.id, after.refits[name].value.id)
        _assert_max_dirty(before, after, facts, name)
    if kind == "generation" and before.generation and after.generation:
        assert before.generation.value.number < after.generation.value.number, "I3: generations go back"
    if kind == "lanes" and name in after.lanes:
        parked = {slot.node for slot in after.lanes[name].value.members} & set(before.parked)
        assert not parked, f"a parked node is in a lane: {sorted(parked)}"
        _assert_drained(before, after.lanes[name].value)
        if name in before.lanes:
            _assert_turn(before, after, facts, name)


def _assert_max_dirty(before: View, after: View, facts: Facts, name: str) -> None:
    """No order to change whole weights while as many others as allowed are without."""

    def dirty(view: View) -> set[str]:
        found = set()
        for replica, lane in view.open_lanes().items():
            refit = view.refits.get(replica)
            if not refit or not committed(view, lane, refit.value.id):
                found.add(replica)
        return found - facts.slow

    limit = facts.max_dirty or max(1, len(before.open_lanes()) - 1)
    if name not in dirty(before):
        assert len(dirty(after)) <= limit, f"max_dirty: {sorted(dirty(after))} of at most {limit}"


def _assert_drained(before: View, new: Lane) -> None:
    """Who drains is asked only for what nobody else can give."""
    away, own = draining(before), f"engine/{new.replica}/"
    stored = before.lanes.get(new.replica)
    target = target_of(before, new.replica, stored.value if stored else None)
    if target is None or not away & new.source_nodes:
        return
    barred = {exclusion.slot for exclusion in new.excluded}
    others = [
        slot for key, slot in holders(before, target).items()
        if slot.node not in away | set(before.parked) and slot.id not in barred and not key.startswith(own)
    ]  # fmt: skip
    assert not whole(slot.digest for slot in others), f"drain: {new.replica} reads from {sorted(away)}, and need not"


def whole(digests: Iterable[str]) -> bool:
    """Whether layouts, named after the halves of the model that they hold, hold all of it."""
    return set("ab") <= set("".join(digests))


def _assert_turn(before: View, after: View, facts: Facts, name: str) -> None:
    """Nobody is removed for absence while the store is not settled; tokens only grow."""
    old, new = before.lanes[name].value, after.lanes[name].value
    gone = set(old.ids.values()) - set(new.ids.values())
    if not facts.store_settled:
        absent = sorted(slot.key for slot in gone if slot.node not in before.members)
        assert absent == [], f"{absent} removed for absence while the store is not settled"
    assert after.lanes[name].revision > before.lanes[name].revision, "I4: a token that is not newer"
    assert len(encode(new)) <= 65536, "a record of more than 64 KiB"
