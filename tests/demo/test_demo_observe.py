"""What ``make observe`` is made of. The run itself takes minutes: it is no test."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from refitd.demo.observe import boards, picture, verdict
from refitd.demo.observe.look import DARK, LIGHT, legend, shown
from refitd.demo.observe.prometheus import Line
from refitd.demo.observe.rules import RULES, faster, names
from refitd.demo.observe.run import OLDER, RIVAL, Span
from refitd.demo.observe.stage import Holder, Sluice
from refitd.demo.observe.trials import TRIALS
from refitd.failpoints import PHASES

STRAY = ("RefitdVersionsDiffer", "RefitdTwoLeaders")


def test_windows_and_patience_are_divided_and_nothing_else() -> None:
    """Windows by 20, ``for:`` by 60 and at least 4 s; thresholds and names stay."""
    text = "record: a:rate5m\nexpr: rate(x[5m]) > 15 or increase(y[10m]) > 3\nfor: 5m\n---\nfor: 30s\nfor: 1h\n"
    assert faster(text) == (
        "record: a:rate5m\nexpr: rate(x[15000ms]) > 15 or increase(y[30000ms]) > 3\nfor: 5000ms\n---\nfor: 4000ms\n"
        "for: 60000ms\n"
    )


def test_every_alert_has_a_fault_that_is_meant_for_it() -> None:
    """Exactly one fault, and every fault has an alert."""
    meant = [alert for trial in TRIALS for alert in trial.alerts] + list(STRAY)
    assert sorted(meant) == sorted(names(RULES.read_text(), "alert"))
    assert len({trial.words for trial in TRIALS} | {OLDER, RIVAL}) == len(TRIALS) + 2


def test_every_query_of_the_boards_is_asked() -> None:
    """Both boards, every target, with all variables filled in."""
    asked = dict(boards.queries())
    files = [json.loads((boards.FOLDER / f"{name}.json").read_text()) for name in boards.BOARDS]
    assert len(asked) == sum(len(panel.get("targets", ())) for file in files for panel in file["panels"])
    assert not [expr for expr in asked.values() if "$" in expr]
    assert asked["node: Repairs"] == (
        'sum by (method) (increase(refitd_communicator_repair_duration_seconds_count{instance=~".+"}[15s]))'
    )


def test_an_alert_must_fire_in_its_fault_and_not_in_health() -> None:
    """Fired in time; in another fault only; in health too; meant for no fault of this run."""
    spans = [Span("one", ("A",), 100.0, fired={"A": 3.0, "B": 1.0}), Span("two", ("B", "C"), 200.0, fired={"C": 2.0})]
    rows = [verdict._alert(name, spans, {"C": 50.0}) for name in "ABCD"]
    assert [(row.good, row.result) for row in rows] == [
        (True, "after 3 s of: one"),
        (False, "it did not fire in: two"),
        (False, "it fired in health"),
        (False, "it did not fire in: no fault of this run"),
    ]
    assert verdict.table(rows[:2]) == "ok   alert   A  after 3 s of: one\nNOT  alert   B  it did not fire in: two"


def test_the_sluice_lets_through_what_its_rate_says() -> None:
    """All bytes come, in order, and not faster; without a rate at once."""
    sent = bytes(range(256)) * 16

    async def carried(sluice: Sluice, rate: float | None) -> tuple[bytes, float]:
        sluice.rate = rate
        began = time.monotonic()
        _reader, writer = await asyncio.open_connection("127.0.0.1", sluice.ports[0])
        writer.write(sent)
        writer.write_eof()
        data = await got.get()
        writer.close()
        return data, time.monotonic() - began

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await reader.read(-1))
        writer.close()

    async def main() -> None:
        sluice = Sluice()
        await sluice.start()
        server = await asyncio.start_server(take, "127.0.0.1", sluice.ports[1])
        try:
            assert (await carried(sluice, None))[0] == sent
            data, seconds = await carried(sluice, 8192)
            assert data == sent
            assert seconds > 0.4
        finally:
            await sluice.close()
            server.close()

    got: asyncio.Queue[bytes] = asyncio.Queue()
    asyncio.run(main())


def test_the_holder_holds_the_daemon_and_nobody_else(tmp_path: Path) -> None:
    """A mover's point is answered at once, the daemon's when it is released."""
    holder = Holder(tmp_path / "points")

    async def ask(role: str) -> bytes:
        reader, writer = await asyncio.open_unix_connection(holder.path)
        writer.write(json.dumps({"name": "prepare", "role": role}).encode() + b"\n")
        answer = await reader.readline()
        writer.close()
        return answer

    async def main() -> None:
        await holder.start()
        holder.hold()
        held = asyncio.create_task(ask("daemon"))
        assert await ask("mover") == b"go\n"
        assert not held.done()
        holder.release()
        assert await held == b"go\n"
        await holder.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.25, "s", "250 ms"),
        (2.0, "s", "2 s"),
        (1_500_000.0, "Bps", "1.5 MB/s"),
        (0.25, "ops", "0.25 /s"),
        (30.0, "reqps", "30 /s"),
        (0.5, "percentunit", "50 %"),
        (12.0, "percentunit", "1200 %"),
        (3.0, "short", "3"),
        (0.0, "Bps", "0 B/s"),
    ],
)
def test_values_are_written_in_their_units(value: float, unit: str, words: str) -> None:
    """As Grafana does."""
    assert shown(value, unit) == words


def test_a_legend_has_the_labels_of_its_series() -> None:
    """A label that is not there leaves nothing."""
    assert legend("{{link}} {{direction}}", {"link": "peer", "direction": "rx"}) == "peer rx"
    assert legend("{{other}}", {"link": "peer"}) == ""


class Waves:
    """A Prometheus that answers everything with three series."""

    def over(self, expr: str, start: float, end: float, step: float) -> list[Line]:
        count = int((end - start) / step)
        return [
            Line({"phase": name, "link": name}, [(start + number * step, 0.5 + number % 7) for number in range(count)])
            for name in PHASES[:3]
        ]


def test_boards_are_drawn_light_and_dark(tmp_path: Path) -> None:
    """A PNG of each board in each theme, as wide as a laptop's window, small enough for the docs, in its colours."""
    span = Span("faults", (), 1_700_000_000.0, 1_700_000_120.0)
    files = picture.draw(Waves(), tmp_path, "faulty", span, [Span("a fault", (), span.start + 10, span.start + 30)])  # type: ignore[arg-type]
    assert [file.name for file in files] == [
        f"{board}-faulty-{theme}.png" for board in ("fleet", "node") for theme in ("light", "dark")
    ]
    for file, theme in zip(files, [LIGHT, DARK] * 2, strict=True):
        assert 20_000 < file.stat().st_size < 300_000
        pixels = np.asarray(Image.open(file).convert("RGB"))
        assert pixels.shape[1] == 1440
        assert bytes(pixels[2, 2]).hex() == theme.page[1:]
        found = {bytes(color).hex() for color in np.unique(pixels.reshape(-1, 3), axis=0)}
        assert {color[1:] for color in theme.lines[:3]} <= found


