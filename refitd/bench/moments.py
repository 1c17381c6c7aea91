"""A refit step by step, from the stamps of all processes that had a part in it: where its time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from refitd.stamps import Stamp


class Step(NamedTuple):
    """Ends with the ``first`` or last stamp ``name`` of whoever's key begins with ``who``, after the step before."""

    label: str
    name: str
    who: str = ""
    first: bool = False


# In the order in which they must come on one node: each waits for the one before.
STEPS = (
    Step("hook_publish_begun", "publish", "trainer"),
    Step("hook_publish_synced", "publish.synced", "trainer"),
    Step("hook_publish_sent", "publish.sent", "trainer"),
    Step("daemon_heard_offers", "daemon.offer", "trainer"),
    Step("daemon_wrote_offers", "written.offers", first=True),
    Step("leader_published", "written.publication", first=True),
    Step("leader_decided", "written.refits", first=True),
    Step("daemon_told_ticket", "told.receive", "engine", first=True),
    Step("hook_heard_ticket", "ticket.heard", "engine", first=True),
    Step("hook_receive_begun", "receive", "engine"),
    Step("hook_receive_synced", "receive.synced", "engine"),
    Step("hook_receive_sent", "receive.sent", "engine"),
    Step("daemon_heard_loans", "lent", "engine"),
    Step("daemon_prepared", "prepared"),
    Step("daemon_acked_prepared", "written.acks", first=True),
    Step("daemon_sent_first_run", "run.sent", "engine", first=True),
    Step("mover_heard_first_run", "run.heard", "engine", first=True),
    Step("mover_opened_first", "opened", "engine", first=True),
    Step("daemon_sent_last_run", "run.sent", "engine"),
    Step("mover_heard_last_run", "run.heard", "engine"),
    Step("mover_opened_last", "opened", "engine"),
    Step("mover_offered_first", "nccl.offered", first=True),
    Step("mover_began_first", "nccl.begun", "engine", first=True),
    Step("mover_landed_last", "nccl.landed", "engine"),
    Step("mover_woke_worker", "pull", "engine"),
    Step("mover_read_words", "launch", "engine"),
    Step("mover_launched", "launched", "engine"),
    Step("mover_summed", "summed", "engine"),
    Step("mover_counted", "counted", "engine"),
    Step("mover_woke_reporter", "done.told", "engine"),
    Step("daemon_heard_done", "heard.done", "engine"),
    Step("daemon_verified", "verified"),
    Step("daemon_acked_verified", "written.acks", first=True),
    Step("daemon_told_commit", "told.commit", "engine", first=True),
    Step("hook_heard_commit", "commit.heard", "engine", first=True),
    Step("hook_took_commit", "receive.ended", "engine", first=True),
    Step("daemon_committed", "written.commits", first=True),
    Step("daemon_told_others", "told.commit", "engine"),
    Step("hook_heard_others", "commit.heard", "engine"),
    Step("hook_ended", "receive.ended", "engine"),
)  # fmt: skip


def steps(span: tuple[float, float], found: Sequence[Stamp]) -> tuple[float, ...]:
    """Seconds of each of `STEPS` of one refit, which began and ended as ``span`` says; ``found``: its stamps by time.

    A step that has no stamp, as those of kernels have none where something else moves the bytes, takes no time.
    """
    at, took = span[0], []
    for step in STEPS:
        times = [
            one.at for one in found if one.name == step.name and one.key.startswith(step.who) and one.at <= span[1]
        ]
        if step.first and step.name.startswith("written"):
            times = [time for time in times if time >= at]
        reached = (times[0] if step.first else times[-1]) if times else at
        took.append(max(reached - at, 0.0))
        at = max(reached, at)
    return tuple(took)


def wire(found: Sequence[Stamp]) -> Mapping[str, list[float]]:
    """Of each rank and moment of NCCL's steps, ms since the first mover's start; ``found``: of one refit, by time."""
    began = next((one.at for one in found if one.name == "opened"), 0.0)
    seen: dict[str, list[float]] = {}
    for one in found:
        if one.name.startswith("nccl.") or one.name == "counted":
            seen.setdefault(f"{one.key} {one.name}", []).append(round((one.at - began) * 1e3, 3))
    return seen
