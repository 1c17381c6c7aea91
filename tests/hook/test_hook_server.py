"""The daemon's end of the hook, spoken to in bytes."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_daemon import HELLO, TICKET, FakeDaemon, Raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refitd.errors import InputError, LayoutError, ProtocolError, Refused, StoreUnavailable
from refitd.hook import session as session_module
from refitd.hook.memfd import create_document, create_memory
from refitd.hook.peer import Peer
from refitd.hook.wire import MAX_FRAME, encode, encode_spilling

Make = Callable[[], Raw]


def test_hello_maps_the_page_and_stamps_it(daemon: FakeDaemon, raw: Make) -> None:
    """hello is answered with protocol, server, node and path, and the control page's heartbeat runs from then on."""
    client = raw()
    assert client.hello() == {"id": 1, "ok": True, "proto": 1, "server": "refitd", "node": "n0", "path": "auto"}
    first = client.page.heartbeat
    assert first > 0
    daemon.sessions["engine/r0/0"].page.dirty = 1
    assert client.page.dirty == 1
    deadline = time.monotonic() + 10
    while client.page.heartbeat == first:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_session_knows_its_peer(daemon: FakeDaemon, raw: Make) -> None:
    """A session carries the peer's pid, user and groups from the kernel, and the fields of its hello."""
    raw().hello(side="trainer", group="run1", rank=2, world=4)
    session = daemon.sessions["trainer/run1/2"]
    assert session.peer == Peer(os.getpid(), os.getuid(), os.getgid(), frozenset({os.getgid(), *os.getgroups()}))
    assert (session.job, session.side, session.group, session.rank, session.world) == ("grpo", "trainer", "run1", 2, 4)
    assert session.incarnation == "0" * 32


def test_admin_needs_no_page(daemon: FakeDaemon, raw: Make) -> None:
    """An admin client says hello without a control page and may ask for status."""
    client = raw()
    assert client.hello(side="admin", job="", group="")["ok"] is True
    assert client.ask({"id": 2, "method": "status"}) == {"id": 2, "ok": True}
    assert [session.page for session in daemon.sessions.values()] == [None]


def test_frames_in_single_bytes(daemon: FakeDaemon, raw: Make) -> None:
    """A client may send its frames one byte at a time, descriptors included."""
    client = raw()
    frame = encode(HELLO, 1)
    socket.send_fds(client.sock, [frame[:1]], [client.page.fd])
    for i in range(1, len(frame)):
        client.sock.sendall(frame[i : i + 1])
    assert client.wire.receive(10)[0]["ok"] is True


def test_requests_are_answered_in_order(daemon: FakeDaemon, raw: Make) -> None:
    """Requests that arrive in one piece are handled one after another."""
    client = raw()
    client.hello()
    client.sock.sendall(b"".join(encode({"id": i, "method": "relent", "word": i}) for i in range(2, 50)))
    assert [client.wire.receive(10)[0]["id"] for _ in range(2, 50)] == list(range(2, 50))
    assert [request["word"] for request in daemon.requests] == list(range(2, 50))


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"proto": 2}, "proto"), ({"rank": 1}, "rank"), ({"job": ""}, "job"), ({"side": "both"}, "side"),
     ({"group": "a/b"}, "group"), ({"method": "register"}, "method")],
)  # fmt: skip
def test_bad_hello(daemon: FakeDaemon, raw: Make, changes: dict[str, object], field: str) -> None:
    """A hello that is not of this protocol is answered with the field at fault, then the connection ends."""
    client = raw()
    error = client.hello(**changes)["error"]
    assert (error["code"], error["field"]) == ("protocol", field)
    assert client.ended()
    assert daemon.sessions == {}


def test_hello_without_descriptor(daemon: FakeDaemon, raw: Make) -> None:
    """A hello without its control page is refused, naming the descriptors."""
    client = raw()
    error = client.ask(HELLO)["error"]
    assert (error["field"], error["expected"], error["got"]) == ("fds", "1 descriptors", "0")
    assert client.ended()


def test_page_that_could_shrink(daemon: FakeDaemon, raw: Make, tmp_path: Path) -> None:
    """A control page in a plain file is refused: mapping it would let the client kill the daemon by truncating it."""
    client = raw()
    with (tmp_path / "page").open("w+b") as file:
        file.truncate(4096)
        error = client.ask(HELLO, [file.fileno()])["error"]
    assert error["field"] == "control page"
    assert client.ended()


def test_announced_descriptors_are_missing(daemon: FakeDaemon, raw: Make) -> None:
    """A frame that counts more descriptors than came ends the connection with a typed error."""
    client = raw()
    client.sock.sendall(encode(HELLO, 3))
    assert client.wire.receive(10)[0]["error"]["field"] == "fds"
    assert client.ended()


