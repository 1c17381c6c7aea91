"""``refitd plan``: what a refit between two sides would move, and how long it would take. Nothing is moved.

``main(argv)`` is the whole interface of the command; docs/planning-cli.md describes it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with command line ``argv``; returns the exit status (0 good, 1 failed). Exits with 2 on usage."""
    from refitd.planning.arguments import parse
    from refitd.planning.command import run

    return run(parse(argv))
