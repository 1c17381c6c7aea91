"""The status page: a daemon's picture as one HTML document, with nothing to load and nothing to run.

A picture is what ``refitd status --json`` says, with ``now``, ``version``, ``problem``, ``faults`` and ``refits``,
and in each job ``max_lag``, ``slow`` (sentences) and ``links``: rows of ``src, dst, link, planned, moved, late``, in
bytes of the attempt that runs or ran last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from refitd.failpoints import PHASES
from refitd.telemetry.heat import heat_map
from refitd.telemetry.style import STYLE

Facts = Mapping[str, Any]
REFRESH_SECONDS = 5
ROWS = 200
_NUMBER, _PROSE = ' class="n"', ' class="t"'
_STATES = {"ok": "good", "failed": "bad", "skipped": "warn", "superseded": "warn", "": "warn"}


def render(picture: Facts) -> str:
    """The whole document. Every text from outside is escaped."""
    node = escape(str(picture.get("node", "")))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}"><meta name="viewport" content="width=device-width">'
        f"<title>refitd: {node}</title><style>{STYLE}</style></head><body>"
        f"{_header(picture)}{_faults(picture)}{_refits(picture)}{_past(picture)}"
        f"{''.join(_job(name, job) for name, job in picture.get('jobs', {}).items())}</body></html>\n"
    )


def faults(picture: Facts) -> Iterator[str]:
    """What is not as it should be, one sentence each, with names and reasons."""
    if problem := picture.get("problem"):
        yield problem
    if picture.get("store", {}).get("answers") is False:
        yield "the store does not answer: transfers under way finish, and nothing new is decided"
    for name, job in picture.get("jobs", {}).items():
        yield from (f"{name}: {sentence}" for sentence in _job_faults(job))
    yield from (f"{refit['job']}: {failing(refit)}" for refit in picture.get("refits", ()) if goes_on_failed(refit))


def _job_faults(job: Facts) -> Iterator[str]:
    if job["leader"] is None:
        yield "nobody leads"
    if job["paused"]:
        yield f"paused by an operator: {job['paused_reason'] or 'no reason given'}"
    yield from job.get("slow", ())
    for replica in job["replicas"]:
        if job["publication"] and (replica["lag"] is None or replica["lag"] > job["max_lag"]):
            why = replica["why"] or "no reason known"
            yield f"replica {replica['name']} serves nothing that is new enough: {why}"
    for lane in job["lanes"]:
        for entry in lane["excluded"]:
            yield f"lane {lane['replica']} does without {entry['rank']}: {entry['reason']}"
        if lane["stage"] in ("failed", "gone"):
            yield f"lane {lane['replica']} is {lane['stage']}: {lane['why']}"
    for state in ("parked", "draining"):
        for entry in job[state]:
            yield f"node {entry['node']} is {state}: {entry['reason'] or 'no reason given'}"
    for rank in job["ranks"]:
        if rank["mover"] is None:
            yield f"{rank['key']} has no mover; one is being started"


def _header(picture: Facts) -> str:
    store = picture.get("store", {})
    contact = {None: "not asked yet", True: "answers", False: "does not answer"}[store.get("answers")]
    local = ", this node only" if store.get("local") else ""
    drain = picture.get("drain", {})
    parts = [
        f"store {store.get('url', '')} ({contact}{local})",
        f"version {picture.get('version', 'unknown')}",
        f"{'drained' if drain.get('drained') else 'draining'}: {drain.get('reason')}" if drain.get("wanted") else "",
        f"as of {_clock(picture.get('now', 0.0))} UTC, anew every {REFRESH_SECONDS} s",
    ]
    words = "".join(f"<span>{escape(part)}</span>" for part in parts if part)
    return f"<header><h1>refitd on {escape(str(picture.get('node', '')))}</h1>{words}</header>"


def _faults(picture: Facts) -> str:
    found = list(dict.fromkeys(faults(picture)))
    if not found:
        return '<section class="well" id="faults"><span class="good">Nothing is wrong.</span></section>'
    more = f"<li>and {len(found) - ROWS} more</li>" if len(found) > ROWS else ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in found[:ROWS])
    return f'<section class="faults" id="faults"><h3>What is wrong, and why</h3><ul>{items}{more}</ul></section>'


def _refits(picture: Facts) -> str:
    records: Sequence[Facts] = picture.get("refits", ())
    if not records:
        return '<section id="refits"><h3>Last refits</h3><p>None yet in which this node took part.</p></section>'
    longest = max(sum(record["phases"].values()) for record in records)
    rows = [_refit(record, longest) for record in records]
    names = ("Began", "Replica", "Publication", "Phases", "Seconds", "Brought in", "End", "Why")
    key = "".join(f'<span><i class="{phase}"></i>{phase}</span>' for phase in PHASES)
    return (
        f'<section id="refits"><h3>Last refits in which this node took part</h3>{table(names, rows)}'
        f'<div class="key">{key}</div></section>'
    )


def _refit(record: Facts, longest: float) -> list[str]:
    phases: Mapping[str, float] = record["phases"]
    bar = "".join(
        f'<i class="{phase}" style="width:{100 * seconds / longest:.2f}%" title="{phase} {seconds:.3f} s"></i>'
        for phase, seconds in phases.items()
        if longest > 0
    )
    outcome = record["outcome"]
    ending = outcome or "goes on"
    failures = f", {record['failures']} failed before" if record["failures"] else ""
    moved = ", ".join(f"{size(nbytes)} {link}" for link, nbytes in sorted(record["moved"].items()))
    name, newest = f"{record['job']}/{record['replica']}", publication(record["publication"])
    return [
        _clock(record["began_at"]), text(name), text(newest), f'<div class="bar">{bar}</div>',
        number(f"{sum(phases.values()):.3f}"), number(moved or "-"),
        f'<span class="{_STATES.get(outcome, "bad")}">{escape(ending + failures)}</span>', prose(record["why"]),
    ]  # fmt: skip


def _past(picture: Facts) -> str:
    rows = [[_clock(fault["at"]), text(fault["job"]), prose(fault["what"])] for fault in picture.get("faults", ())]
    if not rows:
        return ""
    return f'<section id="past"><h3>What broke here lately</h3>{table(("When", "Job", "What"), rows)}</section>'


def _job(name: str, job: Facts) -> str:
    head = [
        f"leader {job['leader'] or 'none'}", f"generation {job['generation']}",
        f"newest publication {publication(job['publication'])}",
    ]  # fmt: skip
    return (
        f"<h2>{escape(name)}</h2><p>{escape(', '.join(head))}</p>"
        f'<section class="replicas"><h3>Replicas</h3>{_replicas(job)}</section>'
        f'<section class="lanes"><h3>Lanes</h3>{_lanes(job)}</section>'
        f'<div class="pair"><section class="members"><h3>Members</h3>{_members(job)}</section>'
        f'<section class="links"><h3>Links into this node: bytes that had come, of those planned</h3>'
        f"{heat_map(job.get('links', ()))}</section></div>"
    )


def _replicas(job: Facts) -> str:
    names = ("Replica", "Publication", "Step", "Behind", "Ready", "Mode", "Why not")
    rows = [
        [
            text(r["name"]), text(publication(r["publication"])), number(_dash(r["step"])), number(_dash(r["lag"])),
            '<span class="good">yes</span>' if r["ready"] else '<span class="bad">no</span>',
            text(r["mode"]), prose(r["why"]),
        ]
        for r in job["replicas"]
    ]  # fmt: skip
    return table(names, rows)


def _lanes(job: Facts) -> str:
    rows = [
        [text(lane["replica"]), text(lane["stage"]), prose(lane["why"]), prose(lane["turned"])] for lane in job["lanes"]
    ]
    return table(("Lane", "Stage", "Why", "Why it last turned"), rows)


def _members(job: Facts) -> str:
    rows = []
    for member in job["members"]:
        states = [state for state in ("draining", "parked") if member["node"] in {e["node"] for e in job[state]}]
        shown = f'<span class="warn">{", ".join(states)}</span>' if states else '<span class="good">active</span>'
        rows.append([text(member["node"]), text(member["address"]), number(str(len(member["ranks"]))), shown])
    return table(("Node", "Address", "Ranks", "State"), rows)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already: `number` at the right, `prose` in lines, all others in one line.

    It scrolls for itself where it is too wide. At most `ROWS` rows are shown.
    """
    if not rows:
        return "<p>None.</p>"
    head = "".join(_head(name, cell) for name, cell in zip(names, rows[0], strict=True))
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows[:ROWS])
    more = f'<tr><td colspan="{len(names)}">and {len(rows) - ROWS} more</td></tr>' if len(rows) > ROWS else ""
    rest = f"<tbody>{body}{more}</tbody>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>{rest}</table></div>'


