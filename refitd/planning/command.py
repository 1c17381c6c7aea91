"""Do what the command line of ``refitd plan`` asks for."""

from __future__ import annotations

import argparse
import json
from typing import Any

from refitd.errors import InputError, RefitdError
from refitd.plan import Topology
from refitd.planning.arguments import Lost
from refitd.planning.cases import Sides, find_topology, preset_case
from refitd.planning.outcome import Outcome, plan_case
from refitd.planning.picture import heat_map
from refitd.planning.side_file import load_side
from refitd.planning.text import links_text, table
from refitd.stdout import complain, say


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; the exit status."""
    try:
        sides, links = _case(arguments)
        lost: Lost | None = arguments.lose
        outcome = plan_case(*sides, links, lost, arguments.at)
        document = outcome.report() | (_links(outcome) if arguments.links else {})
        if arguments.picture is not None:
            _draw(arguments, outcome)
    except RefitdError as error:
        complain("refitd plan", error, arguments.json)
        return 1
    say(json.dumps(document) if arguments.json else _text(arguments, outcome))
    return 0


def _case(arguments: argparse.Namespace) -> tuple[Sides, Topology]:
    if arguments.preset is not None:
        return preset_case(arguments.preset, arguments.topology)
    links = find_topology(arguments.topology)
    return (load_side(arguments.src), load_side(arguments.dst)), links


def title(arguments: argparse.Namespace) -> str:
    """What was planned, in a few words."""
    name = arguments.preset or f"{arguments.src.stem} to {arguments.dst.stem}"
    return f"{name}, {arguments.topology}" if arguments.topology else str(name)


def _links(outcome: Outcome) -> dict[str, Any]:
    domains, matrix = outcome.plan.links()
    return {"domains": list(domains), "links": matrix.tolist()}


def _draw(arguments: argparse.Namespace, outcome: Outcome) -> None:
    picture = heat_map(*outcome.plan.links(), title(arguments))
    try:
        arguments.picture.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise InputError("--picture", "a file that can be written", f"{arguments.picture}: {error.strerror}") from None


def _text(arguments: argparse.Namespace, outcome: Outcome) -> str:
    parts = [table(title(arguments), outcome)]
    if arguments.links:
        parts.append(links_text(*outcome.plan.links()))
    return "\n\n".join(parts)
