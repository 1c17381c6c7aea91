"""The figures of every preset's plan as a table: `python -m refitd.bench.preset_figures`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from refitd.layout.presets import PRESETS
from refitd.plan import plan_sides
from refitd.planning.cases import preset_case
from refitd.planning.text import size

DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks" / "presets.md"
_HEADER = """# Plans of the presets

Made by `python -m refitd.bench.preset_figures`. Times are computed from bytes and links, not measured;
docs/planning.md says how, and what the bounds are. Every plan is proven: coverage is exact.

| preset | topology | network bytes | least | of it relayed | egress over bound | ingress over bound | \
modelled, s | bound, s | over bound |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def row(name: str) -> str:
    """The line of one preset."""
    sides, links = preset_case(name)
    report = plan_sides(*sides, links).report
    moved = [size(report[key]) for key in ("network_bytes", "network_bytes_min", "relay_bytes")]
    even = [f"{report[key]:.4f}" for key in ("egress_max_over_bound", "ingress_max_over_bound")]
    times = report["est_seconds"], report["bound_seconds"]
    figures = [*moved, *even, *(f"{seconds:.4f}" for seconds in times), f"{times[0] / times[1]:.3f}"]
    return f"| {' | '.join([f'`{name}`', f'`{links.name}`', *figures])} |\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the document. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m refitd.bench.preset_figures", description="Write presets.md.")
    parser.add_argument(
        "--out", type=Path, default=DOCUMENT, metavar="FILE", help="default: docs/benchmarks/presets.md"
    )
    parser.parse_args(argv).out.write_text(_HEADER + "".join(map(row, PRESETS)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
