"""A real Prometheus scrapes a busy daemon: every panel of both boards and every recording rule has data."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from refitd.failpoints import PHASES
from refitd.telemetry.http import MetricsServer
from refitd.telemetry.metrics import CAUSES, LINKS, METHODS, PLANS, Metrics
from refitd.telemetry.scrape import busy_node

FOLDER = pathlib.Path(__file__).parents[2] / "dashboards"
BOARDS = ["fleet.json", "node.json"]
SECONDS = 40.0
CONFIG = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["%s"]
scrape_configs:
  - job_name: refitd
    static_configs: [{targets: ["%s:%d"]}]
"""


class Prometheus:
    """A server with our rules, asked over its API."""

    def __init__(self, address: str) -> None:
        self._address = address

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        url = f"http://{self._address}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success"
        found: list[dict[str, Any]] = body["data"]["result"]
        return found

    def numbers(self, expr: str) -> list[float]:
        """Values that are numbers: a quantile of nothing is none."""
        values = [float(sample["value"][1]) for sample in self.query(expr)]
        return [value for value in values if value == value]


def work(metrics: Metrics) -> None:
    """One more of everything that is counted."""
    for phase in PHASES:
        metrics.phase(phase, 0.3)
    for link in LINKS:
        metrics.transferred(link, 1 << 20, 1 << 20, rank="engine/r0/0")
    for cause in CAUSES:
        metrics.lane_turned(cause)
    for method in METHODS:
        metrics.repaired(method, 0.2)
    for plan in PLANS:
        metrics.planned(plan, 0.05)
    metrics.refit("ok")
    metrics.hook_error("refused")
    metrics.mover_restarted()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, as soon as it has scraped a daemon that works for a few seconds."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.fail("no prometheus on PATH: apt-get install prometheus")
    folder, metrics = tmp_path_factory.mktemp("prometheus"), busy_node()
    server = MetricsServer("127.0.0.1", 0, metrics.registry)
    (folder / "prometheus.yml").write_text(CONFIG % (FOLDER / "rules" / "refitd.yml", *server.address))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}", "--log.level=error",
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asked = Prometheus(address)
        _await_samples(asked, metrics)
        yield asked
    finally:
        child.terminate()
        child.wait(20)
        server.close()


def _await_samples(prometheus: Prometheus, metrics: Metrics) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        work(metrics)
        time.sleep(0.5)
        try:
            if prometheus.numbers("count_over_time(link_direction:refitd_transfer_bytes:rate5m[1m]) > 3"):
                return
        except OSError:
            continue  # it does not listen yet
    pytest.fail(f"Prometheus has no data after {SECONDS} s")


def test_every_panel_and_every_record_has_data(prometheus: Prometheus) -> None:
    """Each query of each panel, with Grafana's variables filled in, and each recording rule gives a number."""
    boards = [json.loads((FOLDER / board).read_text()) for board in BOARDS]
    exprs = [t["expr"] for board in boards for panel in board["panels"] for t in panel.get("targets", ())]
    exprs += re.findall(r"record: (\S+)", (FOLDER / "rules" / "refitd.yml").read_text())
    filled = [e.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$refit_job", ".*") for e in exprs]
    assert len(filled) > 30
    assert [expr for expr in filled if not prometheus.numbers(expr)] == []


def test_the_targets_own_labels_are_not_ours(prometheus: Prometheus) -> None:
    """Prometheus renames a label of ours that it uses itself; none has been."""
    for name in ("refitd_replica_step", "refitd_transfer_bytes_total", "refitd_members"):
        labels = {label for sample in prometheus.query(name) for label in sample["metric"]}
        assert {label for label in labels if label.startswith("exported_")} == set()
        assert {"instance", "job"} <= labels
