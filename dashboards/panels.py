"""Parts of which the boards are made: panels with one or more queries, rows of them, variables, a whole board."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

SCHEMA = 41  # Grafana 11.6 and later
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24

Json = dict[str, Any]
Row = tuple[str, int, list[Json]]  # title, height of its panels, panels


def panel(kind: str, title: str, unit: str, description: str, *queries: tuple[str, str], **defaults: Any) -> Json:
    """One panel; ``queries`` are (PromQL, legend). `place` gives it a position and a number."""
    targets = [
        {
            "refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend,
            "range": True, "instant": False,
        }
        for index, (expr, legend) in enumerate(queries)
    ]  # fmt: skip
    options: Json = {
        "tooltip": {"mode": "multi", "sort": "desc"},
        "legend": {"displayMode": "list", "placement": "bottom"},
    }
    if kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, **defaults}, "overrides": []},
        "options": options,
    }


def stat(title: str, unit: str, description: str, expr: str, *steps: tuple[str, float | None], **defaults: Any) -> Json:
    """One number; ``steps`` colour it from values on."""
    thresholds = {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in steps]}
    return panel("stat", title, unit, description, (expr, ""), thresholds=thresholds, **defaults)


def lines(title: str, unit: str, description: str, *queries: tuple[str, str], **defaults: Any) -> Json:
    """Values over time."""
    return panel("timeseries", title, unit, description, *queries, **defaults)


def bars(title: str, description: str, expr: str, legend: str) -> Json:
    """Events in each interval of the picture, stacked."""
    look = {"drawStyle": "bars", "fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}}
    return panel("timeseries", title, "short", description, (expr, legend), custom=look, decimals=0)


def place(rows: Sequence[Row]) -> list[Json]:
    """All panels, in rows over the full width, numbered."""
    panels: list[Json] = []
    y = 0
    for title, height, members in rows:
        place_of_row = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place_of_row})
        edges = [WIDTH * index // len(members) for index in range(len(members) + 1)]
        for member, (left, right) in zip(members, itertools.pairwise(edges), strict=True):
            panels.append(member | {"gridPos": {"x": left, "y": y + 1, "w": right - left, "h": height}})
        y += 1 + height
    return [{"id": number, **member} for number, member in enumerate(panels, start=1)]


def choice(name: str, label: str, query: str) -> Json:
    """A variable of which several values, or all, may be chosen."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "A"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def board(uid: str, title: str, description: str, variables: Sequence[Json], rows: Sequence[Row]) -> str:
    """A board as JSON text."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    links = {
        "type": "dashboards", "tags": ["refitd"], "title": "refitd", "asDropdown": False, "keepTime": True,
        "includeVars": True, "targetBlank": False, "icon": "external link", "tooltip": "", "url": "",
    }  # fmt: skip
    return (
        json.dumps(
            {
                "uid": uid,
                "title": title,
                "description": description,
                "tags": ["refitd"],
                "schemaVersion": SCHEMA,
                "version": 1,
                "editable": True,
                "graphTooltip": 1,
                "refresh": "10s",
                "time": {"from": "now-1h", "to": "now"},
                "timezone": "browser",
                "templating": {"list": [source, *variables]},
                "annotations": {"list": []},
                "links": [links],
                "panels": place(rows),
            },
            indent=2,
        )
        + "\n"
    )
