"""What this daemon tells of itself: facts for metrics, readiness, and the status page.

HTTP is served in threads; everything that the daemon owns is read in its loop, through a `Crossing`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from refitd.daemon.slow import links
from refitd.daemon.status import status
from refitd.epoch.refits import lag
from refitd.epoch.reports import ready
from refitd.epoch.stage import committed
from refitd.telemetry.crossing import Crossing
from refitd.telemetry.facts import JobFacts, NodeFacts, ReplicaFacts, Verdict
from refitd.telemetry.history import RefitRecord
from refitd.telemetry.http import MetricsServer
from refitd.telemetry.metrics import version

if TYPE_CHECKING:
    from refitd.daemon.app import Daemon
    from refitd.daemon.job import Job

UNHEALTHY_SECONDS = 10.0  # without a pass of one of the loops


class Observer:
    """One daemon, observed. All methods but `serve` and `health` belong to the event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def serve(self, host: str, port: int) -> MetricsServer:
        """Serve metrics and pages on ``host:port``. Raises ConfigError naming metrics.listen."""
        crossing = Crossing(asyncio.get_running_loop())
        self._daemon.metrics.watch(lambda: crossing.ask(self.facts))
        return MetricsServer(
            host, port, self._daemon.metrics.registry, self.health,
            lambda job, replica, max_lag: crossing.ask(lambda: self.ready(job, replica, max_lag)),
            lambda: crossing.ask(self.picture),
        )  # fmt: skip

    def health(self) -> str:
        """What stands still; empty where everything turns. From any thread."""
        return self._daemon.metrics.pulse.stuck(UNHEALTHY_SECONDS)

    def line(self) -> str:
        """The daemon in one line, for the service manager."""
        jobs = self._daemon.jobs
        lost = [name for name, job in sorted(jobs.items()) if not job.agreement.alive]
        ranks = sum(len(job.ranks) for job in jobs.values())
        lease = f"no lease for {', '.join(lost)}" if lost else "leases held" if jobs else "no lease needed yet"
        return f"serving {self._daemon.config.hook.socket}: {len(jobs)} jobs, {ranks} ranks, {lease}"

    def facts(self) -> NodeFacts:
        """What metrics show of it."""
        jobs = list(self._daemon.jobs.values())
        limits = [control.value.limit for job in jobs if (control := job.agreement.view.control)]
        caps = [float(limit) for limit in limits if limit is not None]
        return NodeFacts(
            jobs=tuple(_job_facts(job) for job in jobs),
            replicas=tuple(_replica_facts(job, replica) for job in jobs for replica in _led_here(job)),
            connections=Counter(session.side for session in self._daemon.hook.sessions),
            store_requests=self._daemon.store_requests(),
            planned_bandwidth={"network": min(caps)} if caps else {},
        )

    def ready(self, job: str, replica: str, max_lag: int | None) -> Verdict:
        """Whether a replica, all of a job's with ranks here (``""``), or all of this node's (job ``""``) may serve."""
        jobs = self._daemon.jobs
        if job and job not in jobs:
            return Verdict(False, f"this node has no job {job}")
        chosen = [jobs[job]] if job else list(jobs.values())
        names = [(one, name) for one in chosen for name in ([replica] if replica else _here(one))]
        verdicts = [(f"{one.job}/{name}", _judge(one, name, max_lag)) for one, name in names]
        bad = [f"{name}: {verdict.reason}" for name, verdict in verdicts if not verdict.ready]
        if bad or not verdicts:
            return Verdict(False, "; ".join(bad) or "no replica has a rank here")
        return Verdict(True, f"{', '.join(name for name, _verdict in verdicts)}: new enough")

    def picture(self) -> dict[str, Any]:
        """What the status page shows."""
        daemon = self._daemon
        seen = status(daemon)
        more = {name: {"links": links(job), "max_lag": job.config.job.max_lag} for name, job in daemon.jobs.items()}
        return {
            **seen, "jobs": {name: {**seen["jobs"][name], **extra} for name, extra in more.items()},
            "now": time.time(), "version": version(), "problem": self.health(),
            "faults": [fault._asdict() for fault in daemon.metrics.history.faults()],
            "refits": [_shown(record) for record in daemon.metrics.history.last()],
        }  # fmt: skip


