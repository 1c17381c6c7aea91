"""The command line of ``refitd plan``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from refitd.layout.presets import PRESETS

_LOST = re.compile(r"(src|dst):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")


class Lost(NamedTuple):
    """Ranks that are lost: numbers within ``side`` (src or dst), ascending."""

    side: str
    numbers: tuple[int, ...]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """``lose`` is a `Lost` or None. Exits with status 2 where the command line makes no sense."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.preset is not None and arguments.preset not in PRESETS:
        parser.error(f"--preset: expected one of {', '.join(PRESETS)}, got {arguments.preset}")
    if (arguments.preset is None) == (arguments.src is None and arguments.dst is None):
        parser.error("either --preset, or --src and --dst")
    if arguments.preset is None and None in (arguments.src, arguments.dst, arguments.topology):
        parser.error("--src, --dst and --topology belong together")
    if arguments.at is not None and arguments.lose is None:
        parser.error("--at: needs --lose")
    arguments.at = 0.5 if arguments.at is None else arguments.at
    return arguments


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="refitd plan", description="Plan a refit and say what it would take.")
    parser.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--src", type=Path, metavar="FILE", help="side file of the trainers")
    parser.add_argument("--dst", type=Path, metavar="FILE", help="side file of the engines")
    parser.add_argument("--topology", metavar="NAME|FILE", help="h100-nvl8, gb200-nvl72, h200-1host or a topology file")
    parser.add_argument("--lose", type=_lost, metavar="src:0-7|dst:0-7", help="ranks that are lost on the way")
    parser.add_argument("--at", type=_part, metavar="PART", help="when they are lost, 0 to 1 (default: 0.5)")
    parser.add_argument("--links", action="store_true", help="also bytes from every domain to every domain")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the traffic between domains")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    return parser


def _lost(text: str) -> Lost:
    found = _LOST.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected src: or dst: and numbers like 0-7 or 0-7,12, got {text}")
    numbers: set[int] = set()
    for part in found[2].split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low:
            raise argparse.ArgumentTypeError(f"expected the lower number first, got {part}")
        if high - low > 1 << 20:
            raise argparse.ArgumentTypeError(f"expected at most {1 << 20} ranks, got {part}")
        numbers.update(range(low, high + 1))
    return Lost(found[1], tuple(sorted(numbers)))


def _part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text}") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text}")
    return value
