"""Which lane goes for the newest publication, and when: supersession, `max_dirty`, and neighbours that wait."""

from __future__ import annotations

from collections.abc import Iterator

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.holders import Covers, unheld
from refitd.epoch.publish import guards
from refitd.epoch.records import Lane, PubId, Refit
from refitd.epoch.stage import committed, hopeless, served, started
from refitd.epoch.view import View

HOLD_PUBLICATIONS = 8  # a replica waits no longer than so many publications for one that reads from it
LOST = "no holder of the older one is left"


def refits(view: View, facts: Facts, covers: Covers) -> Iterator[Write]:
    """Lanes that move on to the newest publication now."""
    newest, publication = view.newest, view.publication
    if newest is None or publication is None:
        return
    number = publication.value.number
    for replica, reason in _whose_turn(view, facts, newest, covers):
        present = view.refits.get(replica)
        lost = _lost_so_far(view, replica, newest, reason)
        record = Refit(newest.generation, newest.revision, publication.value.step, reason, number, lost)
        expected = present.revision if present else 0
        yield Write(f"refits/{replica}", encode(record), expected, reason, guards(view))


def _lost_so_far(view: View, replica: str, newest: PubId, reason: str) -> int:
    """Publications that the replica has lost since its last commit. One that has committed nothing in its present life
    loses any that it does not reach: the lane may have turned in the middle of it."""
    stored, lane = view.refits.get(replica), view.lanes[replica].value
    if stored is None or stored.value.generation != newest.generation or committed(view, lane, stored.value.id):
        return 0
    commit = view.commits.get(replica)
    joins = commit is None or commit.value.incarnations != lane.incarnations
    return stored.value.abandoned + (joins or reason == LOST)


def _whose_turn(view: View, facts: Facts, newest: PubId, covers: Covers) -> Iterator[tuple[str, str]]:
    """Replicas that move on, and why: those that serve nothing whole at once, others while `max_dirty` allows."""
    lanes = view.open_lanes()
    wants = {name: why for name, lane in lanes.items() if (why := move_on(view, lane, facts, newest, covers))}
    if not wants:
        return
    room = _room(view, facts)
    for replica in sorted(wants, key=lambda name: (lag(view, name) <= 1, name)):
        costs = _in_place(view, replica) and _clean(view, lanes[replica])
        if costs and room <= 0:
            continue
        room -= costs
        yield replica, wants[replica]


def _room(view: View, facts: Facts) -> int:
    """How many more in_place replicas may become dirty. Slow and hopeless ones do not keep the others back."""
    in_place = {name: lane for name, lane in view.open_lanes().items() if _in_place(view, name)}
    limit = facts.max_dirty or max(1, len(in_place) - 1)
    dirty = [n for n, lane in in_place.items() if not _clean(view, lane) and n not in facts.slow]
    return limit - sum(not hopeless(view, in_place[name]) for name in dirty)


def _in_place(view: View, replica: str) -> bool:
    return any(info.mode == "in_place" for info in view.replicas().get(replica, {}).values())


def _clean(view: View, lane: Lane) -> bool:
    """Whether the replica has whole weights, and no order to change them."""
    refit = view.refits.get(lane.replica)
    return bool(refit and committed(view, lane, refit.value.id))


def lag(view: View, replica: str) -> int:
    """How many publications a replica's last commit is behind the newest."""
    commit = view.commits.get(replica)
    newest = view.publication.value.number if view.publication else 0
    return newest - (commit.value.number if commit else 0)


def move_on(view: View, lane: Lane, facts: Facts, newest: PubId, covers: Covers) -> str:
    """Why the lane should go for the newest publication; empty where it should not."""
    stored = view.refits.get(lane.replica)
    if stored is None:
        return "first refit of the replica"
    refit = stored.value.id
    if refit == newest:
        return ""
    whole = committed(view, lane, refit)
    if whole and unheld(view, lane.replica, newest, covers):
        return ""  # what it serves is better than what nobody has
    if refit.generation != newest.generation:
        return f"generation {newest.generation} has begun"
    if whole:
        waits = not served(view, lane, refit) or awaited(view, lane.replica, facts)
        return "" if waits else "the last one is applied"
    if not started(view, lane, refit):
        stays = _waited_for(view, lane.replica) and lane.replica not in facts.slow
        return "" if stays else "a newer one came before the first byte"
    return LOST if facts.store_settled and unheld(view, lane.replica, refit, covers) else ""


def awaited(view: View, replica: str, facts: Facts) -> str:
    """The replica that needs this one to keep its publication a little longer; empty where none does.

    One that has lost a publication before it had it whole would lose every one if all that hold it always moved on: the
    first that holds its present one waits for it, for at most `HOLD_PUBLICATIONS`.
    """
    for other in _waiting(view).get(replica, ()):
        if other not in facts.slow and not hopeless(view, view.lanes[other].value):
            return other
    return ""


def _waited_for(view: View, replica: str) -> bool:
    return any(replica in others for others in _waiting(view).values())


def _waiting(view: View) -> dict[str, list[str]]:
    return view.memo("waiting", ("lanes", "refits", "commits", "publication"), lambda: _holds(view))


def _holds(view: View) -> dict[str, list[str]]:
    """Replicas that have lost publications before, by the one that keeps the present one for them: the first that they
    read from, else the first that has committed it, which they turn to when the trainers' loan ends."""
    found: dict[str, list[str]] = {}
    for name, lane in view.open_lanes().items():
        refit = view.refits.get(name)
        if not refit or not refit.value.abandoned or committed(view, lane, refit.value.id):
            continue
        reads = [slot.key.split("/")[1] for slot in lane.sources if slot.key.startswith("engine/")]
        holder = next((other for other in (*reads, *sorted(view.commits)) if _keeps(view, other, refit.value.id)), None)
        if holder and holder != name:
            found.setdefault(holder, []).append(name)
    return found


def _keeps(view: View, replica: str, publication: PubId) -> bool:
    """Whether a replica has committed the publication, and is not so late that it should not wait any more."""
    lane, commit = view.open_lanes().get(replica), view.commits.get(replica)
    if commit is None or lane is None or commit.value.incarnations != lane.incarnations:
        return False
    return commit.value.id == publication and lag(view, replica) <= HOLD_PUBLICATIONS
