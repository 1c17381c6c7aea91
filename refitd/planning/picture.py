"""A heat map of the traffic between domains, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from refitd.layout.box import Ints
from refitd.planning.text import size
from refitd.planning.traffic import traffic

_LEFT, _TOP, _RIGHT, _BOTTOM = 150, 150, 150, 40
_AREA = 720
_SHADES = ((255, 255, 255), (254, 217, 118), (253, 141, 60), (189, 0, 38))  # white for nothing, dark red for the most
_STEPS = 64
_MIN_LABEL = 11


def heat_map(domains: Sequence[str], matrix: Ints, title: str) -> str:
    """An SVG document: one cell for each sending (row) and receiving (column) domain, with a scale in bytes.

    Domains that send nothing have no row, those that receive nothing no column.
    """
    senders, receivers, nbytes = traffic(domains, matrix)
    cell = max(4.0, min(60.0, _AREA / max(len(senders), len(receivers), 1)))
    width, height = cell * max(len(receivers), 1), cell * max(len(senders), 1)
    most, tall = int(nbytes.max(initial=0)), max(height, 160.0)
    body = [
        *_cells(senders, receivers, nbytes, cell, most),
        *_names(senders, receivers, cell),
        f'<rect x="{_LEFT}" y="{_TOP}" width="{width:g}" height="{height:g}" fill="none" stroke="#555"/>',
        *_scale(_LEFT + width + 24, tall, most),
    ]
    return _page(title, _subtitle(matrix), (max(_LEFT + width + _RIGHT, 700.0), _TOP + tall + _BOTTOM), body)


def _subtitle(matrix: Ints) -> str:
    return (
        f"bytes over the network from the domain at the left to the domain at the top; {size(int(matrix.sum()))} in all"
    )


def _page(title: str, subtitle: str, extent: tuple[float, float], body: Sequence[str]) -> str:
    width, height = extent
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11" fill="#222">'
    )
    ground = f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'
    heading = f'<text x="20" y="28" font-size="17" font-weight="bold">{escape(title)}: traffic between domains</text>'
    below = f'<text x="20" y="48" font-size="12">{escape(subtitle)}</text>'
    return "\n".join([head, ground, heading, below, *body, "</svg>\n"])


def _cells(rows: Sequence[str], columns: Sequence[str], matrix: Ints, cell: float, most: int) -> Iterator[str]:
    for i, row in enumerate(matrix.tolist()):
        for j, nbytes in enumerate(row):
            if nbytes:
                x, y = _LEFT + j * cell, _TOP + i * cell
                label = escape(f"{rows[i]} to {columns[j]}: {size(nbytes)}")
                yield (
                    f'<rect x="{x:g}" y="{y:g}" width="{cell:g}" height="{cell:g}" fill="{shade(nbytes, most)}">'
                    f"<title>{label}</title></rect>"
                )


def _names(rows: Sequence[str], columns: Sequence[str], cell: float) -> Iterator[str]:
    every = max(1, -(-_MIN_LABEL // int(cell)))
    for i in range(0, len(rows), every):
        y = _TOP + (i + 0.5) * cell + 4
        yield f'<text x="{_LEFT - 6}" y="{y:g}" text-anchor="end">{escape(rows[i])}</text>'
    for j in range(0, len(columns), every):
        x = _LEFT + (j + 0.5) * cell + 4
        yield f'<text transform="translate({x:g} {_TOP - 6}) rotate(-90)">{escape(columns[j])}</text>'


def _scale(x: float, height: float, most: int) -> Iterator[str]:
    step = height / _STEPS
    for i in range(_STEPS):
        y = _TOP + height - (i + 1) * step
        fill = shade(i + 1, _STEPS)
        yield f'<rect x="{x:g}" y="{y:g}" width="16" height="{step + 0.5:g}" fill="{fill}"/>'
    for part in (0, 1, 2, 3, 4):
        y = _TOP + height * (1 - part / 4) + 4
        yield f'<text x="{x + 22:g}" y="{y:g}">{size(most * part // 4)}</text>'


def shade(value: int, most: int) -> str:
    """The colour of ``value`` between white (0) and dark red (``most``)."""
    place = (len(_SHADES) - 1) * min(max(value, 0), most) / most if most else 0.0
    low = min(int(place), len(_SHADES) - 2)
    part = place - low
    mixed = (round(a + (b - a) * part) for a, b in zip(_SHADES[low], _SHADES[low + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
