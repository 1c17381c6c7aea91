"""One finding: how it went, what was expected, what was found, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
_GRAVITY = (SKIP, OK, WARN, FAIL)


@dataclass(frozen=True, slots=True)
class Check:
    """``result``: ok, warn (refits work, less well), fail (they do not), skip (nothing to judge here).

    ``remedy`` is empty where nothing is wrong.
    """

    name: str
    result: str
    expected: str
    found: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return self.result != FAIL

    def to_json(self) -> dict[str, Any]:
        """The row of a script."""
        return {
            "name": self.name, "ok": self.ok, "result": self.result, "expected": self.expected, "found": self.found,
            "detail": f"{self.found}; expected {self.expected}", "remedy": self.remedy,
        }  # fmt: skip


def good(name: str, expected: str, found: str) -> Check:
    return Check(name, OK, expected, found)


def skip(name: str, expected: str, found: str) -> Check:
    return Check(name, SKIP, expected, found)


def warn(name: str, expected: str, found: str, remedy: str) -> Check:
    return Check(name, WARN, expected, found, remedy)


def fail(name: str, expected: str, found: str, remedy: str) -> Check:
    return Check(name, FAIL, expected, found, remedy)


def worst(checks: list[Check]) -> str:
    """The gravest result; ok of nothing."""
    return max((check.result for check in checks), key=_GRAVITY.index, default=OK)