def _shown(record: RefitRecord) -> dict[str, Any]:
    job, replica, *publication = record.refit
    return {**dataclasses.asdict(record), "job": job, "replica": replica, "publication": publication}


def _here(job: Job) -> list[str]:
    """Replicas with ranks on this node."""
    return sorted({rank.session.group for rank in job.ranks.values() if not rank.trains})


def _led_here(job: Job) -> list[str]:
    """Replicas whose first rank is on this node: one node speaks for each."""
    return [name for name in _here(job) if f"engine/{name}/0" in job.ranks]


def _current(job: Job, replica: str, max_lag: int) -> bool:
    """The same as `ready`, without looking for a reason: for all replicas of a job at each scrape."""
    view = job.agreement.view
    stored, commit = view.lanes.get(replica), view.commits.get(replica)
    if stored is None or commit is None or not committed(view, stored.value, commit.value.id):
        return False
    return lag(view, replica) <= max_lag


def _dirty(job: Job, replica: str) -> str:
    """A rank here that is being written, and must not serve."""
    ranks = sorted(key for key, rank in job.ranks.items() if not rank.trains and rank.session.group == replica)
    return next((key for key in ranks if job.ranks[key].page.dirty), "")


def _judge(job: Job, replica: str, max_lag: int | None) -> Verdict:
    view = job.agreement.view
    if replica not in view.replicas():
        return Verdict(False, "no rank of it is registered in the job")
    good, reason = ready(view, replica, job.config.job.max_lag if max_lag is None else max_lag)
    dirty = _dirty(job, replica)
    return Verdict(False, f"{dirty} is being written") if good and dirty else Verdict(good, reason)


def _replica_facts(job: Job, replica: str) -> ReplicaFacts:
    view = job.agreement.view
    commit, newest = view.commits.get(replica), view.newest
    behind = lag(view, replica) if commit and newest and commit.value.generation == newest.generation else None
    good = _current(job, replica, job.config.job.max_lag) and not _dirty(job, replica)
    step, revision = (commit.value.step, commit.value.revision) if commit else (0, 0)
    return ReplicaFacts(job.job, replica, step, revision, behind, good)


def _job_facts(job: Job) -> JobFacts:
    view, agreement = job.agreement.view, job.agreement
    newest, publication, control = view.newest, view.publication, view.control
    renewed = agreement.renewed
    loans = {
        "trainer": sum(rank.offer is not None for rank in job.ranks.values()),
        "engine": sum(rank.receiving is not None for rank in job.ranks.values()),
    }
    running = sum(rank.mover is not None for rank in job.ranks.values())
    return JobFacts(
        job.job,
        leads=job.leading.ours,
        joined=job.membership.joined,
        paused=bool(control and control.value.paused),
        generation=view.generation.value.number if view.generation else 0,
        revision=newest.revision if newest else 0,
        step=publication.value.step if publication else 0,
        lease_held=agreement.alive,
        contact_at=time.time() - (time.monotonic() - renewed) if renewed else 0.0,
        members=_members(job) if job.leading.ours else {},
        replicas=_replicas(job, view.replicas()) if job.leading.ours else {},
        loans=loans,
        movers={"running": running, "starting": len(job.ranks) - running},
    )


def _members(job: Job) -> dict[str, int]:
    view = job.agreement.view
    parked, draining = set(view.parked), set(view.drains) - set(view.parked)
    active = set(view.members) - parked - draining
    return {"active": len(active), "draining": len(draining), "parked": len(parked)}


def _replicas(job: Job, names: Iterable[str]) -> dict[str, int]:
    good = [_current(job, name, job.config.job.max_lag) for name in names]
    return {"ready": sum(good), "behind": len(good) - sum(good)}
