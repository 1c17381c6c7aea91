"""Every message of the seam: golden files, and what the schema refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_daemon import REPORT, TICKET, FakeDaemon, Mover, Plain, Raw

from refitd.errors import (
    ConfigError,
    InputError,
    LayoutError,
    MismatchError,
    PlanError,
    ProtocolError,
    RefitdError,
    Refused,
    StoreTimeout,
)  # fmt: skip
from refitd.hook import channel
from refitd.hook.admin import ask
from refitd.hook.answers import error_answer, error_of
from refitd.hook.engine import connect_engine
from refitd.hook.memory import shared_empty
from refitd.hook.messages import ANSWERS, EVENTS, REQUESTS, Report, Ticket, UnknownMethod, check, check_answer
from refitd.hook.trainer import connect_trainer

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = Plain({"w": (4, "float32")})
ADMIN = ("status", "pause", "resume", "drain", "limit")


def golden(kind: str, name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{kind}.{name}.json").read_text())


def test_every_message_has_a_golden_file() -> None:
    """The golden files are those of all requests, answers and events, and no others."""
    expected = {
        *(f"request.{name}" for name in REQUESTS), *(f"answer.{name}" for name in ANSWERS),
        *(f"event.{name}" for name in EVENTS), "answer.error",
    }  # fmt: skip
    assert {path.stem for path in GOLDEN.iterdir()} == expected


@pytest.mark.parametrize("name", REQUESTS)
def test_golden_requests_and_answers(name: str) -> None:
    """The golden request passes the schema, the golden answer passes its own."""
    assert check(golden("request", name))["method"] == name
    assert check_answer(name, golden("answer", name))["ok"] is True


def _fields(schemas: Any) -> list[tuple[str, str]]:
    return [(name, field) for name, fields in schemas.items() for field in fields]


@pytest.mark.parametrize(("name", "field"), _fields(REQUESTS))
def test_request_fields_are_required_and_typed(name: str, field: str) -> None:
    """A request without one of its fields, or with another type in it, is refused by the field's name."""
    _refuses(golden("request", name), field)


@pytest.mark.parametrize(("name", "field"), _fields(EVENTS))
def test_event_fields_are_required_and_typed(name: str, field: str) -> None:
    """An event without one of its fields, or with another type in it, is refused by the field's name."""
    _refuses(golden("event", name), field)


def _refuses(message: dict[str, Any], field: str) -> None:
    for changed in ({k: v for k, v in message.items() if k != field}, {**message, field: 1.5}):
        with pytest.raises(ProtocolError) as caught:
            check(changed)
        assert caught.value.field == field


def test_unknown_fields_are_ignored() -> None:
    """A newer peer may add fields."""
    message = {**golden("request", "publish"), "colour": "green"}
    assert check(message) is message


def test_unknown_messages() -> None:
    """An unknown method has an error of its own; an unknown event and a message that is neither are refused."""
    with pytest.raises(UnknownMethod, match="teleport"):
        check({"id": 1, "method": "teleport"})
    with pytest.raises(ProtocolError, match="event"):
        check({"event": "teleported"})
    with pytest.raises(ProtocolError, match="none of them"):
        check({"id": 1})


@pytest.mark.parametrize(
    ("change", "field"),
    [({"memory": [{"name": "w", "fd": -1, "offset": 0, "nbytes": 1}]}, "memory[0].fd"), ({"word": 1 << 64}, "word"),
     ({"ticket": {**TICKET, "kind": "eat"}}, "ticket.kind"), ({"word": True}, "word")],
)  # fmt: skip
def test_nested_fields_are_named(change: dict[str, Any], field: str) -> None:
    """A fault deep in a message is named by its path."""
    with pytest.raises(ProtocolError) as caught:
        check({**golden("request", "receive"), **change})
    assert caught.value.field == field


def test_ticket_and_report_round_trip() -> None:
    """Tickets and reports survive JSON exactly; one with a wrong field is refused."""
    assert Ticket.from_json(TICKET).to_json() == TICKET
    assert Report.from_json(REPORT).to_json() == REPORT
    with pytest.raises(ProtocolError, match=r"ticket\.token"):
        Ticket.from_json({**TICKET, "token": "5"})


@pytest.mark.parametrize(
    "error",
    [ConfigError("k", "a", "b"), InputError("k", "a", "b"), ProtocolError("k", "a", "b"), Refused("k", "a", "b"),
     MismatchError([InputError("w", "1", "2"), InputError("b", "3", "4")]), PlanError("no holder"),
     LayoutError([InputError("w", "1", "2")]), StoreTimeout("slow"), UnknownMethod("method", "a", "b")],
)  # fmt: skip
def test_errors_cross_the_socket(error: RefitdError) -> None:
    """An error arrives with its type and its words."""
    arrived = error_of(check(json.loads(json.dumps(error_answer(error, 4)))))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


