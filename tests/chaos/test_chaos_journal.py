"""A journal lets a long list of cases be run in several goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refitd.demo.chaos.journal import Journal


def outcome(name: str, *why: str) -> dict[str, Any]:
    return {"wave": 1, "name": name, "recovery": 1.5, "torn": 0, "lost": 0, "back": 0, "why": list(why)}


def test_what_passed_is_left_out_and_what_failed_is_not(tmp_path: Path) -> None:
    """The last run of a case counts; the file says how many passed, which failed, and at which commit each was run."""
    path = tmp_path / "points.json"
    journal = Journal(path)
    assert journal.passed == set()
    journal.note(outcome("a"), "c1")
    journal.note(outcome("b", "I1: torn"), "c1")
    journal.note(outcome(""), "c1")
    assert Journal(path).passed == {"a"}
    later = Journal(path)
    later.note(outcome("b"), "c2")
    assert Journal(path).passed == {"a", "b"}
    written = json.loads(path.read_text())
    assert (written["passed"], written["failed"]) == (2, [])
    assert [written["runs"][name]["commit"] for name in ("a", "b")] == ["c1", "c2"]


def test_without_a_file_nothing_is_kept() -> None:
    """The default."""
    journal = Journal(None)
    journal.note(outcome("a"), "c1")
    assert (journal.runs, journal.passed) == ({}, set())