def test_oversized_frame(daemon: FakeDaemon, raw: Make) -> None:
    """A length above 1 MiB is refused before anything is read."""
    client = raw()
    client.sock.sendall(struct.pack(">I", MAX_FRAME + 1))
    answer = client.wire.receive(10)[0]
    assert answer["id"] is None
    assert (answer["error"]["field"], answer["error"]["got"]) == ("frame length", str(MAX_FRAME + 1))
    assert client.ended()


def test_large_message_is_spilled(daemon: FakeDaemon, raw: Make) -> None:
    """A message above 1 MiB travels in a sealed memfd and arrives whole, beside its own descriptors."""
    client = raw()
    client.hello()
    memory = [{"name": f"layer.{i}.weight", "fd": 0, "offset": 0, "nbytes": 1} for i in range(30_000)]
    fd = create_memory("weights", 64)
    answer = client.ask({"id": 2, "method": "receive", "ticket": TICKET, "word": 1, "memory": memory}, [fd])
    os.close(fd)
    assert answer == {"id": 2, "ok": True}
    assert daemon.requests[0]["memory"] == memory


def test_spilled_document_must_be_sealed(daemon: FakeDaemon, raw: Make) -> None:
    """A spilled message in a memfd that could still change is refused."""
    client = raw()
    client.hello()
    fd = create_memory("open", 64)
    client.wire.send({"spilled": True}, [fd])
    os.close(fd)
    assert client.wire.receive(10)[0]["error"]["field"] == "spilled"
    assert client.ended()


def test_unknown_method(daemon: FakeDaemon, raw: Make) -> None:
    """A method of another version is answered with unknown_method, and the session lives on."""
    client = raw()
    client.hello()
    assert client.ask({"id": 2, "method": "teleport"})["error"]["code"] == "unknown_method"
    assert client.ask({"id": 3, "method": "release"}) == {"id": 3, "ok": True}


def test_every_error_answer_is_counted_and_told(daemon: FakeDaemon, raw: Make) -> None:
    """What is answered before the handler sees it counts once, as what the handler raises does; the log names it."""

    def reply(session, message, fds):
        raise Refused("seq", "a publication", "none")

    daemon.replies["withdraw"] = reply
    client = raw()
    client.hello()
    assert (daemon.counted, daemon.faults) == ([], [])
    asked = [
        {"id": 2, "method": "teleport"}, {"method": "release"}, {"id": 3, "method": "relent", "word": "one"},
        {"id": 4, "method": "withdraw", "seq": 1, "reason": "late"}, {"id": 5, "method": "release"},
    ]  # fmt: skip
    codes = [answer["error"]["code"] for answer in map(client.ask, asked) if "error" in answer]
    assert daemon.counted == codes == ["unknown_method", "protocol", "protocol", "refused"]
    assert [(event, facts["rank"], facts["method"]) for event, facts in daemon.faults] == [
        ("request_refused", "engine/r0/0", method) for method in ("teleport", "release", "relent", "withdraw")
    ]
    assert raw().hello(proto=2)["error"]["code"] == "protocol"
    assert daemon.counted[4:] == ["protocol"]
    assert daemon.faults[4][0] == "client_refused"


def test_memory_outside_of_its_descriptor(daemon: FakeDaemon, raw: Make) -> None:
    """A loan of bytes that the memfd does not have is refused, and the session lives on."""
    client = raw()
    client.hello()
    fd = create_memory("weights", 64)
    request = {"id": 2, "method": "receive", "ticket": TICKET, "word": 1}
    entry = {"name": "w", "fd": 0, "offset": 60, "nbytes": 8}
    error = client.ask({**request, "memory": [entry]}, [fd])["error"]
    assert (error["field"], error["expected"], error["got"]) == ("memory[0]", "at least 68 bytes", "64")
    error = client.ask({**request, "memory": [{**entry, "fd": 1}]}, [fd])["error"]
    assert error["field"] == "memory[0].fd"
    os.close(fd)
    assert daemon.requests == []


def test_descriptors_are_closed_unless_taken(daemon: FakeDaemon, raw: Make) -> None:
    """After a request the server has closed its descriptors; one that the handler took stays open."""
    kept: list[int] = []
    lent: list[int] = []

    def reply(session, message, fds):
        kept.append(fds.take(0))
        lent.append(fds[1])
        return {"digest": "d"}, []

    daemon.replies["register"] = reply
    client = raw()
    client.hello()
    fds = [create_document("layout", b"x"), create_document("shadow", b"y")]
    answer = client.ask({"id": 2, "method": "register", "mode": "host_shadow", "keep": [], "state": None}, fds)
    for fd in fds:
        os.close(fd)
    assert answer["digest"] == "d"
    client.ask({"id": 3, "method": "release"})
    assert os.fstat(kept[0]).st_size == 1
    os.close(kept[0])
    assert lent[0] != kept[0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lent[0])


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [(LayoutError([InputError("w", "2", "3")]), "layout", False), (StoreUnavailable("etcd is away"),
     "store_unavailable", True), (ZeroDivisionError("secret"), "internal", False)],
)  # fmt: skip
def test_errors_of_the_handler(daemon: FakeDaemon, raw: Make, error: Exception, code: str, retryable: bool) -> None:
    """A typed error becomes an answer; any other becomes ``internal`` without details, and the session lives on."""

    def reply(session, message, fds):
        raise error

    daemon.replies["release"] = reply
    client = raw()
    client.hello()
    answer = client.ask({"id": 2, "method": "release"})
    assert (answer["error"]["code"], answer["error"]["retryable"]) == (code, retryable)
    assert "secret" not in str(answer)
    assert [event for event, _facts in daemon.faults] == ["request_failed" if code == "internal" else "request_refused"]
    assert daemon.counted == [code]
    assert client.ask({"id": 3, "method": "relent", "word": 1}) == {"id": 3, "ok": True}


