"""`refitd bench plan`: rows with targets, growth, and the plot."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from refitd.bench import main, plan, published
from refitd.bench.plan_cases import GROWTH, find_case
from refitd.bench.plan_plot import growth_plot
from refitd.bench.plan_rows import CASES, PEAK_TARGETS, TARGETS, case_rows, make_row
from refitd.plan import plan_sides

SVG = "{http://www.w3.org/2000/svg}"
ROW_KEYS = {"name", "value", "unit", "baseline", "ratio", "target", "met", "cpu"}


def test_one_preset_gives_rows_of_all_that_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan, programs, loss and memory of a preset, in a process of its own, as rows on stdout and in the file."""
    file = tmp_path / "rows.json"
    assert main(["plan", "--preset", "tiny", "--repeats", "2", "--json", "--out", str(file)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(file.read_text())
    assert [row["name"] for row in document["rows"]] == [
        f"tiny.{what}" for what in ("first_plan", "destination", "destination_again", "lose", "source", "plan", "peak")
    ]
    assert all(set(row) == ROW_KEYS and row["value"] > 0 for row in document["rows"])
    assert (document["ok"], document["repeats"], document["growth"]) == (True, 2, {})


def test_every_target_is_measured() -> None:
    """Each limit belongs to a case that is run, and a row says whether it is met."""
    assert {name for name, _ in TARGETS} == set(CASES)
    assert set(PEAK_TARGETS) <= set(CASES)
    measured = {"seconds": {"plan": [0.3, 0.1, 0.09]}, "cpu": {"plan": [0.2, 0.1, 0.3]}, "peak_bytes": 1 << 30}
    time, peak = case_rows("deepseek-v3-h100", measured)
    assert (time.value, time.target, time.met, time.cpu) == (100.0, 100.0, True, 200.0)
    assert (peak.value, peak.target, peak.met) == (1024.0, None, None)
    assert make_row("x", 1.1, "ms", 1.0).met is False


def test_a_case_that_fails_ends_with_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the process of a case says when it dies is reported, and the status is 1."""
    monkeypatch.setattr(plan, "CASES", ("growth:x",))
    assert main(["plan", "--repeats", "1", "--json"]) == 1
    captured = capsys.readouterr()
    assert "growth:x ended with status 1" in json.loads(captured.out)["reason"]
    assert "invalid literal for int()" in captured.err


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--preset", "x"], ["--preset", "tiny", "--plot", "x.svg"]])
def test_wrong_usage_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that makes no sense ends with status 2."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", *argv])
    assert caught.value.code == 2
    assert argv[-2] in capsys.readouterr().err


def test_row_to_column_is_what_it_says() -> None:
    """256 row shards and 256 column shards of one matrix, in 64 domains: each byte crosses the network once."""
    case = find_case("row_to_column")
    source, destination = case.make()
    assert (len(source.ranks), len(set(source.domains) | set(destination.domains))) == (256, 64)
    for axis, side in enumerate((source, destination)):
        boxes = side.patterns[0].boxes
        assert (boxes[:, 1] - boxes[:, 0]).tolist() == [[32, 8192] if axis == 0 else [8192, 32]] * 256
    report = plan_sides(source, destination, case.topology).report
    assert report["network_bytes"] == report["network_bytes_min"] == 8192 * 8192 * 2


def test_growth_varies_one_thing_each() -> None:
    """Each panel grows in its own quantity only, up to 2,048 ranks a side and 1,024 experts."""
    for what, field in (("tensors", "layers"), ("ranks", "ranks"), ("experts", "experts")):
        others = [tuple(v for k, v in case._asdict().items() if k != field) for case in GROWTH[what]]
        assert len(set(others)) == 1
        sizes = [getattr(case, field) for case in GROWTH[what]]
        assert sizes == sorted(set(sizes))
    source, destination = find_case("growth:16:64:64").make()
    assert (len(source.ranks), len(destination.ranks), len(source.tensors)) == (64, 64, 16 * 9 + 13 * 5 + 13 * 192 + 12)


def test_the_plot_has_a_panel_for_each_quantity() -> None:
    """Well-formed SVG: three panels with a dot for each point, named axes, milliseconds at the dots."""
    points = [{"tensors": n, "ranks": n, "experts": n, "plan_ms": 20.0 * n, "peak_mib": 1.0} for n in (1, 2, 4)]
    root = ET.fromstring(growth_plot(dict.fromkeys(("tensors", "ranks", "experts"), points)))
    assert len(list(root.iter(f"{SVG}circle"))) == 9
    lines = [element.get("points", "").split() for element in root.iter(f"{SVG}polyline")]
    corners = np.array([[float(v) for v in point.split(",")] for point in lines[0]])
    assert np.diff(corners[:, 0]).tolist() == [135, 135]
    assert np.allclose(np.diff(corners[:, 1], 2), 0, atol=0.01)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"20", "40", "80", "10 ms", "100 ms", "tensors (logarithmic)"} <= set(texts)


def test_the_published_document_is_what_its_command_makes(tmp_path: Path) -> None:
    """docs/benchmarks/published.md is up to date (`python -m refitd.bench.published` writes it)."""
    made = tmp_path / "published.md"
    assert published.main(["--out", str(made)]) == 0
    assert published.DOCUMENT.read_text() == made.read_text()
    assert made.read_text().count("not published") == 1
    for case in published.CONFIGURATIONS:
        assert f"| {case.title} |" in made.read_text()
