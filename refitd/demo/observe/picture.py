"""Draws a board from a live Prometheus: a drawing of ours with Grafana's layout, legends and units, not Grafana's."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from refitd.demo.observe import boards
from refitd.demo.observe.boards import Board, Panel
from refitd.demo.observe.look import THEMES, Theme, legend, shown
from refitd.demo.observe.prometheus import Line, Prometheus
from refitd.demo.observe.rules import SCRAPE_SECONDS

if TYPE_CHECKING:
    from refitd.demo.observe.run import Span

WIDTH, UNIT, HEAD, MARGIN, FOOT = 1440, 38, 46, 12, 24  # pixels; UNIT: of a row of Grafana's grid
DPI = 100
_LEGEND_LINE, _TITLE, _TICKS = 17, 40, 24
_COLORS = 256  # of thousands, nearly all of which smooth edges; a third of the bytes


def draw(prometheus: Prometheus, folder: Path, name: str, span: Span, faults: Sequence[Span]) -> list[Path]:
    """Both boards over a span of time, light and dark, as PNG; faults are shaded and numbered. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for board in map(boards.read, boards.BOARDS):
        data = {panel.title: _data(prometheus, panel, span) for panel in board.panels}
        for theme in THEMES:
            file = folder / f"{board.name}-{name}-{theme.name}.png"
            _Drawing(board, theme, span, faults).save(file, data)
            made.append(file)
    return made


Data = list[tuple[str, Line]]  # legend, series


def _data(prometheus: Prometheus, panel: Panel, span: Span) -> Data:
    """What the panel shows: series that were never other than zero are left out where others were."""
    found = [
        (legend(text, line.labels), line)
        for expr, text in panel.queries
        for line in prometheus.over(expr, span.start, span.end, _step(panel))
    ]
    busy = [each for each in found if any(value for _at, value in each[1].points)]
    return sorted(busy or found[:1], key=lambda each: each[0])


def _step(panel: Panel) -> float:
    """Seconds between two points: bars count the events of one interval each."""
    return boards.RATE_SECONDS if panel.stacked else SCRAPE_SECONDS