def test_an_edge_of_many_shades_leaves_a_smooth_line_its_colour() -> None:
    """A legend's line has no pixel of its full colour; shades of grey, each more frequent, do not swallow it."""
    shades = np.repeat(np.arange(256, dtype=np.uint8), 300)[:, None].repeat(3, axis=1)
    shades[:, 2] = np.arange(len(shades)) % 4 * 2 + shades[:, 2] // 2
    shades[-40:] = (0x9A, 0x89, 0x25)  # yellow on a dark ground
    reduced = np.asarray(picture._reduced(Image.fromarray(shades.reshape(256, 300, 3))).convert("RGB"))
    assert bytes(reduced.reshape(-1, 3)[-1]).hex() == "9a8925"


def test_thin_lines_keep_their_colours() -> None:
    """Among thousands of colours of smooth edges a line of two hundred points is what it was; the rest comes near."""
    noise = np.random.default_rng(1).integers(0, 256, (200, 200, 3), np.uint8)
    lines = [bytes.fromhex(color[1:]) for color in DARK.lines]
    for number, color in enumerate(lines):
        noise[10 + number] = np.frombuffer(color, np.uint8)
    reduced = np.asarray(picture._reduced(Image.fromarray(noise)).convert("RGB"))
    assert [bytes(reduced[10 + number, 99]) for number in range(len(lines))] == lines
    assert len(np.unique(reduced.reshape(-1, 3), axis=0)) == picture._COLORS
    assert np.abs(reduced.astype(int) - noise).mean() < 30
