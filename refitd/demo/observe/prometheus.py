"""A Prometheus of our own, on a free port of loopback with its data in a folder, and its API."""

from __future__ import annotations

import json
import math
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from refitd.errors import ConfigError, StoreUnavailable
from refitd.store._child import Child
from refitd.store.spawn import free_port

START_SECONDS = 30.0
_ASK_SECONDS = 10.0
_CONFIG = """\
global: {{scrape_interval: {scrape}s, scrape_timeout: {scrape}s, evaluation_interval: 1s}}
rule_files: ["{folder}/rules.yml"]
scrape_configs:
  - job_name: refitd
    file_sd_configs: [{{files: ["{folder}/targets.json"], refresh_interval: 1s}}]
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One series over time: its labels, and (seconds since the epoch, value) where it has a number."""

    labels: Mapping[str, str]
    points: list[tuple[float, float]]


class Prometheus:
    """Runs from its making until `close`; a context manager. Raises ConfigError where the program is not there."""

    def __init__(self, folder: Path, rules: str, targets: Mapping[str, str], scrape: int) -> None:
        """``targets``: ``host:port`` by the name that becomes the label ``instance``; ``scrape``: seconds."""
        program = shutil.which("prometheus")
        if program is None:
            raise ConfigError("prometheus", "a program on PATH (apt-get install prometheus)", "none")
        self._folder = folder
        (folder / "rules.yml").write_text(rules)
        (folder / "prometheus.yml").write_text(_CONFIG.format(folder=folder, scrape=scrape))
        self.scrape_these(targets)
        self.address = f"127.0.0.1:{free_port()}"
        command = [
            program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self.address}", "--log.level=warn",
        ]  # fmt: skip
        self._child = Child(command, folder / "prometheus.log")

    def scrape_these(self, targets: Mapping[str, str]) -> None:
        """Scrape these targets from now on, and no others."""
        groups = [{"targets": [address], "labels": {"instance": name}} for name, address in targets.items()]
        new = self._folder / "targets.new"
        new.write_text(json.dumps(groups))
        new.rename(self._folder / "targets.json")  # it never reads half a file

    def wait_ready(self) -> None:
        """Return when it answers. Raises StoreUnavailable with the end of its log."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._child.running:
            try:
                self.query("vector(1)")
            except OSError:
                time.sleep(0.1)
            else:
                return
        log = (self._folder / "prometheus.log").read_text()[-2000:]
        raise StoreUnavailable(f"Prometheus at {self.address} does not answer: {log}")

    def query(self, expr: str) -> list[Line]:
        """What an expression is now; only numbers."""
        return _lines(self._get("query", query=expr), "value")

    def over(self, expr: str, start: float, end: float, step: float) -> list[Line]:
        """What it was every ``step`` seconds from ``start`` to ``end`` (since the epoch); only numbers."""
        found = self._get("query_range", query=expr, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:g}")
        return _lines(found, "values")

    def firing(self, start: float, end: float) -> dict[str, float]:
        """Alerts that fired between two times, with the first time that each was seen to."""
        lines = self.over('ALERTS{alertstate="firing"}', start, end, 1.0)
        found: dict[str, float] = {}
        for line in lines:
            name = line.labels["alertname"]
            found[name] = min(found.get(name, math.inf), line.points[0][0])
        return found

    def _get(self, what: str, **parameters: str) -> list[dict[str, Any]]:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_ASK_SECONDS) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise  # not ready yet
            raise ValueError(f"{parameters['query']}: {error.read().decode()}") from None
        result: list[dict[str, Any]] = body["data"]["result"]
        return result

    def close(self) -> None:
        """End it; its folder stays."""
        self._child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _lines(result: list[dict[str, Any]], key: str) -> list[Line]:
    lines = []
    for series in result:
        raw = [series[key]] if key == "value" else series[key]
        points = [(float(at), float(value)) for at, value in raw]
        points = [point for point in points if math.isfinite(point[1])]
        if points:
            lines.append(Line(series["metric"], points))
    return lines
