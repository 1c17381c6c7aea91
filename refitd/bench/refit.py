"""``refitd bench refit``: publish to commit, next to gather-then-broadcast and direct send/recv over gloo."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict

import torch

from refitd.bench import contest, models, on_device, outcome, rows
from refitd.bench.cards import measure as measure_cards
from refitd.bench.contest import Contest
from refitd.bench.machine import commit, machine
from refitd.bench.models import Model
from refitd.bench.party import BenchFailed
from refitd.bench.rows import Row

WARM_UPS = 3
_RIVALS = {"peer": "gather_broadcast", "tcp": "gloo_send_recv"}
_SMALL_NAMES = {"peer": "small", "tcp": "small_tcp"}


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line asks for and say it; the exit status."""
    torch.set_num_threads(1)
    if arguments.gpus:
        return measure_cards.run(arguments)
    where = machine()  # before the benchmark itself is the load
    try:
        if arguments.device == "cuda":
            found = [
                row
                for transport in arguments.transports
                for row in on_device.measure(arguments.models, arguments.repeats, transport)
            ]
            where |= on_device.facts()
        else:
            found = measure(arguments.models, arguments.transports, arguments.repeats)
    except BenchFailed as error:
        return outcome.failed(error, arguments.json)
    document = {
        "ok": True, "rows": [asdict(row) for row in found], "machine": where, "repeats": arguments.repeats,
        "command": _command(arguments), "commit": commit(),
    }  # fmt: skip
    rows.show(found, where, commit(), arguments.json)
    return outcome.finished(document, arguments)


def measure(model_names: tuple[str, ...], transports: tuple[str, ...], repeats: int) -> list[Row]:
    """All rows. Raises BenchFailed."""
    found: list[Row] = []
    if "big" in model_names:
        found += _measure_big(models.model("big"), transports, repeats)
    if "small" in model_names:
        found += _measure_small(models.model("small"), transports, repeats)
    return found


def _measure_big(model: Model, transports: tuple[str, ...], repeats: int) -> list[Row]:
    rivals = [_RIVALS[transport] for transport in transports]
    open_ones = [contest.refit(model, transport) for transport in transports]
    open_ones += [contest.rival(model, name) for name in rivals]
    seconds, peaks = _race(open_ones, repeats)
    found: list[Row] = []
    for transport in transports:
        found += rows.time_rows(transport, seconds[transport], models.nbytes(model), seconds[_RIVALS[transport]])
    found += [rows.rival_row(name, seconds[name]) for name in rivals]
    for name, of in peaks.items():
        found += rows.peak_rows(name, of)
    return found


def _measure_small(model: Model, transports: tuple[str, ...], repeats: int) -> list[Row]:
    found: list[Row] = []
    for transport in transports:
        seconds, _peaks = _race([contest.refit(model, transport)], repeats)
        found += rows.small_rows(_SMALL_NAMES[transport], seconds[transport])
    return found


def _race(
    open_ones: Sequence[AbstractContextManager[Contest]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Seconds of every repeat, and peaks by process, of each contest. They take turns, so that all meet one machine."""
    with ExitStack() as stack:
        contests = [stack.enter_context(one) for one in open_ones]
        seconds: dict[str, list[float]] = {one.name: [] for one in contests}
        for step in range(WARM_UPS + repeats):
            for one in contests:
                took = one.round(step)
                if step >= WARM_UPS:
                    seconds[one.name].append(took)
        return seconds, {one.name: one.peaks() for one in contests}


def _command(arguments: argparse.Namespace) -> str:
    command = ["refitd", "bench", "refit", "--device", arguments.device, "--transport", arguments.transport]
    return shlex.join([*command, "--model", arguments.model, "--repeats", str(arguments.repeats)])
