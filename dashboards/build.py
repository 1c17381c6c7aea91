"""Writes dashboards/refit.json: the Grafana board over refitd's metrics, from "is it healthy" down to "why".

``python dashboards/build.py`` writes it; with ``--check`` it only says whether the committed file is up to date.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

BOARD = pathlib.Path(__file__).with_name("refit.json")
SCHEMA = 41  # Grafana 11.6 and later
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
CHOSEN = '{instance=~"$instance"}'

Json = dict[str, Any]


def rate(metric: str, by: str, where: str = "") -> str:
    """Events a second, summed over the chosen nodes."""
    chosen = f'{{instance=~"$instance"{where}}}'
    return f"sum by ({by}) (rate({metric}{chosen}[$__rate_interval]))"


def increase(metric: str, by: str) -> str:
    """Events in each interval of the picture."""
    return f"sum by ({by}) (increase({metric}{CHOSEN}[$__rate_interval]))"


def panel(kind: str, title: str, unit: str, description: str, expr: str, legend: str, **defaults: Any) -> Json:
    """One panel with one query; build() gives it a place and a number."""
    target = {"refId": "A", "datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "range": True}
    options: Json = {
        "tooltip": {"mode": "multi", "sort": "desc"},
        "legend": {"displayMode": "list", "placement": "bottom"},
    }
    if kind == "stat":
        target |= {"range": False, "instant": True}
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "none"}
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": [target],
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, **defaults}, "overrides": []},
        "options": options,
    }


def limits(*steps: tuple[str, float | None]) -> Json:
    """Colours from values on."""
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in steps]}


def bars() -> Json:
    """Events are bars, stacked."""
    return {"drawStyle": "bars", "fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}}


def rows() -> list[tuple[str, int, list[Json]]]:
    """Each row: its title, the height of its panels, its panels."""
    return [
        ("Is it healthy?", 4, _health()),
        ("Are the weights fresh?", 8, _fresh()),
        ("Where does the time go?", 8, _time()),
        ("Why?", 8, _why()),
    ]


def _health() -> list[Json]:
    good = limits(("red", None), ("green", 1))
    one = limits(("red", None), ("green", 1), ("red", 2))
    chosen, all_nodes = CHOSEN, "refitd_is_leader"
    return [
        panel(
            "stat",
            "Daemons",
            "short",
            "Daemons that answered the last scrape.",
            f"count(refitd_build_info{chosen})",
            "",
            thresholds=good,
        ),
        panel(
            "stat",
            "Store",
            "bool_yes_no",
            "Whether all daemons reach the store. Without it transfers under way finish and nothing new is decided.",
            f"min(refitd_store_up{chosen})",
            "",
            thresholds=good,
        ),
        panel(
            "stat",
            "Leaders",
            "short",
            "Nodes that say they lead. Exactly one, on all nodes together.",
            f"sum({all_nodes})",
            "",
            thresholds=one,
        ),
        panel(
            "stat",
            "Clients",
            "short",
            "Trainer and engine ranks connected.",
            f"sum(refitd_hook_connections{chosen})",
            "",
        ),
    ]


def _fresh() -> list[Json]:
    newest = f"scalar(max(refitd_replica_step{CHOSEN}))"
    return [
        panel(
            "timeseries",
            "Step served",
            "short",
            "Training step that each replica serves.",
            f"refitd_replica_step{CHOSEN}",
            "{{replica}}",
        ),
        panel(
            "timeseries",
            "Steps behind",
            "short",
            "How far each replica is behind the newest step that any replica serves.",
            f"{newest} - refitd_replica_step{CHOSEN}",
            "{{replica}}",
        ),
        panel(
            "timeseries",
            "Refits",
            "ops",
            "Refits that ended, by outcome.",
            rate("refitd_refits_total", "outcome"),
            "{{outcome}}",
        ),
    ]


def _time() -> list[Json]:
    buckets = rate("refitd_refit_duration_seconds_bucket", "le, phase", ', outcome="ok"')
    moved = rate("refitd_transfer_bytes_total", "link, direction")
    return [
        panel(
            "timeseries",
            "Time in each phase, 95th percentile",
            "s",
            "How long good refits stay in a phase. A line at 60 s means 60 s or more.",
            f"histogram_quantile(0.95, {buckets})",
            "{{phase}}",
        ),
        panel(
            "timeseries",
            "Weights moved",
            "Bps",
            "Payload a second, by link and direction.",
            moved,
            "{{link}} {{direction}}",
        ),
    ]


def _why() -> list[Json]:
    events = {"custom": bars(), "decimals": 0}
    return [
        panel(
            "timeseries",
            "Lane turns",
            "short",
            "Lanes that got other members or sources, by cause.",
            increase("refitd_lane_turns_total", "cause"),
            "{{cause}}",
            **events,
        ),
        panel(
            "timeseries",
            "Mover restarts",
            "short",
            "Movers that died or hung and were replaced, by node.",
            increase("refitd_mover_restarts_total", "instance"),
            "{{instance}}",
            **events,
        ),
        panel(
            "timeseries",
            "Hook errors",
            "short",
            "Error answers to trainers and engines, by code.",
            increase("refitd_hook_errors_total", "code"),
            "{{code}}",
            **events,
        ),
    ]


def place() -> list[Json]:
    """All panels, in rows over the full width, numbered."""
    panels: list[Json] = []
    y = 0
    for title, height, members in rows():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        width = WIDTH // len(members)
        for index, member in enumerate(members):
            panels.append(member | {"gridPos": {"x": index * width, "y": y + 1, "w": width, "h": height}})
        y += 1 + height
    return [{"id": number, **member} for number, member in enumerate(panels, start=1)]


def variables() -> list[Json]:
    """The data source and the nodes to look at."""
    query = "label_values(refitd_build_info, instance)"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Node",
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": "A"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def build() -> str:
    """The board as JSON text."""
    board = {
        "uid": "refitd-refit",
        "title": "refitd: refits",
        "description": "Weights from training to generation: health, freshness, time, causes.",
        "tags": ["refitd"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": place(),
    }
    return json.dumps(board, indent=2) + "\n"


def main(arguments: list[str]) -> int:
    """Write the board, or with --check compare it; 1 when it is stale."""
    text = build()
    if arguments == ["--check"]:
        stale = not BOARD.exists() or BOARD.read_text() != text
        if stale:
            sys.stderr.write(f"{BOARD.name} is stale: run python dashboards/build.py\n")
        return int(stale)
    BOARD.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
