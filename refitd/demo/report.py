"""What the demo prints: progress while it runs (rich on a terminal, plain lines elsewhere) and the result."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field

from rich.console import Console


@dataclass
class Result:
    """The outcome, with the keys that scripts rely on; `reasons` says why `ok` is false."""

    ok: bool = False
    refits: int = 0
    bit_exact: bool = False
    torn: int = 0
    replicas_committed: int = 0
    recovered: bool | None = None
    recover_seconds: float | None = None
    refit_seconds: list[float] = field(default_factory=list)
    network_bytes: int = 0
    network_bytes_min: int = 0
    victim: str | None = None
    caught_up_seconds: float | None = None
    reasons: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Progress:
    """Lines about what happens, to stderr with --json, so that stdout ends with the object alone."""

    def __init__(self, as_json: bool) -> None:
        self._console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False, soft_wrap=True)
        self._began = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """One line, with the seconds since the start."""
        stamp = f"{time.monotonic() - self._began:6.1f}s"
        if self._console.is_terminal:
            self._console.print(f"[dim]{stamp}[/dim]  ", end="")
            self._console.print(text, style=style or None, markup=False)
        else:
            self._console.print(f"{stamp}  {text}", markup=False)

    def block(self, title: str, text: str) -> None:
        """A titled piece of a log."""
        self.say(f"--- {title}", "bold")
        self._console.print(text, markup=False)

    def finish(self, result: Result) -> None:
        """The last words: why it failed, or how well it went."""
        for reason in result.reasons:
            self.say(f"failed: {reason}", "bold red")
        if result.ok:
            median = sorted(result.refit_seconds)[len(result.refit_seconds) // 2]
            moved, least = result.network_bytes / 1e6, result.network_bytes_min / 1e6
            self.say(
                f"{result.refits} refits, every weight bit for bit; median publish to commit {median * 1000:.0f} ms; "
                f"{moved:.1f} MB over the network (least possible {least:.1f} MB)",
                "bold green",
            )