def test_two_clients_claim_one_rank(daemon: FakeDaemon, raw: Make) -> None:
    """The second claimant of a rank is refused by the handler; the first goes on undisturbed."""
    first, second = raw(), raw()
    first.hello()
    assert second.hello()["error"]["code"] == "refused"
    assert second.ended()
    assert first.ask({"id": 2, "method": "release"}) == {"id": 2, "ok": True}
    assert daemon.ends == []


def test_end_of_file_ends_the_registration(daemon: FakeDaemon, raw: Make) -> None:
    """A client that goes away is reported once, with the reason."""
    client = raw()
    client.hello()
    client.sock.shutdown(socket.SHUT_RDWR)
    daemon.until(lambda: bool(daemon.ends))
    assert daemon.ends == [("engine/r0/0", "the client closed the connection")]


def test_uid_is_not_allowed(tmp_path: Path) -> None:
    """A process of another user is told so and let go, before it says anything."""
    fake = FakeDaemon(tmp_path / "hook.sock", uids=[os.getuid() + 1]).start()
    client = Raw(fake.path)
    try:
        error = client.wire.receive(10)[0]["error"]
        assert (error["code"], error["field"], error["got"]) == ("refused", "uid", str(os.getuid()))
        assert client.ended()
    finally:
        client.close()
        fake.end()


def test_silent_client(tmp_path: Path) -> None:
    """A client that connects and says nothing is let go after the hello deadline."""
    fake = FakeDaemon(tmp_path / "hook.sock", hello_timeout=0.05).start()
    client = Raw(fake.path)
    try:
        assert client.wire.receive(10)[0]["error"]["field"] == "hello"
        assert client.ended()
    finally:
        client.close()
        fake.end()


def test_client_that_stops_reading(tmp_path: Path) -> None:
    """Events to a client that reads nothing never block the daemon, and end the session at the stall deadline."""
    fake = FakeDaemon(tmp_path / "hook.sock", stall_timeout=0.3).start()
    stalled, other = Raw(fake.path), Raw(fake.path)
    try:
        stalled.hello()
        other.hello(rank=1, world=2)
        for _ in range(20):
            fake.say("engine/r0/0", "relend", reason="x" * 100_000)
        assert other.ask({"id": 2, "method": "release"}) == {"id": 2, "ok": True}
        fake.until(lambda: bool(fake.ends))
        assert fake.ends == [("engine/r0/0", "the client stopped reading for 0.3 s")]
    finally:
        stalled.close()
        other.close()
        fake.end()


def test_outbox_is_bounded(daemon: FakeDaemon, raw: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose outbox is full is disconnected at once."""
    monkeypatch.setattr(session_module, "OUTBOX_LIMIT", 500_000)
    raw().hello()
    session = daemon.sessions["engine/r0/0"]
    daemon.call(lambda: [session.event("relend", reason="x" * 100_000) for _ in range(100)])
    daemon.until(lambda: bool(daemon.ends))
    assert daemon.ends == [("engine/r0/0", "the client stopped reading: its outbox is full")]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_garbage(daemon: FakeDaemon, raw: Make, data: bytes, framed: bool, greeted: bool) -> None:
    """Whatever bytes a client sends, the daemon answers the next client."""
    client = raw()
    if greeted:
        client.hello()
    client.sock.sendall(struct.pack(">I", len(data)) + data if framed else data)
    client.close()
    probe = raw()
    assert probe.hello(side="admin")["ok"] is True
    probe.close()
    assert {event for event, _facts in daemon.faults} <= {"client_refused", "request_refused"}


def test_encode_spilling_keeps_small_messages_inline() -> None:
    """Only a message above the frame limit gets a document, and one above the spill limit is refused."""
    assert encode_spilling({"id": 1}, [7]) == (encode({"id": 1}, 1), [7])
    with pytest.raises(ProtocolError, match="message length"):
        encode_spilling({"x": "y" * (33 << 20)})
