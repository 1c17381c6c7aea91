"""A cell of ``refitd bench refit --gpus`` with other constants: tuned.py TRANSPORT LAYOUT SIZE WIDTH REPEATS VARIANT…

A variant is ``module.NAME=VALUE`` (below ``refitd``), several with commas, or ``usual``; it holds in all processes.
Prints one JSON: for each variant milliseconds from publish to commit, of the movers, of all rounds, and by step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import parties
import plants

SECONDS = 60.0


def one(cell):
    """In a process of its own, which has the constants already."""
    transport, layout, size, width, repeats = cell
    from refitd.bench.cards import layouts, measure

    for module, name, value in plants.constants():
        assert vars(sys.modules[module])[name] == value, f"{module}.{name} was not set"
    scene = next(scene for scene in layouts.SCENES if scene.name == layout)
    wanted = measure.Cell(scene, transport, size, width)
    found = measure.measured(wanted, int(repeats))
    rows = {row.name.removeprefix(f"{wanted.name}_"): round(row.value, 3) for row in measure.rows_of(wanted, found, {})}
    print(json.dumps({
        **{name: rows[name] for name in ("publish_to_commit", "movers", "publish", "prepare", "transfer", "commit")},
        "rounds": [round(each.total * 1e3, 2) for each in found.rounds],
        "movers_rounds": [round(each.moved * 1e3, 2) for each in found.rounds],
        "bucket_bytes": wanted.bucket_bytes(), "transports": found.transports, "wire": found.wire,
    }))  # fmt: skip


def main():
    *cell, first = sys.argv[1:7]
    variants, found = [first, *sys.argv[7:]], {}
    parties.plant_everywhere()
    for variant in variants:
        os.environ["REFITD_PLANT_CONSTANTS"] = "" if variant == "usual" else variant
        command = [sys.executable, __file__, "--one", *cell]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            found[variant] = {"failed": f"no end within {SECONDS:g} s"}
            continue
        try:
            found[variant] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            found[variant] = {"failed": done.stderr[-1500:]}
        told = {name: found[variant].get(name) for name in ("publish_to_commit", "movers", "rounds", "failed")}
        print(f"{variant}: {told}", file=sys.stderr, flush=True)
    print(json.dumps({"cell": cell, "variants": found}))
    return 1 if any("failed" in each for each in found.values()) else 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        if parties.FAKE:
            import fake_bench  # noqa: F401
        one(sys.argv[2:])
    else:
        sys.exit(main())
