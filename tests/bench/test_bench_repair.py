"""``refitd bench repair`` over the fake library: rows, what is refused, and what a hanging method costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refitd.bench import repair
from refitd.bench.repair import Bench, main
from refitd.mover.nccl.repair import FRESH


def test_every_method_is_timed_with_its_first_transfer(tmp_path: Path) -> None:
    """Planned and after a kill; on one host a death is no error, so that even shrink goes well after it."""
    out = tmp_path / "repair.json"
    assert main(["--device", "cpu", "--repeats", "1", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    names = {row["name"] for row in document["rows"]}
    for label in ("shrink_planned", "grow_planned", "init_planned", "init_killed", "shrink_killed"):
        assert {f"repair_cpu_{label}", f"repair_cpu_{label}_first_transfer"} <= names
    assert (document["refused"], document["library"]) == ({}, "2.30.7")


def test_what_nccl_refuses_is_recorded_and_a_fresh_communicator_is_made(tmp_path: Path) -> None:
    """A peer of another host has died: shrink repeats the stored error."""
    (tmp_path / "faults.json").write_text(json.dumps({"network": True}))
    found = Bench("cpu", 1, tmp_path).run(1)
    assert found.refused == {"shrink_killed": "shrink: RemoteError"}
    names = {row.name for row in found.rows}
    assert "repair_cpu_shrink_killed_then_init" in names
    assert "repair_cpu_shrink_killed" not in names


def test_a_method_that_hangs_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every method, and the next is a fresh communicator."""
    monkeypatch.setattr(repair, "DEADLINE_SECONDS", 1.0)
    (tmp_path / "faults.json").write_text(json.dumps({"hang": ["shrink", "grow"]}))
    found = Bench("cpu", 1, tmp_path).run(1)
    assert found.refused["shrink_planned"] == "shrink: not done within 1 s"
    assert found.refused["grow_planned"] == "grow: not done within 1 s"
    assert {"repair_cpu_shrink_planned_then_init", "repair_cpu_grow_planned_then_init"} <= {r.name for r in found.rows}


def test_two_cards_have_a_rank_each(tmp_path: Path) -> None:
    """One that is left over is a communicator of one rank, which still makes its first transfer, with itself."""
    found = Bench("cpu", 2, tmp_path).run(1)
    assert (found.ranks, found.refused) == (2, {})
    assert "repair_cpu_shrink_killed_first_transfer" in {row.name for row in found.rows}


def test_a_rank_whose_neighbours_live_waits_for_the_news_as_the_others_do(tmp_path: Path) -> None:
    """With four ranks in a ring, one neither sends to the victim nor hears from it: its transfer just ends."""
    found = Bench("cpu", 4, tmp_path)
    found._after_kill(FRESH)
    assert (found.ranks, found.refused) == (4, {})
    assert "repair_cpu_init_killed_first_transfer" in {row.name for row in found.rows}
