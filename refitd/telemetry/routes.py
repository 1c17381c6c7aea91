"""What each path of the daemon's HTTP port answers. Knows nothing of sockets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from refitd.errors import InputError
from refitd.telemetry.facts import Verdict
from refitd.telemetry.page import render

Health = Callable[[], str]
Ready = Callable[[str, str, int | None], Verdict]
Picture = Callable[[], Mapping[str, Any]]

TEXT, JSON, HTML = "text/plain; charset=utf-8", "application/json", "text/html; charset=utf-8"
LAG_LIMIT = 1_000_000
_READY_KEYS = ("job", "replica", "max_lag")


class Answer(NamedTuple):
    """Status, content type, body."""

    status: int
    kind: str
    body: bytes


class Routes:
    """The pages of one daemon.

    ``health()`` says what is wrong, or ``""``. ``ready(job, replica, max_lag)`` judges a replica, all of a job's
    (replica ``""``) or all of this node's (job ``""``); ``max_lag`` None is the configured one. ``picture()`` is what
    the status page shows (see `refitd.telemetry.page`). The last two may raise TimeoutError where the loop stands.
    """

    def __init__(self, registry: CollectorRegistry, health: Health, ready: Ready, picture: Picture) -> None:
        self._registry, self._health, self._ready, self._picture = registry, health, ready, picture
        self._pages: Mapping[str, Callable[[str, str], Answer]] = {
            "/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz, "/": self._page,
        }  # fmt: skip

    def answer(self, target: str, accept: str) -> Answer:
        """The answer to a GET of ``target`` (path and query) with an Accept header. Never raises for what is asked."""
        parts = urlsplit(target)
        page = self._pages.get(parts.path)
        if page is None:
            return Answer(404, TEXT, f"not found; there is {' '.join(self._pages)}\n".encode())
        try:
            return page(parts.query, accept)
        except InputError as error:
            fields = {"code": "input", "field": error.field, "expected": error.expected, "got": error.got}
            return _json(400, {"error": {**fields, "message": str(error), "retryable": False}})
        except TimeoutError as error:
            return Answer(503, TEXT, f"{error}\n".encode())

    def _metrics(self, query: str, accept: str) -> Answer:
        _parameters(query, ())
        encode, kind = choose_encoder(accept)
        return Answer(200, kind, encode(self._registry))

    def _healthz(self, query: str, accept: str) -> Answer:
        del accept
        _parameters(query, ())
        problem = self._health()
        return Answer(503 if problem else 200, TEXT, f"{problem or 'ok'}\n".encode())

    def _readyz(self, query: str, accept: str) -> Answer:
        del accept
        given = _parameters(query, _READY_KEYS)
        if "replica" in given and "job" not in given:
            raise InputError("job", "the job of the replica", "nothing")
        lag = _lag(given["max_lag"]) if "max_lag" in given else None
        verdict = self._ready(given.get("job", ""), given.get("replica", ""), lag)
        return _json(200 if verdict.ready else 503, {"ready": verdict.ready, "reason": verdict.reason})

    def _page(self, query: str, accept: str) -> Answer:
        del accept
        _parameters(query, ())
        return Answer(200, HTML, render(self._picture()).encode())


def _parameters(query: str, known: tuple[str, ...]) -> dict[str, str]:
    """The query's parameters. Raises InputError for one that is unknown, empty or given twice."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20, errors="strict")
    except ValueError as error:
        raise InputError("query", "name=value&name=value", str(error)[:80]) from None
    found: dict[str, str] = {}
    for key, value in pairs:
        if key not in known:
            raise InputError(key[:80], f"one of {', '.join(known)}" if known else "no parameters", "an unknown one")
        if key in found or not value:
            raise InputError(key, "one value", "another one" if key in found else "nothing")
        found[key] = value
    return found


def _lag(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:10]) <= LAG_LIMIT):
        raise InputError("max_lag", f"a whole number from 0 to {LAG_LIMIT}", repr(text[:40]))
    return int(text[:10])


def _json(status: int, document: Mapping[str, Any]) -> Answer:
    return Answer(status, JSON, json.dumps(document).encode() + b"\n")
