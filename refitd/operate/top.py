"""``refitd top``: a daemon's status again and again, a screen at a time on a terminal, plain blocks anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from refitd.errors import DaemonUnavailable
from refitd.failpoints import PHASES
from refitd.operate.rate import format_rate
from refitd.operate.text import Facts, Table, aligned, headline, job_line, job_tables, rich_table, troubles
from refitd.telemetry.page import size

Ask = Callable[[], Facts]
Rates = Mapping[tuple[str, str, str], float]
_REFIT = ("REFIT", "PUBLICATION", "PHASE", "SECONDS", "MOVED", "END")
_LINK = ("FROM", "TO", "LINK", "MOVED", "PLANNED", "RATE", "")


def watch(ask: Ask, stream: TextIO, interval: float) -> int:
    """Show what ``ask`` answers every ``interval`` seconds until interrupted; once where that is 0."""
    if not interval:
        stream.write(plain(ask(), {}) + "\n")
        return 0
    try:
        if stream.isatty():
            _live(ask, stream, interval)
        else:
            _lines(ask, stream, interval)
    except KeyboardInterrupt:
        return 0
    return 0


def _lines(ask: Ask, stream: TextIO, interval: float) -> None:
    for answer, rates in _looks(ask, interval):
        stream.write(f"-- {time.strftime('%H:%M:%S')}\n{plain(answer, rates)}\n\n")
        stream.flush()


def _live(ask: Ask, stream: TextIO, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for answer, rates in _looks(ask, interval):
            live.update(screen(answer, rates), refresh=True)


def _looks(ask: Ask, interval: float) -> Iterator[tuple[Facts, Rates]]:
    """Each answer, with the rate of every link since the one before; a daemon that went away is waited for."""
    before, began = ask(), time.monotonic()
    yield before, {}
    while True:
        time.sleep(interval)
        try:
            answer, now = ask(), time.monotonic()
        except DaemonUnavailable as error:
            yield {**before, "away": str(error)}, {}
            continue
        yield answer, link_rates(before, answer, now - began)
        before, began = answer, now


def link_rates(before: Facts, after: Facts, seconds: float) -> Rates:
    """Bytes a second of each link, (src, dst, link), between two answers; a link that began anew counts from zero."""
    if not before or seconds <= 0:
        return {}
    earlier = _moved(before)
    grown = {key: (nbytes, nbytes - earlier.get(key, 0)) for key, nbytes in _moved(after).items()}
    return {key: (more if more >= 0 else nbytes) / seconds for key, (nbytes, more) in grown.items()}


def _moved(answer: Facts) -> dict[tuple[str, str, str], int]:
    jobs = answer.get("jobs", {}).values()
    return {(row["src"], row["dst"], row["link"]): row["moved"] for job in jobs for row in job.get("links", ())}


def plain(answer: Facts, rates: Rates) -> str:
    """The whole view as aligned text."""
    blocks = [_title(answer)]
    for name, job in answer["jobs"].items():
        blocks.append("\n".join([job_line(name, job), *troubles(job)]))
        blocks += ["\n".join(aligned(table)) for table in tables(job, rates)]
    return "\n\n".join(blocks)


def _title(answer: Facts) -> str:
    away = f"{answer['away']}; what follows is old\n" if "away" in answer else ""
    return away + headline(answer)


def screen(answer: Facts, rates: Rates) -> Any:
    """The same for rich, with colour."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(_title(answer), style="bold red" if "away" in answer else "bold")]
    for name, job in answer["jobs"].items():
        parts += [Text(f"\n{job_line(name, job)}", style="bold")]
        parts += [Text(sentence, style="red") for sentence in troubles(job)]
        parts += [rich_table(table) for table in tables(job, rates)]
    return Group(*parts)


def tables(job: Facts, rates: Rates) -> Iterator[Table]:
    """Running and last refits, links that are under way, then what `status` has."""
    running = [_running(job, lane) for lane in job["lanes"] if lane["stage"] in PHASES]
    past = [_ended(refit) for refit in job.get("refits", ()) if refit["outcome"]]
    links = [_link(row, rates) for row in job.get("links", ())]
    found = [Table("refits", _REFIT, running + past), Table("links", _LINK, links)]
    yield from (table for table in found if table.rows)
    yield from job_tables(job)


def _running(job: Facts, lane: Facts) -> list[str]:
    """The newest refit of the lane's replica, as far as this node has a part in it."""
    mine = [r for r in job.get("refits", ()) if r["replica"] == lane["replica"] and not r["outcome"]]
    newest = "/".join(map(str, mine[0]["publication"])) if mine else "-"
    seconds = "-" if lane.get("seconds") is None else f"{lane['seconds']:.1f}"
    return [lane["replica"], newest, lane["stage"], seconds, "", lane["why"]]


def _ended(refit: Facts) -> list[str]:
    longest = f"longest: {max(refit['phases'], key=refit['phases'].__getitem__, default='-')}"
    failures = f", {refit['failures']} failed before" if refit["failures"] else ""
    moved = ", ".join(f"{size(nbytes)} {link}" for link, nbytes in sorted(refit["moved"].items()))
    end = f"{refit['outcome']}{failures}{': ' if refit['why'] else ''}{refit['why']}"
    seconds = f"{sum(refit['phases'].values()):.3f}"
    return [refit["replica"], "/".join(map(str, refit["publication"])), longest, seconds, moved or "-", end]


def _link(row: Facts, rates: Rates) -> list[str]:
    rate = rates.get((row["src"], row["dst"], row["link"]))
    shown = format_rate(int(rate)) if rate else "-"
    return [
        row["src"], row["dst"], row["link"], size(row["moved"]), size(row["planned"]), shown,
        "late" if row["late"] else "",
    ]  # fmt: skip
