"""``refitd bench refit --device cuda --gpus N``: publish to commit over several cards, beside what else moves bytes.

One cell after the other: a layout, a transport, a size, a row width. What is known so far is said after each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from refitd.bench import moments, on_device, outcome, rows
from refitd.bench.cards import card, layouts, nvlink, rivals
from refitd.bench.cards.contest import BUCKET_BYTES, NCCL, Edges, Settings, crossing, refit
from refitd.bench.cards.layouts import Model, Scene
from refitd.bench.machine import commit, machine
from refitd.bench.party import BenchFailed, Process, ask_all
from refitd.bench.rows import Row
from refitd.errors import RefitdError

WARM_UPS = 2
MOST_BUCKET_BYTES = 1 << 30  # that a daemon accepts
WIDTHS = {"contiguous": layouts.CONTIGUOUS, "512": 512, "128": 128}  # bytes of a row
SIZES = {
    "1MiB": 1 << 20, "16MiB": 16 << 20, "256MiB": 256 << 20, "1GiB": 1 << 30, "2GiB": 2 << 30, "4GB": 4 * 10**9,
    "16GB": 16 * 10**9, "64GB": 64 * 10**9,
}  # fmt: skip
# GB/s of NCCL M2N 0.1.0 (NCCL 2.30.7), recorded between two H200s, one call at a time, contiguous.
M2N = {"1MiB": 5.9, "16MiB": 80.0, "256MiB": 221.0, "1GiB": 264.0, "2GiB": 276.0}


class Cell(NamedTuple):
    """One thing to measure; ``size`` for each trainer."""

    scene: Scene
    transport: str
    size: str
    width: str

    @property
    def name(self) -> str:
        return "_".join([self.scene.name, self.transport, self.size, self.width])

    def model(self) -> Model:
        return layouts.model(self.scene, SIZES[self.size], WIDTHS[self.width])

    def bucket_bytes(self) -> int:
        """NCCL keeps two buffers an edge on the card, and packs one bucket while another is on the wire."""
        if self.transport != NCCL:
            return BUCKET_BYTES
        wanted = max(SIZES[self.size] // 16, 1 << 20)
        return min(1 << (wanted - 1).bit_length(), MOST_BUCKET_BYTES)


class Refits(NamedTuple):
    """What `measured` found: ``links`` has what NVLink counted (sent, received) by card in the last round."""

    rounds: list[on_device.Round]
    edges: Edges
    links: list[tuple[int, int]]
    network_bytes: int
    transports: list[str]
    wire: Mapping[str, list[float]]  # of the last round, as `moments.wire` gives it


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line asks for and say it; the exit status."""
    where: dict[str, Any] = dict(machine())
    cards = nvlink.count() if arguments.gpus == "all" else int(arguments.gpus)
    if cards < 1:
        return outcome.failed(BenchFailed("--gpus all: there are none that NVML or CUDA_VISIBLE_DEVICES names"), True)
    if not (wanted := cells(cards, arguments)):
        known = ", ".join(scene.name for scene in layouts.scenes(cards))
        return outcome.failed(BenchFailed(f"--layout: {cards} cards have {known}"), arguments.json)
    card.share(arguments.per_card)
    where |= nvlink.Links(cards // arguments.per_card).facts()
    document: dict[str, Any] = {
        "ok": True, "rows": [], "failed": {}, "facts": {}, "machine": where,
        "repeats": arguments.repeats, "commit": commit(), "command": outcome.command("refit", arguments.argv),
    }  # fmt: skip
    for cell in wanted:
        _one(cell, arguments, document)
        if arguments.json:
            print(json.dumps(document), flush=True)
    if not arguments.json:
        rows.show([Row(**row) for row in document["rows"]], where, document["commit"], False)
    outcome.finished(document, arguments)
    return 0 if document["ok"] else 1


def cells(cards: int, arguments: argparse.Namespace) -> list[Cell]:
    """In the order of the command line."""
    chosen = [one for one in layouts.scenes(cards) if one.name in (arguments.layout or [one.name])]
    return [
        Cell(scene, transport, size, width)
        for scene in chosen
        for transport in arguments.transports
        for size in arguments.size
        for width in arguments.width
    ]


def _one(cell: Cell, arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    """What fails costs its own cell, or its own rival, and is named."""
    print(f"{cell.name} …", file=sys.stderr, flush=True)
    try:
        found = measured(cell, arguments.repeats)
        pairs = rivals.pairs_of(cell.scene, found.edges)
        others, failed = rival_times(cell, pairs, arguments.repeats, arguments.rivals)
    except (RefitdError, OSError, KeyError, ValueError) as error:
        document["ok"] = False
        document["failed"][cell.name] = f"{type(error).__name__}: {error}"[-3000:]
        print(f"{cell.name}: {error}", file=sys.stderr, flush=True)
        return
    made = rows_of(cell, found, others)
    print(*(rows.line(row) for row in made), sep="\n", file=sys.stderr, flush=True)
    document["rows"] += [asdict(row) for row in made]
    document["failed"] |= failed
    document["facts"][cell.name] = {
        "model": asdict(cell.model()), "bucket_bytes": cell.bucket_bytes(), "transports": found.transports,
        "edges": {" ".join(edge): nbytes for edge, nbytes in found.edges.items()}, "nvlink": found.links,
        "rounds_ms": [round(one.total * 1e3, 3) for one in found.rounds],
        "movers_ms": [round(one.moved * 1e3, 3) for one in found.rounds],
        "steps_ms": {
            f"{number:02}_{step.label}": round(statistics.median(one.steps[number] for one in found.rounds) * 1e3, 3)
            for number, step in enumerate(moments.STEPS)
        },
        "wire_ms": found.wire,
    }  # fmt: skip


def measured(cell: Cell, repeats: int) -> Refits:
    """Refits of the cell, every bit checked. Raises BenchFailed, or what the daemons raise."""
    links = nvlink.Links(cell.scene.cards)
    if links.why:
        print(f"NVLink is not counted: {links.why}", file=sys.stderr, flush=True)
    settings = Settings(bucket_bytes=cell.bucket_bytes(), config=(("log.level", "warning"),), stamped=True)
    with refit(cell.scene, cell.model(), cell.transport, settings) as one:
        spans, network = [], 0
        for step in range(WARM_UPS + repeats):
            network = one.network_bytes()
            links.begin()
            one.round(step, links.end)
            spans.append(one.times)
        found, (began, ended) = one.stamps(), spans[-1]
        rounds = [on_device.stamped(span, found, len(cell.scene.engines)) for span in spans[WARM_UPS:]]
        wire = moments.wire([stamp for stamp in found if began <= stamp.at <= ended])
        return Refits(rounds, one.edges(), links.between, one.network_bytes() - network, one.transports(), wire)


def rival_times(cell: Cell, pairs: rivals.Pairs, repeats: int, wanted: str) -> tuple[dict[str, float], dict[str, str]]:
    """Median seconds by rival, and why others have none. ``wanted``: all, copies, none."""
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    made: list[tuple[list[Callable[[], Any]], list[str]]] = []
    if wanted != "none":
        made.append(([partial(rivals.Copies, cell.scene, cell.model(), pairs)], ["raw_copy", "torch_copies"]))
    with tempfile.TemporaryDirectory(prefix="refitd-rivals-") as folder:
        if wanted == "all" and cell.scene.cards > 1:
            meeting = rivals.Meeting(Path(folder), rivals.Barrier(cell.scene.cards), pairs)
            ranks = [
                partial(rivals.CardRank, cell.scene, cell.model(), number, meeting)
                for number in range(cell.scene.cards)
            ]
            made.append((list(ranks), rivals.names(cell.scene)))
        for makers, called in made:
            _race(makers, called, repeats, times, failed, cell.name)
    return times, failed


def _race(
    makers: Sequence[Callable[[], Any]],
    called: Sequence[str],
    repeats: int,
    times: dict[str, float],
    failed: dict[str, str],
    label: str,
) -> None:
    """One rival that fails ends those after it: its processes may hang in NCCL."""
    processes = [Process(f"rival{number}", make) for number, make in enumerate(makers)]
    name = called[0]
    try:
        for step, name in enumerate(called):
            ask_all(processes, "fill", step)
            took = [max(ask_all(processes, "move", step)) for _ in range(WARM_UPS + repeats)]
            times[name] = statistics.median(took[WARM_UPS:])
        ask_all(processes, "close")
    except BenchFailed as error:
        failed[f"{label}_{name}"] = str(error)[-1500:]
        print(f"{label}: rival {name}: {error}", file=sys.stderr, flush=True)
    finally:
        for process in processes:
            process.end()


def rows_of(cell: Cell, found: Refits, others: dict[str, float]) -> list[Row]:
    """Medians. Rates are of the busiest card: bytes that come into it from others, or into memory where none do."""
    label, raw = cell.name, others.get("raw_copy")
    into = max(crossing(cell.scene, found.edges)[1]) or sum(found.edges.values())
    total = statistics.median(one.total for one in found.rounds)
    moved = statistics.median(one.moved for one in found.rounds)
    recorded = M2N.get(cell.size) if (cell.scene.name, cell.width) == ("one_to_one", "contiguous") else None
    made = [
        _against(f"{label}_publish_to_commit", total, raw),
        _against(f"{label}_movers", moved, raw),
        Row(f"{label}_rate", into / total / 1e9, "GB/s"),
        _rate(f"{label}_movers_rate", into / moved / 1e9, into / raw / 1e9 if raw else None),
    ]
    if recorded:
        made.append(_rate(f"{label}_movers_rate_over_recorded_m2n", into / moved / 1e9, recorded))
    for number, phase in enumerate(on_device.PHASES):
        made.append(Row(f"{label}_{phase}", statistics.median(one.phases[number] for one in found.rounds) * 1e3, "ms"))
    made += [_against(f"{label}_than_{name}", total, seconds) for name, seconds in others.items() if name != "raw_copy"]
    return made + _counted(cell, found)


def _counted(cell: Cell, found: Refits) -> list[Row]:
    """Bytes by the daemons' count, next to NVLink's and the least that there could be."""
    out, into = crossing(cell.scene, found.edges)
    made = []
    for number, (sent, received) in enumerate(found.links):
        made.append(_rate(f"{cell.name}_card{number}_sent", out[number] / 1e6, sent / 1e6, "MB"))
        made.append(_rate(f"{cell.name}_card{number}_received", into[number] / 1e6, received / 1e6, "MB"))
    if cell.transport != "peer" and cell.scene.nodes > 1:
        least = layouts.network_bytes_min(cell.scene, cell.model())
        made.append(_rate(f"{cell.name}_network_bytes", found.network_bytes / 1e6, least / 1e6, "MB"))
    return made


def _against(name: str, seconds: float, theirs: float | None) -> Row:
    """ms; ``ratio`` above 1: faster than theirs."""
    return Row(name, seconds * 1e3, "ms", theirs and theirs * 1e3, theirs / seconds if theirs else None)


def _rate(name: str, value: float, baseline: float | None, unit: str = "GB/s") -> Row:
    return Row(name, value, unit, baseline, value / baseline if baseline else None)
