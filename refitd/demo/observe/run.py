"""The run: a stretch of health, then fault after fault. What Prometheus had to say of it is `verdict`'s."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from refitd.demo.observe.load import Load
from refitd.demo.observe.prometheus import Prometheus
from refitd.demo.observe.rules import SCRAPE_SECONDS
from refitd.demo.observe.snapshot import snapshot
from refitd.demo.observe.stray import NAME, Stray
from refitd.demo.observe.trials import TRIALS, Trial, slow_link

ALERT_SECONDS = 75.0
SETTLE_SECONDS = 40.0
_LOOK_SECONDS = 0.5
OLDER, RIVAL = "a daemon of another version beside them", "two leaders of one job, in two stores"


@dataclass
class Span:
    """A stretch of the run, in seconds since the epoch, the alerts that were meant for it, and when they fired."""

    words: str
    alerts: Collection[str]
    start: float
    end: float = 0.0
    fired: dict[str, float] = field(default_factory=dict)
    trouble: str = ""


class Run:
    """``pictures``: a folder for pictures of the status page, or None."""

    def __init__(self, folder: Path, load: Load, prometheus: Prometheus, pictures: Path | None) -> None:
        self._folder, self._load, self._prometheus, self._pictures = folder, load, prometheus, pictures
        self.healthy = Span("health", (), 0.0)
        self.faulty = Span("faults", (), 0.0)
        self.faults: list[Span] = []
        self.undrawn: list[str] = []

    async def health(self, seconds: float) -> None:
        """The cluster works, and nothing happens."""
        await asyncio.sleep(2 * SCRAPE_SECONDS)  # counters have a past
        _say(f"{seconds:g} s of health")
        self.healthy.start = time.time()
        await asyncio.sleep(seconds)
        self.healthy.end = time.time()
        await self._status_page("healthy")

    async def suffer(self, only: str = "") -> None:
        """Fault after fault, each until its alerts have fired. ``only``: those whose words contain it."""
        self.faulty.start = time.time()
        stray = Stray(self._folder)
        try:
            await asyncio.to_thread(stray.start)
            self._prometheus.scrape_these({**self._load.wires.metrics, NAME: stray.address})
            older = self._begun(OLDER, "RefitdVersionsDiffer")
            for trial in [trial for trial in TRIALS if only in trial.words]:
                await self._trial(trial)
            await self._expect(older)
            await asyncio.to_thread(stray.lead)
            await self._expect(self._begun(RIVAL, "RefitdTwoLeaders"))
        finally:
            self.faulty.end = time.time()
            self._prometheus.scrape_these(self._load.wires.metrics)
            await asyncio.to_thread(stray.stop)

    async def _trial(self, trial: Trial) -> None:
        await self._silent(trial.alerts)
        span = self._begun(trial.words, *trial.alerts)
        try:
            async with trial.begin(self._load):
                await self._expect(span)
                if trial.begin is slow_link:
                    await self._status_page("faulty")
            await self._load.calm()
        except TimeoutError as error:
            span.trouble = str(error) or "too slow"

    def _begun(self, words: str, *alerts: str) -> Span:
        now = time.time()
        self.faults.append(Span(words, alerts, now, now))
        return self.faults[-1]

    async def _expect(self, span: Span) -> None:
        """Return when the alerts of the span have fired, or `ALERT_SECONDS` later."""
        deadline = time.monotonic() + ALERT_SECONDS
        while time.monotonic() < deadline and not set(span.alerts) <= set(span.fired):
            await asyncio.sleep(_LOOK_SECONDS)
            span.end = time.time()
            found = await asyncio.to_thread(self._prometheus.firing, span.start, span.end)
            span.fired |= {name: at - span.start for name, at in found.items() if name not in span.fired}
        missing = sorted(set(span.alerts) - set(span.fired))
        _say(f"{span.words}: {span.end - span.start:.0f} s" + f", without {', '.join(missing)}" * bool(missing))

    async def _silent(self, alerts: Collection[str]) -> None:
        """Return when none of them fires, or some time later."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            now = time.time()
            if not set(alerts) & set(await asyncio.to_thread(self._prometheus.firing, now, now)):
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _status_page(self, name: str) -> None:
        if self._pictures:
            for scheme in ("light", "dark"):
                url, file = (
                    f"http://{self._load.wires.metrics['node-d']}/",
                    self._pictures / f"status-{name}-{scheme}.png",
                )
                try:
                    await asyncio.to_thread(snapshot, url, file, scheme)
                except subprocess.SubprocessError as error:
                    self.undrawn.append(f"{file.name}: {type(error).__name__}")


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
