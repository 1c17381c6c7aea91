"""One run: refit after refit, a fault in the second where one is asked for, and a judgement over all of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import Any

from refitd.demo.faults import STRUCK_REFIT, Fault, Targets, choose
from refitd.demo.ledger import Ledger, Oracle
from refitd.demo.nursery import Nursery
from refitd.demo.parties import Replica, Trainer, until
from refitd.demo.report import Progress, Result
from refitd.demo.scene import JOB, Scene
from refitd.errors import RefitdError

REFIT_SECONDS = 90.0
RECOVERY_SECONDS = 60.0  # what I7 allows
MISSES = 5
RELEASE_SECONDS = 20.0
COMMIT_SECONDS = 10.0
GRACE_SECONDS = 5.0  # after the trainers' last word on a publication, for replicas that are late with it


class Play:
    """Runs once."""

    def __init__(
        self, folder: Path, nursery: Nursery, oracle: Oracle, fault: Fault, refits: int, progress: Progress
    ) -> None:
        self._oracle, self._fault, self._wanted, self._progress = oracle, fault, refits, progress
        self._ledger = Ledger(oracle.digests)
        point = self._point if fault.phase or fault.plant else None
        self._scene = Scene(folder, nursery, self._ledger, point)
        self._step = 0
        self._full = False
        self._recovered_at = 0.0
        self._reported_at = 0.0
        self._asked: list[tuple[Trainer, int]] = []
        self._struck_step = 0
        self._misses = 0
        self._return: asyncio.Task[None] | None = None
        self._differences: list[str] = []
        self._result = Result()

    async def run(self, deadline: float) -> Result:
        """Everything, in at most ``deadline`` seconds plus the time to clean up. SIGTERM ends it in good order."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            async with asyncio.timeout(deadline):
                await self._start()
                await self._refits()
        except asyncio.CancelledError:
            self._fail("interrupted")
        except TimeoutError as error:
            self._fail(str(error) or f"not finished after {deadline:.0f} s")
        except RefitdError as error:
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._judge()
            await self._stop()
        return self._result

    async def _start(self) -> None:
        self._progress.say("starting etcd and the daemons of nodes a, b, c, d")
        await self._scene.start()
        self._progress.say("4 trainers on nodes a, b; engines r0 on node c (in place) and r1 on nodes c, d (shadow)")

    async def _stop(self) -> None:
        if self._return is not None:
            self._return.cancel()
            await asyncio.gather(self._return, return_exceptions=True)
        await self._scene.stop()

    # -- refits

    async def _refits(self) -> None:
        while self._result.refits < self._wanted or self._fault.active or self._fault.pending or not self._full:
            if self._fault.pending and self._result.refits >= STRUCK_REFIT:
                return self._fail(f"nobody reached the phase {self._fault.phase} in refit {STRUCK_REFIT}")
            if self._fault.active and self._step > self._struck_step:
                await until(lambda: not self._fault.active, self._scene.changed, REFIT_SECONDS)
            if not await self._refit(self._step + 1) and not self._may_miss():
                return self._fail(f"step {self._step} was not committed by every live replica: {self._why()}")
        return None

    async def _refit(self, step: int) -> bool:
        """Train, publish and wait; whether every live replica committed. A fault may come to pass meanwhile."""
        await asyncio.to_thread(self._oracle.advance, step)
        self._step = step
        self._asked = [
            (trainer, trainer.lives) for trainer in self._scene.trainers if trainer.ready and not trainer.down
        ]
        for trainer, _life in self._asked:
            trainer.tell(do="step", step=step, release=RELEASE_SECONDS, commit=COMMIT_SECONDS)
        await until(lambda: self._settled(step), self._scene.changed, REFIT_SECONDS)
        committed = self._committed(step)
        self._full = len(committed) == len(self._scene.replicas) and self._all_released(step)
        if self._full and self._fault.returned_at and self._result.caught_up_seconds is None:
            self._result.caught_up_seconds = _since(self._fault.returned_at, time.monotonic())
        if self._live() and len(committed) == len(self._live()):
            await self._accept(step, committed)
            return True
        self._progress.say(f"step {step}: not committed ({self._why()})", "yellow")
        return False

    def _settled(self, step: int) -> bool:
        """Whether nothing more is to be expected of a step."""
        self._watch_recovery(step)
        if self._scene.dead():
            return True
        trainers = self._heard_of()
        if any(step not in trainer.reported for trainer in trainers):
            self._reported_at = time.monotonic()
            return False
        done = bool(self._live()) and len(self._committed(step)) == len(self._live())
        late = bool(self._fault.struck_at) and time.monotonic() > self._reported_at + GRACE_SECONDS
        return done or self._skipped(step) or late

    def _heard_of(self) -> list[Trainer]:
        """The trainers that were told of the present step and will say how it went."""
        return [
            trainer for trainer, life in self._asked if trainer.lives == life and trainer.ready and not trainer.down
        ]

    def _skipped(self, step: int) -> bool:
        return all(trainer.released.get(step) == "SKIPPED" for trainer in self._heard_of())

    def _watch_recovery(self, step: int) -> None:
        done = self._live() and len(self._committed(step)) == len(self._live())
        if self._fault.struck_at and not self._recovered_at and done:
            self._recovered_at = time.monotonic()

    def _live(self) -> list[Replica]:
        return [replica for replica in self._scene.replicas if replica.live]

    def _committed(self, step: int) -> list[Replica]:
        return [replica for replica in self._live() if replica.step == step]

    def _all_released(self, step: int) -> bool:
        return all(trainer.released.get(step) == "RELEASED" for trainer in self._scene.trainers)

    def _may_miss(self) -> bool:
        """Whether a refit may end without a commit: while a victim is away, and 60 s after its return.

        Trainers may skip a few steps on a busy machine even so: they never wait long for a plan.
        """
        if self._scene.dead():
            return False
        back = self._fault.returned_at
        if self._fault.active or (back > 0 and time.monotonic() < back + RECOVERY_SECONDS):
            return True
        self._misses += 1
        return self._skipped(self._step) and self._misses <= MISSES

    def _why(self) -> str:
        parts = [f"{d} ended" for d in self._scene.dead()]
        parts += [f"{r.name} serves step {r.step}" for r in self._live() if r.step != self._step]
        parts += [r.failures[-1] for r in self._scene.replicas if r.failures]
        outcomes = {t.name: t.released.get(self._step, "nothing") for t in self._scene.trainers}
        parts += [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome != "RELEASED"]
        return "; ".join(parts) or "no live replica"

    # -- what was committed

    async def _accept(self, step: int, committed: list[Replica]) -> None:
        self._result.refits += 1
        published = max(t.published[step] for t in self._scene.trainers if step in t.published)
        seconds = max(replica.switched_at for replica in committed) - published
        self._result.refit_seconds.append(round(seconds, 4))
        for replica in committed:
            self._differences += [f"step {step}: {replica.name} {d}" for d in await self._compare(replica)]
        names = " and ".join(replica.name for replica in committed)
        self._progress.say(f"step {step}: {names} committed in {seconds * 1000:.0f} ms", "green")
        await self._count_bytes()

    async def _compare(self, replica: Replica) -> list[str]:
        paths = {engine.rank: self._scene.folder / f"{engine.name}.weights" for engine in replica.engines}
        for engine in replica.engines:
            engine.dumped = ""
            engine.tell(do="dump", path=str(paths[engine.rank]))
        whole = await until(
            lambda: all(e.dumped for e in replica.engines) or not replica.live, self._scene.changed, REFIT_SECONDS
        )
        if not whole or not replica.live:
            return []
        differences = await asyncio.to_thread(self._oracle.compare, paths)
        for path in paths.values():
            path.unlink()
        return differences

    async def _count_bytes(self) -> None:
        """Bytes received over the network since the start, and the least that the refits so far needed."""
        reports = await asyncio.to_thread(self._last_refits)
        lanes = {name: totals for report in reports for name, totals in report["lanes"].items()}
        self._result.network_bytes = sum(int(report["network_bytes"]) for report in reports)
        self._result.network_bytes_min += sum(int(totals["network_bytes_min"]) for totals in lanes.values())

    def _last_refits(self) -> list[dict[str, Any]]:
        found = []
        for daemon in self._scene.cluster.daemons.values():
            with contextlib.suppress(RefitdError):
                if report := daemon.status()["jobs"].get(JOB, {}).get("last_refit"):
                    found.append(report)
        return found

    # -- faults

    def _point(self, fact: dict[str, Any]) -> str:
        """A process reached a failpoint: the answer, after what had to happen there."""
        if self._result.refits != STRUCK_REFIT - 1:
            return "go"
        if fact["name"] == self._fault.plant and not self._fault.planted:
            self._fault.planted += 1
            self._progress.say(f"planted: {self._fault.plant} at {fact}", "yellow")
            return "skip"
        if self._fault.pending and fact["name"] == self._fault.phase:
            targets = choose(self._fault.victim, fact, self._scene.cluster, self._scene.clients)
            self._fault.strike(targets)
            self._struck_step = self._step
            self._progress.say(f"SIG{self._fault.signal} to {targets.name} at {self._fault.phase}", "bold yellow")
            self._return = asyncio.create_task(self._bring_back(targets))
        return "go"

    async def _bring_back(self, targets: Targets) -> None:
        self._scene.new_run(self._step, targets.clients)
        await self._fault.bring_back(targets, self._scene.cluster, self._scene.revive)
        self._progress.say(f"{targets.name} is back", "yellow")
        self._scene.changed.set()

    # -- the end

    def _fail(self, reason: str) -> None:
        self._result.reasons.append(reason)

    def _judge(self) -> None:
        result, fault = self._result, self._fault
        result.torn = len(self._ledger.torn)
        result.bit_exact = result.refits > 0 and not self._differences
        result.replicas_committed = len(self._committed(self._step)) if self._step else 0
        if fault.phase:
            result.victim = fault.target or None
            result.recovered = self._full and fault.returned_at > 0
            result.recover_seconds = _since(fault.struck_at, self._recovered_at)
        result.reasons += [f"torn: {line}" for line in self._ledger.torn[:5]] + self._differences[:5]
        result.reasons += [f"{name} died" for name in self._scene.deaths]
        result.ok = not result.reasons and self._full
        if not result.ok and not fault.plant:
            for name, lines in self._scene.logs().items():
                self._progress.block(name, lines)


def _since(start: float, end: float) -> float | None:
    return round(end - start, 3) if start and end else None
