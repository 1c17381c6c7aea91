"""A matrix of links as an HTML table: rows send, columns receive, the colour is the share of all bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

SIDE = 24  # rows and columns at most; the busiest are shown


def heat_map(links: Iterable[Mapping[str, Any]]) -> str:
    """Each cell: bytes that came over those planned. A cell that is behind while others are done has a red frame."""
    cells = {(str(link["src"]), str(link["dst"])): link for link in links}
    if not cells:
        return "<p>No attempt yet.</p>"
    sources, targets = (_busiest(cells, end) for end in (0, 1))
    most = max(link["planned"] for link in cells.values())
    head = "".join(f"<th>{escape(target)}</th>" for target in targets)
    rows = "".join(
        f"<tr><th>{escape(source)}</th>{''.join(_cell(cells.get((source, target)), most) for target in targets)}</tr>"
        for source in sources
    )
    body = f"<tbody><tr><th>from \\ to</th>{head}</tr>{rows}</tbody>"
    return f'<div class="scroll"><table class="heat">{body}</table></div>{_rest(cells, sources)}'


def _busiest(cells: Mapping[tuple[str, str], Mapping[str, Any]], end: int) -> list[str]:
    totals: dict[str, int] = {}
    for ends, link in cells.items():
        totals[ends[end]] = totals.get(ends[end], 0) + link["planned"]
    return sorted(sorted(totals, key=lambda name: (-totals[name], name))[:SIDE])


def _cell(link: Mapping[str, Any] | None, most: int) -> str:
    if link is None:
        return "<td></td>"
    planned, moved = link["planned"], link["moved"]
    alpha = 0.10 + 0.55 * planned / most if most else 0.10
    late = ' class="late"' if link.get("late") else ""
    words = f"{escape(str(link['link']))}: {moved} of {planned} bytes"
    share = 100 * moved // planned if planned else 100
    return (
        f'<td{late} style="background:rgb(var(--heat) / {alpha:.2f})" title="{words}">'
        f"{_short(planned)} {share}%<br>{escape(str(link['link']))}</td>"
    )


def _short(nbytes: int) -> str:
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g}{unit}"
    return str(nbytes)


def _rest(cells: Mapping[tuple[str, str], Any], sources: list[str]) -> str:
    hidden = len({source for source, _target in cells}) - len(sources)
    return f"<p>and {hidden} more sources</p>" if hidden else ""
