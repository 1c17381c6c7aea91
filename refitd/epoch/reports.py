"""How publications end, and which replicas are ready to serve."""

from __future__ import annotations

from collections.abc import Iterator

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.lanes import desired_lane
from refitd.epoch.records import PubId, ReportRecord
from refitd.epoch.refits import lag
from refitd.epoch.stage import committed, hopeless
from refitd.epoch.suspicion import failures
from refitd.epoch.view import View

ENDED = "every whole replica has ended"
UNHELD = "nobody holds it any more"


def report(view: View, facts: Facts) -> Iterator[Write]:
    """The report of the newest publication, once every whole replica has committed it, failed for good or is left
    without a holder of it."""
    newest = view.newest
    if newest is None or f"{newest.revision}" in view.reports:
        return
    lanes = view.open_lanes()
    under_way = {name for name, lane in lanes.items() if not committed(view, lane, newest) and not hopeless(view, lane)}
    waiting = under_way if lanes else set(view.replicas())  # without any lane, all may still get one
    if not (lanes or waiting) or not waiting <= facts.unheld:
        return
    record = assess(view, newest, unheld=facts.unheld)
    if facts.store_settled or not record.missing:
        yield Write(f"reports/{newest.revision}", encode(record), 0, ENDED)


def assess(view: View, publication: PubId, closed: str = ENDED, unheld: frozenset[str] = frozenset()) -> ReportRecord:
    """Who has committed a publication by now, and why the others have not."""
    done = tuple(name for name, lane in view.open_lanes().items() if committed(view, lane, publication))
    missing = {replica: why_not(view, replica, replica in unheld) for replica in view.replicas() if replica not in done}
    step = view.publication.value.step if view.publication else 0
    return ReportRecord(publication.generation, publication.revision, step, done, missing, closed)


def why_not(view: View, replica: str, unheld: bool = False) -> str:
    """Why a replica has not committed the newest publication, which nobody holds any more where ``unheld``."""
    stored, refit = view.lanes.get(replica), view.refits.get(replica)
    if stored is None or not stored.value.members:
        wanted = desired_lane(view, replica, lambda _replica, _digests: True)
        return wanted if isinstance(wanted, str) else UNHELD if unheld else "its lane is not made yet"
    failed = failures(view, stored.value)
    if failed:
        return f"{failed[0][0]}: {failed[0][1].reason}"
    if unheld:
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