class _Drawing:
    """One picture."""

    def __init__(self, board: Board, theme: Theme, span: Span, faults: Sequence[Span]) -> None:
        self._board, self._theme, self._span, self._faults = board, theme, span, faults
        key = (len(faults) + 1) // 2 * 18 + 8 if faults else 0
        self._bottom = FOOT + key
        self._height = HEAD + UNIT * max(y + h for _x, y, _w, h in (p.place for p in board.panels)) + self._bottom
        self._figure = Figure(figsize=(WIDTH / DPI, self._height / DPI), dpi=DPI, facecolor=theme.page)

    def save(self, file: Path, data: dict[str, Data]) -> None:
        """Draw everything and write it."""
        with self._theme.style():
            self._text(MARGIN, 14, self._board.title, size=13, weight="bold")
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self._span.start))
            words = f"{self._span.words}, {self._span.end - self._span.start:.0f} s from {when}"
            self._text(WIDTH - MARGIN, 16, words, color=self._theme.faint, ha="right")
            for y, title in self._board.rows:
                self._text(MARGIN, HEAD + y * UNIT + 12, title, size=10.5, weight="bold")
            for panel in self._board.panels:
                self._panel(panel, data[panel.title])
            self._foot()
            self._figure.savefig(raw := io.BytesIO(), format="png")
        _reduced(Image.open(raw).convert("RGB")).save(file, optimize=True)

    def _text(self, x: float, y: float, words: str, size: float = 9, color: str = "", **more: str) -> None:
        """Text whose top left corner (or right, with ``ha``) is at a pixel, counted from the top."""
        place = x / WIDTH, 1 - y / self._height
        self._figure.text(*place, words, size=size, color=color or self._theme.ink, va="top", **more)  # type: ignore[arg-type]

    def _foot(self) -> None:
        top = self._height - self._bottom
        for number, fault in enumerate(self._faults):
            x = MARGIN + (number % 2) * WIDTH / 2
            self._text(x, top + 6 + number // 2 * 18, f"{number + 1}  {fault.words}", color=self._theme.ink)
        note = "Drawn by refitd.demo.observe from the board's queries and a real Prometheus: not a picture of Grafana."
        self._text(MARGIN, self._height - FOOT + 4, note, size=8, color=self._theme.faint)

    def _axes(self, left: float, top: float, width: float, height: float) -> Axes:
        box = (left / WIDTH, 1 - (top + height) / self._height, width / WIDTH, height / self._height)
        return self._figure.add_axes(box)

    def _panel(self, panel: Panel, data: Data) -> None:
        x, y, w, h = panel.place
        column = (WIDTH - 2 * MARGIN) / 24
        left, top = MARGIN + x * column + 3, HEAD + y * UNIT + 3
        width, height = w * column - 6, h * UNIT - 6
        corner = left / WIDTH, 1 - (top + height) / self._height
        self._figure.add_artist(
            Rectangle(
                corner, width / WIDTH, height / self._height, facecolor=self._theme.panel, edgecolor=self._theme.edge,
                linewidth=0.8, zorder=-1,
            )
        )  # fmt: skip
        self._text(left + 10, top + 8, panel.title, weight="bold")
        if panel.kind == "stat":
            self._stat(panel, data, (left, top, width, height))
        else:
            self._lines(panel, data, (left, top, width, height))

    def _stat(self, panel: Panel, data: Data, box: tuple[float, float, float, float]) -> None:
        left, top, width, height = box
        value = data[0][1].points[-1][1] if data else float("nan")
        color = self._theme.named[panel.color(value)] if data else self._theme.faint
        words = shown(value, panel.unit) if data else "no data"
        self._text(left + width / 2, top + 34, words, size=25, color=color, ha="center", weight="bold")
        axes = self._axes(left + 1, top + height - 44, width - 2, 42)
        axes.axis("off")
        axes.set_xlim(0, self._span.end - self._span.start)
        for _name, line in data[:1]:
            times, values = self._points(line, SCRAPE_SECONDS)
            axes.fill_between(times, values, step="post", color=color, alpha=0.22, linewidth=0)
            axes.step(times, values, where="post", color=color, linewidth=1.2)
            axes.set_ylim(0, max(*(value for _at, value in line.points), 1e-9) * 1.15)

    def _points(self, line: Line, step: float) -> tuple[list[float], list[float]]:
        """Seconds and values; where points are missing there is one without a value, so that no line bridges them."""
        times: list[float] = []
        values: list[float] = []
        for at, value in line.points:
            if times and at - self._span.start > times[-1] + 1.5 * step:
                times.append(times[-1] + step)
                values.append(math.nan)
            times.append(at - self._span.start)
            values.append(value)
        return times, values

    def _lines(self, panel: Panel, data: Data, box: tuple[float, float, float, float]) -> None:
        left, top, width, height = box
        columns = max(1, int((width - 20) / (max((len(name) for name, _line in data), default=1) * 6.4 + 34)))
        rows = -(-len(data) // columns)
        below = _TICKS + rows * _LEGEND_LINE + 6
        axes = self._axes(left + 64, top + _TITLE, width - 80, height - _TITLE - below)
        self._frame(axes, panel)
        base: dict[float, float] = {}
        for number, (name, line) in enumerate(data):
            color = self._theme.lines[number % len(self._theme.lines)]
            times, values = self._points(line, _step(panel))
            if panel.stacked:
                bottoms = [base.get(round(at), 0.0) for at in times]
                axes.bar(times, values, width=_step(panel) * 0.9, bottom=bottoms, color=color, label=name, linewidth=0)
                base |= {round(at): bottom + value for at, bottom, value in zip(times, bottoms, values, strict=True)}
            else:
                axes.plot(times, values, color=color, label=name, linewidth=1.4)
        axes.set_ylim(bottom=0)
        if not any(value for _name, line in data for _at, value in line.points):
            axes.set_ylim(0, 1)
        if any(name for name, _line in data):
            place = (-56 / (width - 80), -(_TICKS - 2) / (height - _TITLE - below))
            axes.legend(
                loc="upper left", bbox_to_anchor=place, ncols=columns, frameon=False, fontsize=8, handlelength=1.1,
                columnspacing=1.4, labelspacing=0.35, borderpad=0, borderaxespad=0.3, handletextpad=0.5,
            )  # fmt: skip

    def _frame(self, axes: Axes, panel: Panel) -> None:
        """Grid, units, and the faults as shades with their numbers."""
        axes.set_facecolor("none")
        axes.set_xlim(0, self._span.end - self._span.start)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=panel.unit == "short"))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: shown(value, panel.unit)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:.0f} s"))
        axes.grid(visible=True, color=self._theme.grid, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=8, colors=self._theme.faint)
        for side in axes.spines.values():
            side.set_visible(False)
        for number, fault in enumerate(self._faults):
            start, end = fault.start - self._span.start, fault.end - self._span.start
            axes.axvspan(start, end, color=self._theme.shade, alpha=0.5, linewidth=0, zorder=0)
            axes.text(
                (start + end) / 2, 1.0, str(number + 1), transform=axes.get_xaxis_transform(), ha="center", va="bottom",
                fontsize=7, color=self._theme.faint,
            )  # fmt: skip


def _reduced(image: Image.Image) -> Image.Image:
    """In at most `_COLORS` colours, each as it was: a mixed palette would make two thin lines one colour.

    They are the most frequent ones of as many small cubes of the colour space, so that the many shades of one thing's
    smooth edges take no more room than those of a line.
    """
    pixels = np.asarray(image).astype(np.int32)
    codes, where, counts = np.unique(pixels @ (1 << 16, 1 << 8, 1), return_inverse=True, return_counts=True)
    colors = codes[:, None] >> (16, 8, 0) & 255
    often = np.argsort(-counts, kind="stable")
    _cubes, first, cube = np.unique((colors[often] >> 3) @ (1 << 10, 1 << 5, 1), return_index=True, return_inverse=True)
    fullest = np.argsort(-np.bincount(cube, counts[often]), kind="stable")[:_COLORS]
    kept = colors[often[first[fullest]]]
    nearest = ((colors[:, None] - kept) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    reduced = Image.fromarray(nearest[where].reshape(pixels.shape[:2]))
    reduced.putpalette(kept.astype(np.uint8).tobytes())
    return reduced
