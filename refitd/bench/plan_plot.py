"""How planning grows, as SVG: one panel each for tensors, ranks and experts, with logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

_WIDTH, _HEIGHT, _GAP, _LEFT, _TOP = 270, 240, 88, 80, 90
Point = Mapping[str, float]


def growth_plot(growth: Mapping[str, Sequence[Point]]) -> str:
    """An SVG document. Each panel also has a dashed line of slope one through its first point: linear growth."""
    times = [point["plan_ms"] for points in growth.values() for point in points]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times) * 1.01))
    width, height = _LEFT + len(growth) * (_WIDTH + _GAP), _TOP + _HEIGHT + 60
    below = (
        "milliseconds on one core, median; 256 trainers to 256 engine ranks, 64 layers, 256 experts where not varied; "
        "dashed: linear growth"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" fill="#222">'
    )
    parts = [
        head,
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="20" y="28" font-size="17" font-weight="bold">Time to plan and prove a DeepSeek-like model</text>',
        f'<text x="20" y="48">{below}</text>',
    ]
    for number, (what, points) in enumerate(growth.items()):
        parts += _panel(_LEFT + number * (_WIDTH + _GAP), what, points, (low, high))
    return "\n".join([*parts, "</svg>\n"])


def _panel(left: float, what: str, points: Sequence[Point], limits: tuple[float, float]) -> Iterator[str]:
    values = [point[what] for point in points]

    def place(value: float, took: float) -> tuple[float, float]:
        return left + _part(value, values[0], values[-1]) * _WIDTH, _TOP + (1 - _part(took, *limits)) * _HEIGHT

    yield f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>'
    yield from _ticks(left, limits)
    yield f'<text x="{left + _WIDTH / 2:g}" y="{_TOP + _HEIGHT + 44}" text-anchor="middle">{_axis(what)}</text>'
    yield _linear(values, points[0]["plan_ms"], limits, left)
    line = " ".join("{:g},{:g}".format(*place(point[what], point["plan_ms"])) for point in points)
    yield f'<polyline points="{line}" fill="none" stroke="#b2182b" stroke-width="2"/>'
    for number, point in enumerate(points):
        anchor = "middle" if number else "start"
        x, y = place(point[what], point["plan_ms"])
        yield f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="#b2182b"/>'
        yield f'<text x="{x:g}" y="{y - 9:g}" text-anchor="{anchor}" font-size="11">{point["plan_ms"]:.0f}</text>'
        yield f'<text x="{x:g}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle" font-size="11">{point[what]:,.0f}</text>'


def _axis(what: str) -> str:
    return "ranks, both sides together" if what == "ranks" else f"{what} (logarithmic)"


def _ticks(left: float, limits: tuple[float, float]) -> Iterator[str]:
    value = limits[0]
    while value <= limits[1]:
        y = _TOP + (1 - _part(value, *limits)) * _HEIGHT
        yield f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{value:g} ms</text>'
        value *= 10


def _linear(values: Sequence[float], first: float, limits: tuple[float, float], left: float) -> str:
    """From the first point to where slope one leaves the panel."""
    last = min(values[-1], values[0] * limits[1] / first)
    x, y = left + _part(last, values[0], values[-1]) * _WIDTH, first * last / values[0]
    start, end = (_TOP + (1 - _part(took, *limits)) * _HEIGHT for took in (first, y))
    return f'<line x1="{left}" y1="{start:g}" x2="{x:g}" y2="{end:g}" stroke="#777" stroke-dasharray="4 4"/>'


def _part(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)
