"""How a log line looks."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from refitd.telemetry import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging as it was before."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_json_object_a_line() -> None:
    """Off a terminal a line is a JSON object with the bound keys, those that are None left out."""
    stream = io.StringIO()
    logs.setup(stream=stream)
    log = logs.bind(logs.get_logger("refitd.test"), job="grpo", node="n0", lane="r1", publication=(2, 41), attempt=3)
    log.info("verified", bytes=7)
    line = json.loads(stream.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "verified",
        "level": "info",
        "logger": "refitd.test",
        "job": "grpo",
        "node": "n0",
        "lane": "r1",
        "publication": "2.41",
        "attempt": 3,
        "bytes": 7,
    }


def test_nothing_is_bound_that_is_not_given() -> None:
    """bind() without keys adds none."""
    stream = io.StringIO()
    logs.setup(stream=stream)
    logs.bind(logs.get_logger("x"), node="n0").warning("hello")
    assert set(json.loads(stream.getvalue())) == {"event", "level", "logger", "timestamp", "node"}


def test_foreign_records_take_the_same_way() -> None:
    """grpc's and others' standard records are JSON too, with their extras and tracebacks."""
    stream = io.StringIO()
    logs.setup(stream=stream)
    logging.getLogger("grpc._channel").error("lost %s", "peer", extra={"code": 14})
    line = json.loads(stream.getvalue())
    assert (line["event"], line["logger"], line["level"], line["code"]) == ("lost peer", "grpc._channel", "error", 14)


def test_the_level_holds_for_all() -> None:
    """Records below the level are dropped, ours and foreign ones."""
    stream = io.StringIO()
    logs.setup(level="warning", stream=stream)
    logs.get_logger("x").info("quiet")
    logging.getLogger("y").info("quiet")
    logs.get_logger("x").warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_tracebacks_show_no_local_variables() -> None:
    """An exception is told without the values of variables, which may be secrets."""
    for terminal in (io.StringIO(), Terminal()):
        logs.setup(stream=terminal)
        try:
            password = "hunter" + "2"
            raise ValueError(len(password))
        except ValueError:
            logs.get_logger("x").exception("failed")
        assert "ValueError: 7" in terminal.getvalue()
        assert "hunter2" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("style", "stream", "is_json"),
    [("auto", Terminal, False), ("auto", io.StringIO, True), ("json", Terminal, True), ("console", io.StringIO, False)],
)
def test_the_format_follows_the_stream(style: logs.Format, stream: type[io.StringIO], is_json: bool) -> None:
    """auto is for people on a terminal and JSON elsewhere; json and console hold anywhere."""
    out = stream()
    logs.setup(format=style, stream=out)
    logs.get_logger("x").info("hello")
    assert out.getvalue().startswith("{") is is_json
    assert ("\x1b[" in out.getvalue()) is (out.isatty() and not is_json)