def _head(name: str, below: str) -> str:
    mark = next((kind for kind in (_NUMBER, _PROSE) if below.startswith(f"<td{kind}")), "")
    return f"<th{mark}>{escape(name)}</th>"


def _cell(cell: str) -> str:
    return cell if cell.startswith("<td") else f"<td>{cell}</td>"


def text(value: object) -> str:
    """A cell's text."""
    return escape(str(value))


def prose(value: object) -> str:
    """A cell with words that may take several lines."""
    return f"<td{_PROSE}>{text(value)}</td>"


def goes_on_failed(refit: Facts) -> bool:
    """Whether a refit has failed and is not over."""
    return bool(refit["failures"]) and not refit["outcome"]


def failing(refit: Facts) -> str:
    """What is to be said of such a refit."""
    times = "once" if refit["failures"] == 1 else f"{refit['failures']} times"
    return f"the refit of {refit['replica']} to {publication(refit['publication'])} has failed {times}: {refit['why']}"


def number(value: str) -> str:
    """A cell with a number."""
    return f"<td{_NUMBER}>{escape(value)}</td>"


def publication(value: Iterable[int] | None) -> str:
    """Generation and revision."""
    return "/".join(map(str, value)) if value else "-"


def size(nbytes: float) -> str:
    """Bytes in the largest unit that is not above them."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _dash(value: object) -> str:
    return "-" if value is None else str(value)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at))
