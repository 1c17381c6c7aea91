"""What a daemon refuses: a node that has one, memory that is not what was registered, the wrong side."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from refitd.config import Config, load
from refitd.daemon.app import Daemon
from refitd.daemon.rank import lent_memory, shadow_memory
from refitd.daemon.requests import Requests
from refitd.errors import ConfigError, InputError, Refused
from refitd.hook.memfd import create_document, create_memory
from refitd.hook.messages import PROTO, TRAINER
from refitd.hook.page import ControlPage
from refitd.hook.session import Fds, Session
from refitd.hook.wire import Connection
from refitd.testing import LocalDaemon, split_layout

LAYOUT = split_layout({"w": ((4, 6), "float32"), "b": ((3,), "bfloat16")}, 0, 1)
W, B = {"name": "w", "fd": 0, "offset": 0, "nbytes": 96}, {"name": "b", "fd": 0, "offset": 128, "nbytes": 6}


def described(*regions: dict[str, Any], keep: tuple[str, ...] = ()) -> list[tuple[str, int, int, int]]:
    """What is taken of a described memory."""
    memory = lent_memory(LAYOUT, keep, {"memory": regions}, Fds([create_memory("test", 256)]))
    try:
        return [(r.name, r.fd, r.offset, r.nbytes) for r in memory.regions]
    finally:
        memory.close()


def test_memory_is_taken_as_it_was_registered() -> None:
    """Regions by name; storages that nobody registered are left out; kept ones may be missing."""
    assert described(W, B) == [("w", 0, 0, 96), ("b", 0, 128, 6)]
    assert described(W, B, {**B, "name": "other"}) == [("w", 0, 0, 96), ("b", 0, 128, 6)]
    assert described(W, keep=("b",)) == [("w", 0, 0, 96)]


@pytest.mark.parametrize(
    ("regions", "field", "expected", "got"),
    [
        ([W], "memory.b", "6 bytes", "nothing"),
        ([W, {**B, "nbytes": 8}], "memory.b", "6 bytes as registered", "8"),
        ([{**W, "nbytes": 95}, B], "memory.w", "96 bytes as registered", "95"),
    ],
)
def test_memory_of_another_size_is_refused(regions: list[dict[str, Any]], field: str, expected: str, got: str) -> None:
    """Missing, too large, too small: named before anything is mapped."""
    fds = Fds([create_memory("test", 256)])
    try:
        with pytest.raises(Refused) as caught:
            lent_memory(LAYOUT, (), {"memory": regions}, fds)
        assert (caught.value.field, caught.value.expected, caught.value.got) == (field, expected, got)
    finally:
        fds.close()


def test_a_shadow_that_is_too_small_is_refused_and_closed() -> None:
    """The descriptor was ours to close."""
    fd = create_memory("test", 64)
    with pytest.raises(InputError) as caught:
        shadow_memory(LAYOUT, fd)
    assert caught.value.field == "shadow"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def config(folder: Path, **more: object) -> Any:
    values = {
        "node.name": "n1", "node.state_dir": str(folder / "state"), "hook.socket": str(folder / "hook.sock"),
        "metrics.listen": "", **more,
    }  # fmt: skip
    return load(None, {}, values)


def test_a_trainer_that_releases_its_memory_has_none_that_could_be_mapped_anew() -> None:
    """A lane that was about to read maps what is there, behind the answer that the trainer waits for."""
    happened: list[str] = []

    async def unmap(_rank: Any) -> None:
        happened.append("unmapped")

    session = cast("Any", SimpleNamespace(job="job", key="trainer/run/0", side=TRAINER, group="run"))
    rank = SimpleNamespace(session=session, offer=None, close=lambda: happened.append("forgotten"))
    job = SimpleNamespace(ranks={session.key: rank}, movers=SimpleNamespace(unmap=unmap))
    requests = Requests(cast("Any", SimpleNamespace(job=lambda _name: job, config=MagicMock())))
    asyncio.run(requests._release_trainer(session))
    assert happened == ["forgotten", "unmapped"]


def test_a_node_has_one_daemon(tmp_path: Path) -> None:
    """The second one is refused by name, wherever its socket is; when the first is gone it may start."""
    first = Daemon(config(tmp_path))
    with pytest.raises(Refused) as caught:
        Daemon(config(tmp_path, **{"hook.socket": str(tmp_path / "other.sock")}))
    assert (caught.value.field, caught.value.got) == ("node.name", "n1 has one already")
    other = Daemon(config(tmp_path, **{"node.name": "n2"}))
    os.close(first._lock)
    again = Daemon(config(tmp_path))
    for daemon in (other, again):
        os.close(daemon._lock)


def test_a_secret_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    """data.secret_file is named."""
    with pytest.raises(ConfigError) as caught:
        Daemon(config(tmp_path, **{"data.secret_file": str(tmp_path / "none")}))
    assert caught.value.field == "data.secret_file"


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon() as running:
        yield running


class Raw:
    """A client that sends what it likes."""

    def __init__(self, daemon: LocalDaemon, side: str, rank: int = 0, life: str = "1") -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(daemon.socket)
        self.connection, self.page, self._calls = Connection(sock), ControlPage.create(), 0
        self.hello = self.ask(
            "hello", [self.page.fd], proto=PROTO, client="test", job="raw", side=side, group="g", rank=rank, world=2,
            incarnation=life,
        )  # fmt: skip

    def ask(self, method: str, fds: list[int] | None = None, **fields: Any) -> dict[str, Any]:
        self._calls += 1
        self.connection.send({"id": self._calls, "method": method, **fields}, fds or [])
        while True:
            answer, received = self.connection.receive(10)
            for fd in received:
                os.close(fd)
            if "event" not in answer:
                return answer

    def close(self) -> None:
        self.connection.close()
        self.page.close()


@pytest.fixture
def raw(daemon: LocalDaemon) -> Iterator[Any]:
    clients: list[Raw] = []

    def make(*args: Any, **kwargs: Any) -> Raw:
        clients.append(Raw(daemon, *args, **kwargs))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def error(answer: dict[str, Any]) -> tuple[str, str, str]:
    return answer["error"]["code"], answer["error"]["field"], answer["error"]["got"]


TICKET = {"kind": "receive", "job": "raw", "replica": "g", "generation": 1, "revision": 1, "step": 1, "token": 1}


def test_nothing_goes_before_registration(raw: Any) -> None:
    """Publish and receive need a layout."""
    assert error(raw("trainer").ask("publish", seq=1, step=1, word=1, memory=None)) == (
        "refused",
        "register",
        "none yet",
    )
    assert error(raw("engine").ask("release")) == ("refused", "register", "none yet")


def test_the_wrong_side_is_refused(raw: Any) -> None:
    """An engine does not publish and a trainer does not receive; neither registers as the other."""
    trainer, engine = raw("trainer"), raw("engine")
    assert error(engine.ask("publish", seq=1, step=1, word=1, memory=None)) == ("refused", "side", "engine")
    assert error(trainer.ask("receive", ticket=TICKET, word=1, memory=[])) == ("refused", "side", "trainer")
    for client, mode in ((trainer, "in_place"), (engine, "trainer")):
        fd = create_memory("layout", 16)
        assert error(client.ask("register", [fd], mode=mode, keep=[], state=None)) == ("refused", "mode", mode)
        os.close(fd)


def test_ranks_of_one_replica_take_weights_in_one_way(raw: Any) -> None:
    """One of them in a shadow and another in place: no ticket would be for both."""
    document = create_document("refitd-layout", LAYOUT.to_bytes())
    first, second = raw("engine", rank=0), raw("engine", rank=1)
    assert first.ask("register", [document], mode="in_place", keep=[], state=None)["ok"] is True
    shadow = create_memory("shadow", 1024)
    refused = second.ask("register", [document, shadow], mode="host_shadow", keep=[], state=None)
    assert error(refused) == ("refused", "mode", "host_shadow")
    assert second.ask("register", [document], mode="in_place", keep=[], state=None)["ok"] is True
    for fd in (document, shadow):
        os.close(fd)


def test_a_rank_belongs_to_the_process_that_came_first(raw: Any) -> None:
    """Another life is refused; the same client may connect again and takes the place of its old connection."""
    first = raw("engine", rank=1, life="a")
    assert first.hello["ok"] is True
    refused = raw("engine", rank=1, life="b").hello
    assert error(refused) == ("refused", "rank", f"process {os.getpid()} speaks for it")
    again = raw("engine", rank=1, life="a")
    assert again.hello["ok"] is True
    with pytest.raises((EOFError, BrokenPipeError)):
        first.ask("status")
    assert again.ask("status")["ok"] is True


def test_who_has_hung_up_is_in_nobodys_way() -> None:
    """A process that is started again at once may say hello before the daemon has read the end of the last one."""

    async def main() -> None:
        ends = [socket.socketpair() for _ in range(2)]
        before, after = (Session(number, ours, 5.0) for number, (ours, _theirs) in enumerate(ends))
        for session, life in ((before, "a"), (after, "b")):
            session.job, session.side, session.group, session.incarnation = "job", "engine", "g", life
        requests = Requests(SimpleNamespace(config=Config(), hook=SimpleNamespace(sessions=[before])))  # type: ignore[arg-type]
        with pytest.raises(Refused, match="engine/g/0 to be free"):
            requests.connected(after)
        assert not before.hung_up
        ends[0][1].close()
        requests.connected(after)
        assert before.closed == "the client closed the connection"
        after.close("the test is over")
        ends[1][1].close()

    asyncio.run(main())


def test_methods_that_nobody_knows_are_refused(raw: Any) -> None:
    """They have a code of their own, and the session goes on."""
    client = raw("trainer")
    assert client.ask("dance")["error"]["code"] == "unknown_method"
    assert client.ask("status")["ok"] is True


@pytest.mark.parametrize(
    ("method", "fields"),
    [("pause", {"job": "raw", "reason": ""}), ("resume", {"job": "raw"}), ("limit", {"job": "raw", "rate": None}),
     ("drain", {"cancel": False})],
)  # fmt: skip
def test_only_people_give_orders(raw: Any, method: str, fields: dict[str, Any]) -> None:
    """A trainer or an engine that pauses its job is mistaken."""
    for side in ("trainer", "engine"):
        assert error(raw(side).ask(method, **fields)) == ("refused", "side", side)
