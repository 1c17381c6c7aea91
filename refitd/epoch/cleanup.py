"""What is removed from the records, so that they do not grow."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from refitd.epoch.facts import Facts, Write
from refitd.epoch.view import View

KEEP_REPORTS = 8
LEASED = ("leader", "members/", "offers/", "acks/", "devices/", "drains/")  # these go with their daemons


def cleanup(view: View, facts: Facts) -> Iterator[Write]:
    """Old reports, acks of nodes that left a lane, replicas that will not come back, drains of daemons that ended."""
    old = sorted(view.reports, key=int)[:-KEEP_REPORTS]
    yield from (_delete(view, f"reports/{name}", "an old report") for name in old)
    for replica in view.acked():
        compute = functools.partial(_old_acks, view, replica)
        yield from view.memo(("old_acks", replica), (f"acks/{replica}", f"lanes/{replica}"), compute)
    for replica in sorted(facts.gone):
        for key in (f"lanes/{replica}", f"refits/{replica}", f"commits/{replica}"):
            if view.revision_of(key):
                yield _delete(view, key, "no rank of the replica has been here for long")
    for node, stored in view.drains.items():
        member = view.members.get(node)
        if member and member.value.incarnation != stored.value.incarnation:
            yield _delete(view, f"drains/{node}", "the daemon that drained has ended")


def _old_acks(view: View, replica: str) -> list[Write]:
    lane = view.lanes.get(replica)
    gone = sorted(view.ackers(replica).difference(lane.value.nodes if lane else ()))
    return [_delete(view, f"acks/{replica}/{node}", "the node is not in the lane any more") for node in gone]


def end(view: View) -> Iterator[Write]:
    """All records of a job that has ended; those under leases go with the daemons."""
    yield from (_delete(view, key, "the job has ended") for key in durable(view))


def durable(view: View) -> list[str]:
    """Keys of the records that no lease ends."""
    keys = view.keys()
    return sorted(key for key in keys if not key.startswith(LEASED))


def _delete(view: View, key: str, reason: str) -> Write:
    return Write(key, None, view.revision_of(key), reason)
