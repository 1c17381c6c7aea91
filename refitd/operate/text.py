"""A daemon's status for people: tables with colour on a terminal, aligned plain text anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from refitd.operate.rate import format_rate
from refitd.telemetry.page import failing, goes_on_failed, publication

Facts = dict[str, Any]
_GAP = "  "
_LATELY_SECONDS = 600.0
_REPLICA = ("REPLICA", "PUBLICATION", "STEP", "LAG", "READY", "MODE", "WHY NOT")
_LANE = ("LANE", "STAGE", "WHY", "EXCLUDED")
_MEMBER = ("NODE", "ADDRESS", "RANKS", "STATE")


class Table(NamedTuple):
    """A heading, the columns' names, and rows of as many cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_status(answer: Facts, stream: TextIO) -> None:
    """Write the answer to ``status`` to ``stream``."""
    if stream.isatty():
        _print_rich(answer, stream)
    else:
        stream.write(plain_status(answer) + "\n")


def plain_status(answer: Facts) -> str:
    """The whole status, a line for each thing, columns aligned with spaces."""
    blocks = [headline(answer)]
    for name, job in answer["jobs"].items():
        blocks.append("\n".join([job_line(name, job), *troubles(job)]))
        blocks += ["\n".join(aligned(table)) for table in job_tables(job)]
    return "\n\n".join(blocks)


def headline(answer: Facts) -> str:
    store = answer["store"]
    return f"node {answer['node']}, store {store['url']} ({_contact(store)}){_drain(answer['drain'])}"


def _drain(drain: Facts) -> str:
    word = "drained" if drain["drained"] else "draining"
    return f", {word}: {drain['reason']}" if drain["wanted"] else ""


def _contact(store: Facts) -> str:
    return {None: "not asked yet", True: "answers", False: "does not answer"}[store["answers"]]


def job_line(name: str, job: Facts) -> str:
    """One line about a job: who leads, what is newest, and what operators have asked for."""
    parts = [
        f"job {name}: leader {job['leader'] or 'none'}",
        f"generation {job['generation']}",
        f"newest publication {publication(job['publication'])}",
        f"limit {format_rate(job['limit'])} a node" if job["limit"] is not None else "",
        f"paused: {job['paused_reason'] or 'no reason given'}" if job["paused"] else "",
    ]
    return ", ".join(filter(None, parts))


def troubles(job: Facts) -> list[str]:
    """What is slow now, which refits go on after a failure, and what broke here lately: a sentence each."""
    return [
        *job.get("slow", ()),
        *map(failing, filter(goes_on_failed, job.get("refits", ()))),
        *(f"{_ago(f['age'])} ago: {f['what']}" for f in job.get("faults", ()) if f["age"] < _LATELY_SECONDS),
    ]


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def job_tables(job: Facts) -> Iterator[Table]:
    """Replicas, lanes and members of a job; a table without rows is left out."""
    tables = [
        Table("replicas", _REPLICA, [_replica(replica) for replica in job["replicas"]]),
        Table("lanes", _LANE, [_lane(lane) for lane in job["lanes"]]),
        Table("members", _MEMBER, [_member(job, member) for member in job["members"]]),
    ]
    return (table for table in tables if table.rows)


def _replica(replica: Facts) -> list[str]:
    return [
        replica["name"], publication(replica["publication"]), _or_dash(replica["step"]), _or_dash(replica["lag"]),
        "yes" if replica["ready"] else "no", replica["mode"], replica["why"],
    ]  # fmt: skip


def _lane(lane: Facts) -> list[str]:
    excluded = "; ".join(f"{entry['rank']}: {entry['reason']}" for entry in lane["excluded"])
    return [lane["replica"], lane["stage"], lane["why"], excluded]


def _member(job: Facts, member: Facts) -> list[str]:
    states = [
        f"{word}: {entry['reason']}" if entry["reason"] else word
        for word, table in (("draining", job["draining"]), ("parked", job["parked"]))
        for entry in table
        if entry["node"] == member["node"]
    ]
    guests = {rank["key"] for rank in job.get("ranks", ()) if rank.get("path") == "library"}
    ranks = ", ".join(rank["key"] + " (library)" * (rank["key"] in guests) for rank in member["ranks"])
    return [member["node"], member["address"], ranks, "; ".join(states)]


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def aligned(table: Table) -> Iterator[str]:
    """Its lines, columns aligned with spaces."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    for row in rows:
        yield _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _print_rich(answer: Facts, stream: TextIO) -> None:
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    console.print(headline(answer), markup=False, style="bold")
    for name, job in answer["jobs"].items():
        style = "bold yellow" if job["paused"] else "bold"
        console.print("\n" + job_line(name, job), markup=False, style=style)
        for sentence in troubles(job):
            console.print(sentence, markup=False, style="red")
        for table in job_tables(job):
            console.print(rich_table(table))


def rich_table(table: Table) -> Any:
    """The same for rich."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=table.title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return shown


_STYLES = {"yes": "green", "no": "red", "failed": "red", "parked": "yellow", "committed": "green", "late": "red"}
