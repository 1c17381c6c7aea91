"""A doctor's findings for people: a line each, with what was expected and what to do where something is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from refitd.operate.doctor.check import FAIL, OK, SKIP, WARN, Check

_STYLES = {OK: "green", WARN: "yellow", FAIL: "red", SKIP: "dim"}


def print_checks(checks: Sequence[Check], stream: TextIO) -> None:
    """Write them to ``stream``, with colour on a terminal."""
    if not stream.isatty():
        stream.writelines(f"{line}\n" for _result, line in lines(checks))
        return
    from rich.console import Console

    console = Console(file=stream, highlight=False, soft_wrap=True)
    for result, line in lines(checks):
        console.print(line, markup=False, style=_STYLES[result])


def lines(checks: Sequence[Check]) -> Iterator[tuple[str, str]]:
    """(result, line) of each check, columns aligned; the last line counts them."""
    width = max(len(check.name) for check in checks)
    margin = " " * (width + 8)
    for check in checks:
        yield check.result, f"{check.result:4}  {check.name:{width}}  {check.found}"
        if check.remedy:
            yield check.result, f"{margin}expected: {check.expected}"
            yield check.result, f"{margin}remedy: {check.remedy}"
    counts = {result: sum(check.result == result for check in checks) for result in (OK, WARN, FAIL, SKIP)}
    yield OK, ", ".join(f"{count} {result}" for result, count in counts.items() if count)