def test_golden_error_answer() -> None:
    """An error answer looks exactly like its golden file."""
    assert error_answer(Refused("rank", "a rank that nobody has claimed", "engine/r0/0"), 3) == golden(
        "answer", "error"
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The first request of each method that clients send, with its number and incarnation replaced."""
    seen: dict[str, dict[str, Any]] = {}
    real = channel.send

    def record(sock: Any, message: dict[str, Any], fds: Any = ()) -> None:
        plain = {**message, "id": 1, **({"fds": len(fds)} if fds else {})}
        seen.setdefault(message["method"], plain | ({"incarnation": "0" * 32} if "incarnation" in plain else {}))
        real(sock, message, fds)

    monkeypatch.setattr(channel, "send", record)
    return seen


def test_trainer_speaks_the_golden_requests(daemon: FakeDaemon, sent: dict[str, dict[str, Any]]) -> None:
    """What a trainer sends equals the golden files."""
    with connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as trainer:
        weights = shared_empty((1 << 24,), torch.float32)  # fills an arena of its own, at offset 0
        trainer.register(Plain({"w": (1 << 24, "float32")}))
        offer = trainer.publish(3, {"w": weights})
        daemon.say("trainer/run1/0", "planned", seq=1)
        offer.released(timeout=0)
        trainer.publish(4, {"w": weights}).committed(timeout=0)
    for name in ("publish", "withdraw"):
        assert sent[name] == golden("request", name)
    assert {**sent["report"], "seq": 1} == golden("request", "report")


def test_engine_speaks_the_golden_requests(daemon: FakeDaemon, mover: Mover, sent: dict[str, dict[str, Any]]) -> None:
    """What an engine sends equals the golden files."""

    def lend(session, message, fds):
        session.event("relend", reason="the mover died")
        session.event("commit", ticket=TICKET)
        return mover.reply(session, message, fds)

    daemon.replies["receive"] = lend
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as engine:
        engine.register(LAYOUT)
        engine.receive(Ticket.from_json(TICKET), {"w": torch.zeros(4)})
        engine.release()
    for name in ("hello", "register", "receive", "relent", "committed", "applied", "release"):
        assert sent[name] == golden("request", name)


@pytest.mark.parametrize("name", EVENTS)
def test_daemon_speaks_the_golden_events(daemon: FakeDaemon, raw: Callable[[], Raw], name: str) -> None:
    """What Session.event sends equals the golden files."""
    client = raw()
    client.hello()
    fields = {key: value for key, value in golden("event", name).items() if key != "event"}
    daemon.say("engine/r0/0", name, **fields)
    assert client.wire.receive(10)[0] == golden("event", name) == check(golden("event", name))


@pytest.mark.parametrize("name", ADMIN)
def test_daemon_answers_admin_requests(daemon: FakeDaemon, raw: Callable[[], Raw], name: str) -> None:
    """Admin requests pass the server's checks and are answered under their number."""
    fields = {key: value for key, value in golden("answer", name).items() if key not in ("id", "ok")}
    daemon.replies[name] = lambda _session, _message, _fds: (fields, [])
    client = raw()
    client.hello(side="admin", job="", group="")
    assert client.ask({**golden("request", name), "id": 2}) == {**golden("answer", name), "id": 2}


@pytest.mark.parametrize("name", ADMIN)
def test_people_speak_the_golden_requests(daemon: FakeDaemon, name: str) -> None:
    """What `ask` sends equals the golden files, and what it returns are the answer's fields."""
    fields = {key: value for key, value in golden("answer", name).items() if key not in ("id", "ok")}
    daemon.replies[name] = lambda _session, _message, _fds: (fields, [])
    said = {key: value for key, value in golden("request", name).items() if key not in ("id", "method")}
    assert ask(name, str(daemon.path), **said) == fields
    assert daemon.requests == [{**golden("request", name), "id": 2}]


def test_client_imports_nothing_heavy() -> None:
    """Importing the client side brings in neither torch nor any library of the daemon."""
    heavy = [
        "torch",
        "grpc",
        "google.protobuf",
        "etcd3",
        "prometheus_client",
        "structlog",
        "rich",
        "tenacity",
        "asyncio",
    ]
    code = (
        "import sys, refitd, refitd.hook.client, refitd.hook.trainer, refitd.hook.engine\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
