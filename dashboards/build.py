"""Writes the Grafana boards over refitd's metrics: dashboards/fleet.json and dashboards/node.json.

``python dashboards/build.py`` writes them; with ``--check`` it only says whether the committed files are up to date.
"""

from __future__ import annotations

import pathlib
import sys

import fleet
import node

FOLDER = pathlib.Path(__file__).parent
BOARDS = {"fleet.json": fleet.text, "node.json": node.text}


def stale() -> list[str]:
    """Files that are not what the code makes."""
    files = {name: FOLDER / name for name in BOARDS}
    return [name for name, file in files.items() if not file.exists() or file.read_text() != BOARDS[name]()]


def main(arguments: list[str]) -> int:
    """Write the boards, or with --check compare them; 1 when one is stale."""
    if arguments == ["--check"]:
        for name in (found := stale()):
            sys.stderr.write(f"{name} is stale: run python dashboards/build.py\n")
        return int(bool(found))
    for name, text in BOARDS.items():
        (FOLDER / name).write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
