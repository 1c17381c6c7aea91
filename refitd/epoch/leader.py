"""What the leader writes next. Pure: records and facts in, guarded writes with reasons out.

Each write names the revision that the record must still have (0: absent). Running `decide` again on the same records
gives the same writes; a successor that has only the records goes on where the last leader stopped.
"""

from __future__ import annotations

import itertools

from refitd.epoch.cleanup import cleanup, end
from refitd.epoch.facts import Facts, Write
from refitd.epoch.holders import Covers
from refitd.epoch.parking import parking, planner
from refitd.epoch.publish import generation, paused, publication
from refitd.epoch.refits import refits
from refitd.epoch.reports import report
from refitd.epoch.turns import lanes
from refitd.epoch.view import View

AT_ONCE = 32  # old records removed by one decision: what is urgent must not wait for the acks of a thousand nodes


def decide(view: View, facts: Facts, covers: Covers) -> list[Write]:
    """All writes that the records call for now."""
    if facts.ended:
        return list(end(view))
    runs = not paused(view)
    return [
        *generation(view),
        *planner(view),
        *parking(view, facts),
        *(publication(view, facts, covers) if runs else ()),
        *lanes(view, facts, covers),
        *(refits(view, facts, covers) if runs else ()),
        *report(view, facts),
        *itertools.islice(cleanup(view, facts), AT_ONCE),
    ]
