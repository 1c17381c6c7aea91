"""``python -m refitd.bench.published``: docs/benchmarks/published.md, our modelled times beside published ones.

Nothing is measured here. The document follows from presets, topologies and the planner's cost model alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from refitd.plan import SidePlan, Topology, plan_sides
from refitd.planning.cases import preset_case
from refitd.planning.text import size

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "published.md"


class Published(NamedTuple):
    """A configuration with published times in seconds, and the preset that stands for it."""

    title: str
    preset: str
    layout: str
    gather: float | None
    reshard: float


CONFIGURATIONS = (
    Published("H100, Qwen3-235B-A22B", "qwen3-235b-h100", "TP4 PP8 EP16 -> TP8 DP16", 6.4, 1.9),
    Published("H100, DeepSeek-V3", "deepseek-v3-h100", "PP16 EP16 -> TP32 DP8", 14.9, 2.6),
    Published("GB200, DeepSeek-V3", "deepseek-v3-gb200", "PP16 EP16 -> TP32 DP8", 6.1, 2.3),
    Published("GB200, Nemotron Ultra v3", "nemotron-ultra-v3-gb200", "TP8 PP2 EP32 -> TP8 DP8", 8.2, 2.3),
    Published(
        "GB200, 2.4 T micro-benchmark", "qwen3.8-2.4t-gb200", "TP4 PP16 EP64 -> 16 x (DP16 TP4, EP64)", None, 4.3
    ),
)

_HEADER = """# Published refit times, and what the plans here would take

Made by `python -m refitd.bench.published`. **Every time in the columns "modelled" and "bound" is computed, not
measured.** The columns "published" are figures that NVIDIA gave for refits in NeMo RL: by gather-then-broadcast and by
its NCCL reshard. They are times of a framework at work and hold more than the transfer. So the two kinds of columns do
not compare like two measurements: they say how much of a published time the bytes and the links alone explain.
"""

_TIMES = (
    "configuration", "gather-then-broadcast, published", "same, modelled", "reshard, published", "refitd, modelled",
    "bound", "published reshard over bound", "modelled over bound",
)  # fmt: skip
_BYTES = (
    "configuration", "layout", "ranks", "gather-then-broadcast", "refitd", "least", "of it relayed",
    "busiest NIC sends", "busiest NIC receives",
)  # fmt: skip

_ASSUMPTIONS = """## Assumptions

- **Layouts** are those of the presets (docs/presets.md). The parallelism is the published one; stages, hosts and the
  order of ranks were chosen here. Weights are bfloat16 on both sides, without multi-token prediction.
- For the **2.4 T micro-benchmark** we know a time and a size, no layout. The preset `qwen3.8-2.4t-gb200` stands for it:
  a model of that size in a layout of our own. That row compares sizes, not configurations, and we know no time of
  gather-then-broadcast for it.
- Where ranges were published, the table has the one figure that is quoted most.
- **Links**, one direction, both directions usable at the same time, no contention in switches:
{links}
- **Bound**: the largest of three quotients that no plan can beat on these links: bytes that the busiest NIC must
  receive; bytes that the busiest NIC must send, even if engines pass on what they have; bytes that must move inside a
  domain (docs/planning.md).
- **refitd, modelled**: the slowest rank's bytes and messages on its busiest link, and the last bucket's way through
  relays. Packing, casting, checksums, control messages and the engine's own work cost nothing in it.
- **Gather-then-broadcast, modelled**: one trainer domain collects the whole model, then every engine domain gets all of
  it in one pipelined broadcast over all NICs of a domain, without a pause. Real ones gather tensor by tensor, often
  through one rank: this is the best that the scheme could do, not what a framework takes. Its bytes are those that
  cross domains. Where all trainers are in one domain (Nemotron Ultra v3) there is nothing to gather, and every engine
  domain needs the whole model, so that both schemes have the same bound.
- NICs run at line rate. At 85 % of it, everything modelled takes 1.18 times as long.
"""


def document() -> str:
    """The whole text, from plans made now."""
    plans: dict[str, SidePlan] = {}
    topologies: dict[str, Topology] = {}
    for case in CONFIGURATIONS:
        sides, links = preset_case(case.preset)
        plans[case.preset], topologies[links.name] = plan_sides(*sides, links), links
    times = _table("Times, seconds", _TIMES, 1, [_times(case, plans[case.preset]) for case in CONFIGURATIONS])
    moved = _table("Bytes over the network", _BYTES, 2, [_bytes(case, plans[case.preset]) for case in CONFIGURATIONS])
    links_text = "\n".join(_links(links) for links in topologies.values())
    return "\n".join([_HEADER, times, moved, _ASSUMPTIONS.format(links=links_text)])


def _table(title: str, columns: Sequence[str], texts: int, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of which the first ``texts`` columns are text and the others numbers."""
    rule = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return "\n".join([f"## {title}\n", *(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)), ""])


def _times(case: Published, plan: SidePlan) -> list[str]:
    report = plan.report
    bound, ours = report["bound_seconds"], report["est_seconds"]
    gather = "not published" if case.gather is None else f"{case.gather:.1f}"
    cells = [case.title, gather, f"{report['gather_broadcast_est_seconds']:.2f}", f"{case.reshard:.1f}"]
    return [*cells, f"{ours:.2f}", f"{bound:.2f}", f"{case.reshard / bound:.1f}", f"{ours / bound:.2f}"]


def _bytes(case: Published, plan: SidePlan) -> list[str]:
    report, loads = plan.report, plan.loads
    cells = [
        case.title,
        f"{case.layout} (`{case.preset}`)",
        str(report["ranks"]),
        size(report["gather_broadcast_bytes"]),
    ]
    cells += [size(report[key]) for key in ("network_bytes", "network_bytes_min", "relay_bytes")]
    return [*cells, size(int(loads.egress.max())), size(int(loads.ingress.max()))]


def _links(links: Topology) -> str:
    wire = f"{links.entry_bandwidth / 1e9:g} GB/s of NIC a GPU, {links.network.latency / 1e3:g} us a message"
    near = f"{links.peer.bandwidth / 1e9:g} GB/s inside a node, {links.fabric.bandwidth / 1e9:g} inside a domain"
    hosts = f"{links.node} GPUs a node, {links.usable} of a domain's {links.domain} in use"
    return f"  - `{links.name}`: {wire}; {near}; {hosts}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the document. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m refitd.bench.published", description="Write published.md.")
    parser.add_argument(
        "--out", type=Path, default=DOCUMENT, metavar="FILE", help="default: docs/benchmarks/published.md"
    )
    parser.parse_args(argv).out.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
