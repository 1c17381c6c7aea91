"""What a person or a script sees of this daemon (`refitd status`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from refitd.daemon.slow import busiest, lately, recent, slow
from refitd.daemon.turn import UNWIRED
from refitd.daemon.wiring import versions_of
from refitd.epoch.records import Control
from refitd.epoch.reports import ready
from refitd.epoch.stage import Stage, stage
from refitd.epoch.view import View
from refitd.errors import StoreError

if TYPE_CHECKING:
    from refitd.daemon.app import Daemon
    from refitd.daemon.job import Job


ELSEWHERE = "elsewhere"  # the stage of a lane whose acks are told to others


async def whole_status(daemon: Daemon) -> dict[str, Any]:
    """`status` with everything that the store has; without, where it does not answer, what this daemon follows."""
    views = {}
    for name, job in list(daemon.jobs.items()):
        with contextlib.suppress(StoreError):
            views[name] = await job.agreement.following.picture()
    return status(daemon, views)


def status(daemon: Daemon, views: Mapping[str, View] = MappingProxyType({})) -> dict[str, Any]:
    """The answer to ``status``: the node, its store, and each job's members, lanes and replicas.

    ``views``: whole pictures of jobs, where there are any. This daemon's own lacks the acks of lanes that it is not in.
    """
    jobs = {name: _job(job, views.get(name)) for name, job in sorted(daemon.jobs.items())}
    nothing: dict[str, Any] = {"members": [], "lanes": [], "replicas": [], "last_refit": {}}
    first = next(iter(jobs.values()), nothing)
    return {
        "node": daemon.config.node.name,
        "store": _store(daemon),
        "drain": {"wanted": daemon.orders.draining, **daemon.orders.progress()},
        **first,
        "jobs": jobs,
    }


def _store(daemon: Daemon) -> dict[str, Any]:
    """``answers``: whether our leases in it stand; None where no job has needed it yet."""
    url, leases = daemon.config.store.url, [job.agreement.alive for job in daemon.jobs.values()]
    return {"url": url, "local": url.startswith("memory:"), "answers": all(leases) if leases else None}


def _job(job: Job, whole: View | None) -> dict[str, Any]:
    view = whole or job.agreement.view
    control = view.control.value if view.control else Control()
    return {
        "leader": view.leader.value.node if view.leader else None,
        "joined": job.membership.joined,
        "generation": view.generation.value.number if view.generation else 0,
        "publication": list(view.newest) if view.newest else None,
        "paused": control.paused,
        "paused_reason": control.reason,
        "limit": control.limit,
        "draining": [{"node": node, "reason": view.drains[node].value.reason} for node in sorted(view.drains)],
        "parked": [{"node": node, "reason": view.parked[node].value.reason} for node in sorted(view.parked)],
        "members": [_member(view, node) for node in sorted(view.members)],
        "lanes": [_lane(job, whole, name) for name in sorted(view.lanes)],
        "replicas": [_replica(view, replica, job.config.job.max_lag) for replica in sorted(view.replicas())],
        "ranks": [_rank(job, key) for key in sorted(job.ranks)],
        "last_refit": _last_refit(job),
        "slow": list(slow(job)),
        "faults": lately(job),
        "refits": recent(job),
        "links": busiest(job),
    }


def _member(view: View, node: str) -> dict[str, Any]:
    member = view.members[node].value
    ranks = [{"key": info.key, "mode": info.mode, "mover": info.mover} for info in member.ranks]
    shown = {"node": node, "address": member.address, "domain": member.domain, "ranks": ranks}
    return {**shown, "versions": versions_of(member), "transport": member.transport}


def _stage(job: Job, whole: View | None, replica: str) -> Stage:
    now = stage(whole or job.agreement.view, replica)
    if whole or now.name in ("gone", "committed") or job.agreement.following.follows(replica):
        return now
    return Stage(ELSEWHERE, now.publication, "its nodes and the leader know more")


def _lane(job: Job, whole: View | None, replica: str) -> dict[str, Any]:
    stored = (whole or job.agreement.view).lanes[replica]
    now = _stage(job, whole, replica)
    local = job.lanes.get(replica)
    wired = local.built.wiring if local and local.built else UNWIRED
    return {
        "replica": replica,
        "token": stored.revision,
        "stage": now.name,
        "seconds": job.lanes[replica].stage_seconds if replica in job.lanes else None,
        "why": now.reason,
        "turned": stored.value.reason,
        "transport": wired.transport,
        "transport_why": wired.reason,
        "members": [slot.key for slot in stored.value.members],
        "sources": [slot.key for slot in stored.value.sources],
        "neighbours": [slot.key for slot in stored.value.neighbours],
        "excluded": [{"rank": e.slot.key, "reason": e.reason} for e in stored.value.excluded],
    }


def _replica(view: View, replica: str, max_lag: int) -> dict[str, Any]:
    commit, modes = view.commits.get(replica), {info.mode for info in view.replicas()[replica].values()}
    serves, why = ready(view, replica, max_lag)
    return {
        "name": replica,
        "publication": list(commit.value.id) if commit else None,
        "step": commit.value.step if commit else None,
        "lag": _lag(view, replica),
        "ready": serves,
        "why": "" if serves else why,
        "mode": ", ".join(sorted(modes)),
    }


def _lag(view: View, replica: str) -> int | None:
    """Publications that the replica's last commit is behind the newest; None where one of them is missing."""
    commit, newest = view.commits.get(replica), view.newest
    if commit is None or newest is None or view.publication is None or commit.value.generation != newest.generation:
        return None
    return view.publication.value.number - commit.value.number


def _rank(job: Job, key: str) -> dict[str, Any]:
    rank = job.ranks[key]
    return {
        "key": key,
        "pid": rank.session.pid,
        "mover": rank.mover.pid if rank.mover else None,
        "life": rank.life,
        "path": rank.path.path,
        "path_why": rank.path.reason,
        "offer_age": time.monotonic() - rank.offer.since if rank.offer else None,
        "served": list(rank.served),
        "receiving": rank.receiving is not None,
        "lends": rank.memory is not None,
    }


def _last_refit(job: Job) -> dict[str, Any]:
    """Bytes of the latest attempts of the lanes in which this node takes part, and its own bytes since the start."""
    plans = {name: lane.built.plan for name, lane in job.lanes.items() if lane.built}
    lanes = {name: plan.totals for name, plan in sorted(plans.items())}
    return {
        "network_bytes": job.network_bytes,
        "network_bytes_min": sum(totals["network_bytes_min"] for totals in lanes.values()),
        "lanes": lanes,
    }
