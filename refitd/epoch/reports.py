"""How publications end, and which replicas are ready to serve."""

from __future__ import annotations

from collections.abc import Iterator

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.holders import Covers, unheld
from refitd.epoch.lanes import desired_lane
from refitd.epoch.records import PubId, ReportRecord
from refitd.epoch.refits import lag
from refitd.epoch.stage import committed, hopeless, started
from refitd.epoch.suspicion import failures
from refitd.epoch.view import View

ENDED = "every whole replica has ended"
UNHELD = "nobody holds it any more"


def report(view: View, facts: Facts) -> Iterator[Write]:
    """The report of the newest publication, once every whole replica has committed it, failed for good, or is left
    without anybody who holds it."""
    newest = view.newest
    if newest is None or f"{newest.revision}" in view.reports or not (view.open_lanes() or view.replicas()):
        return
    if facts.unheld or not waiting(view, newest):
        record = assess(view, newest, facts.unheld)
        if facts.store_settled or not record.missing:
            yield Write(f"reports/{newest.revision}", encode(record), 0, ENDED)


def waiting(view: View, newest: PubId) -> list[str]:
    """Replicas that may still commit the newest publication: those with an open lane, or all where there is none."""
    lanes = view.open_lanes()
    if not lanes:
        return list(view.replicas())
    return [name for name, lane in lanes.items() if not (committed(view, lane, newest) or hopeless(view, lane))]


def stranded(view: View, newest: PubId, covers: Covers) -> bool:
    """Whether somebody waits for the newest publication, and nobody holds it for any of them.

    A lane in which bytes may move goes on, although some of its sources may have done their part.
    """
    lanes, waits = view.open_lanes(), waiting(view, newest)
    moving = any(started(view, lanes[name], newest) for name in waits if name in lanes)
    return bool(waits) and not moving and all(unheld(view, replica, newest, covers) for replica in waits)


def assess(view: View, publication: PubId, nobody: bool = False, closed: str = ENDED) -> ReportRecord:
    """Who has committed a publication by now, and why the others have not; ``nobody`` holds it any more."""
    done = tuple(name for name, lane in view.open_lanes().items() if committed(view, lane, publication))
    missing = {replica: why_not(view, replica, nobody) for replica in view.replicas() if replica not in done}
    step = view.publication.value.step if view.publication else 0
    return ReportRecord(publication.generation, publication.revision, step, done, missing, closed)


def why_not(view: View, replica: str, nobody: bool = False) -> str:
    """Why a replica has not committed the newest publication, that ``nobody`` may hold any more."""
    stored, refit = view.lanes.get(replica), view.refits.get(replica)
    if stored is None or not stored.value.members:
        wanted = desired_lane(view, replica, lambda _replica, _digests: True)
        return wanted if isinstance(wanted, str) else UNHELD if nobody else "its lane is not made yet"
    failed = failures(view, stored.value)
    if failed:
        return f"{failed[0][0]}: {failed[0][1].reason}"
    if nobody:
        return UNHELD
    waits = refit is not None and refit.value.id != view.newest and committed(view, stored.value, refit.value.id)
    return "it waits for its turn" if waits else "it has not verified every byte yet"


def ready(view: View, replica: str, max_lag: int) -> tuple[bool, str]:
    """Whether a replica serves a publication that is at most ``max_lag`` behind the newest, and why not.

    A replica that joins or lost a rank is not ready before all its present ranks have committed one that is.
    """
    newest, stored, commit = view.newest, view.lanes.get(replica), view.commits.get(replica)
    if newest is None:
        return False, "nothing is published"
    if stored is None or not stored.value.members:
        return False, why_not(view, replica)
    if commit is None or not committed(view, stored.value, commit.value.id):
        return False, f"its present ranks have committed nothing yet: {why_not(view, replica)}"
    behind = lag(view, replica)
    return behind <= max_lag, f"it is {behind} publications behind the newest, at most {max_lag} allowed"
