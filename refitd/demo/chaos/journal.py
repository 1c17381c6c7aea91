"""What of a list of cases has been run, at which commit, and how it went: a JSON file that a later run goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Journal:
    """The file at ``path``, written anew after every case; nothing is kept where that is None."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.runs: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self.runs = json.loads(path.read_text())["runs"]

    @property
    def passed(self) -> set[str]:
        """Names of the cases that ended well when they were run last."""
        return {name for name, run in self.runs.items() if not run["why"]}

    def note(self, outcome: dict[str, Any], commit: str) -> None:
        """Write down the outcome of a case that has a name."""
        if self._path is None or not outcome["name"]:
            return
        kept = {key: outcome[key] for key in ("recovery", "torn", "lost", "back", "why")}
        self.runs[outcome["name"]] = {"commit": commit, **kept}
        failed = sorted(name for name, run in self.runs.items() if run["why"])
        whole = {"passed": len(self.runs) - len(failed), "failed": failed, "runs": dict(sorted(self.runs.items()))}
        self._path.write_text(json.dumps(whole, indent=1) + "\n")
