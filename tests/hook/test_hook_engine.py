"""The engine's side, against a real HookServer with a scripted handler and a process that stands for the mover."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_daemon import TICKET, FakeDaemon, Mover, Plain

from refitd.errors import DaemonUnavailable, InputError, ReceiveFailed, RefitdError, Refused, StoreUnavailable
from refitd.hook import engine as engine_module
from refitd.hook import loan as loan_module
from refitd.hook.engine import Engine, connect_engine
from refitd.hook.memory import shared_empty
from refitd.hook.messages import Ticket
from refitd.hook.page import Taken

KEY = "engine/r0/0"
LAYOUT = Plain({"w": (4, "float32"), "kv.scale": (1, "float32")}, keep=("kv.*",))
RECEIVE = Ticket.from_json(TICKET)
APPLY = Ticket.from_json({**TICKET, "kind": "apply"})


def _newer(ticket: Ticket, by: int = 1) -> Ticket:
    return Ticket.from_json({**ticket.to_json(), "revision": ticket.revision + by, "step": ticket.step + by})


@pytest.fixture
def engine(daemon: FakeDaemon, mover: Mover) -> Iterator[Engine]:
    daemon.replies["receive"] = mover.reply
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as made:
        made.register(LAYOUT)
        yield made


@pytest.fixture(params=["host_shadow", "device_shadow"])
def shadowed(daemon: FakeDaemon, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, int]]:
    """An engine with a shadow (device_shadow without any device), and the daemon's descriptor of it."""
    taken: list[int] = []

    def register(session, message, fds):
        taken.append(fds.take(1))
        return {"digest": "d"}, []

    daemon.replies["register"] = register
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as made:
        made.register(LAYOUT, mode=request.param, keep=["extra.*"], budget=64)
        yield made, taken[0]
    for fd in taken:
        os.close(fd)


class Receiving:
    """engine.receive in a thread, so that the test can play the daemon's part."""

    def __init__(self, engine: Engine, ticket: Ticket, tensors: dict[str, Any], timeout: float = 20.0) -> None:
        self.done: Ticket | None = None
        self.error: Exception | None = None

        def run() -> None:
            try:
                self.done = engine.receive(ticket, tensors, timeout)
            except RefitdError as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def join(self) -> Receiving:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self


def _commit(daemon: FakeDaemon, ticket: Ticket) -> None:
    daemon.say(KEY, "commit", ticket=ticket.to_json())


def test_ticket_comes_and_goes(daemon: FakeDaemon, engine: Engine) -> None:
    """pending() returns the newest ticket that the daemon offers, as long as it offers one."""
    assert engine.pending() is None
    daemon.say(KEY, "ticket", ticket=TICKET)
    assert engine.pending(wait=10) == RECEIVE
    assert engine.pending() == RECEIVE
    daemon.say(KEY, "ticket", ticket=_newer(RECEIVE).to_json())
    daemon.say(KEY, "ticket", ticket=_newer(RECEIVE, 2).to_json())
    daemon.say(KEY, "ticket", ticket=None)
    deadline = time.monotonic() + 10
    while engine.pending() is not None:
        assert time.monotonic() < deadline
    assert daemon.of("committed") == []


def test_receive_in_shared_memory(daemon: FakeDaemon, engine: Engine) -> None:
    """receive() lends live memory dirty, and on the commit says what is served, clears dirty and tells the daemon."""
    weights = shared_empty((4,), torch.float32)
    receiving = Receiving(engine, RECEIVE, {"w": weights})
    lent = daemon.seen("receive")
    page = daemon.page(KEY)
    assert (page.dirty, lent["word"], lent["ticket"]) == (1, page.loan_word, TICKET)
    assert [entry["name"] for entry in lent["memory"]] == ["w"]
    assert engine.publication is None
    _commit(daemon, RECEIVE)
    assert receiving.join().done == RECEIVE
    assert (page.dirty, page.generation, page.revision, page.token, page.taken) == (0, 1, 7, 5, Taken(1, 7, 5))
    assert (engine.publication, engine.step, engine.dirty) == ((1, 7), 3, False)
    assert daemon.seen("committed")["ticket"] == daemon.seen("applied")["ticket"] == TICKET
    assert engine.pending() is None


def test_receive_by_staging(daemon: FakeDaemon, engine: Engine) -> None:
    """Memory outside of an arena is lent as a copy, and the live tensor changes only after the commit."""
    weights = torch.full((4,), 7.0)
    mover_reply = daemon.replies["receive"]

    def write_half(session, message, fds):
        fd = fds[message["memory"][0]["fd"]]
        assert os.pread(fd, 16, 0) == torch.full((4,), 7.0).numpy().tobytes()
        os.pwrite(fd, torch.arange(2.0).numpy().tobytes(), 0)
        return mover_reply(session, message, fds)

    daemon.replies["receive"] = write_half
    receiving = Receiving(engine, RECEIVE, {"w": weights})
    daemon.seen("receive")
    assert weights.tolist() == [7, 7, 7, 7]
    _commit(daemon, RECEIVE)
    assert receiving.join().error is None
    assert weights.tolist() == [0, 1, 7, 7]


def test_success_without_transfer(daemon: FakeDaemon, engine: Engine) -> None:
    """Case J4: a receive that nobody serves ends at its timeout; dirty, nothing committed, memory taken back."""
    weights = torch.full((4,), 7.0)
    with pytest.raises(ReceiveFailed, match="no commit"):
        engine.receive(RECEIVE, {"w": weights}, timeout=0.1)
    assert (engine.dirty, engine.publication, engine.step) == (True, None, None)
    assert weights.tolist() == [7, 7, 7, 7]
    assert daemon.of("committed") == daemon.of("applied") == []
    assert daemon.page(KEY).loan_word == daemon.seen("receive")["word"] + 1
    assert len(daemon.of("release")) == 1


def test_old_commit_does_not_count(daemon: FakeDaemon, engine: Engine) -> None:
    """The commit of an older publication does not end a receive, that of a newer one does."""
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)})
    daemon.seen("receive")
    _commit(daemon, _newer(RECEIVE, -1))
    _commit(daemon, _newer(RECEIVE))
    assert receiving.join().done == _newer(RECEIVE)
    assert engine.publication == (1, 8)


def test_early_commit_is_forgotten(daemon: FakeDaemon, engine: Engine) -> None:
    """A commit that was said before the memory was lent belongs to another loan."""
    _commit(daemon, RECEIVE)
    with pytest.raises(ReceiveFailed):
        engine.receive(RECEIVE, {"w": torch.zeros(4)}, timeout=0.1)
    assert engine.dirty


def test_relend(daemon: FakeDaemon, engine: Engine) -> None:
    """On relend the loan word changes before the memory is lent again."""
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)})
    word = daemon.seen("receive")["word"]
    daemon.say(KEY, "relend", reason="the mover died")
    assert daemon.seen("relent")["word"] == word + 1 == daemon.page(KEY).loan_word
    _commit(daemon, RECEIVE)
    assert receiving.join().error is None


def test_failed(daemon: FakeDaemon, engine: Engine) -> None:
    """When the daemon gives up, receive() raises its reason, the rank stays dirty, and a later receive succeeds."""
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)})
    daemon.seen("receive")
    daemon.say(KEY, "failed", reason="no source is left")
    error = receiving.join().error
    assert isinstance(error, ReceiveFailed)
    assert str(error) == "no source is left"
    assert engine.dirty
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)})
    daemon.seen("receive", 2)
    _commit(daemon, RECEIVE)
    assert receiving.join().error is None
    assert not engine.dirty


def test_refused_before_anything_was_lent(daemon: FakeDaemon, engine: Engine) -> None:
    """A refused loan leaves a clean rank clean: its memory was never touched."""

    def refuse(session, message, fds):
        raise Refused("ticket", "the ticket that is offered", "an old one")

    daemon.replies["receive"] = refuse
    with pytest.raises(ReceiveFailed, match="an old one"):
        engine.receive(RECEIVE, {"w": torch.zeros(4)})
    assert not engine.dirty


def test_store_is_away(daemon: FakeDaemon, engine: Engine) -> None:
    """A refusal that will pass is tried again."""
    mover_reply, refusals = daemon.replies["receive"], []

    def refuse_once(session, message, fds):
        if refusals:
            return mover_reply(session, message, fds)
        refusals.append(1)
        raise StoreUnavailable("etcd is away")

    daemon.replies["receive"] = refuse_once
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)})
    daemon.seen("receive", 2)
    _commit(daemon, RECEIVE)
    assert receiving.join().error is None


def test_daemon_dies_within_receive(daemon: FakeDaemon, engine: Engine, mover: Mover) -> None:
    """Memory is lent to the next daemon only when the old mover has ended, with the state and the same incarnation."""
    incarnation = daemon.sessions[KEY].incarnation
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)})
    word = daemon.seen("receive")["word"]
    time.sleep(0.05)
    daemon.stop()
    daemon.start()
    time.sleep(0.3)
    assert len(daemon.of("receive")) == 1
    replacement = Mover()

    def lend(session, message, fds):
        if len(daemon.of("receive")) == 2:
            raise Refused("receive", "a running mover", "none yet")
        return replacement.reply(session, message, fds)

    daemon.replies["receive"] = lend
    mover.kill()
    again = daemon.seen("receive", 3)
    assert again["word"] > daemon.seen("receive", 2)["word"] > word
    assert again["ticket"] == TICKET
    assert daemon.seen("register", 2)["state"] == {
        "generation": 0, "revision": 0, "step": 0, "token": 0, "dirty": True,
    }  # fmt: skip
    assert daemon.sessions[KEY].incarnation == incarnation
    _commit(daemon, RECEIVE)
    assert receiving.join().error is None
    replacement.kill()
    os.close(replacement.pidfd)


def test_mover_outlives_its_daemon(daemon: FakeDaemon, engine: Engine) -> None:
    """While the old mover runs, memory is not lent again: the receive fails and the rank stays dirty."""
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)}, timeout=0.6)
    daemon.seen("receive")
    time.sleep(0.05)
    daemon.stop()
    daemon.start()
    error = receiving.join().error
    assert isinstance(error, ReceiveFailed)
    assert "mover still runs" in str(error)
    assert engine.dirty
    assert len(daemon.of("receive")) == 1


def test_daemon_in_doubt_asks_again(daemon: FakeDaemon, engine: Engine) -> None:
    """A repeated commit of what is served is confirmed again; one of something else is not."""
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)})
    daemon.seen("receive")
    _commit(daemon, RECEIVE)
    receiving.join()
    daemon.seen("committed")
    _commit(daemon, _newer(RECEIVE))
    _commit(daemon, RECEIVE)
    engine.pending(wait=0.2)
    assert daemon.seen("committed", 2)["ticket"] == TICKET
    assert len(daemon.of("committed")) == 2


def test_planted_early_apply(daemon: FakeDaemon, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault early-apply ends a receive without any commit, so that tests can prove they notice."""
    monkeypatch.setattr(loan_module, "failpoint", lambda name, **facts: name == "early-apply")
    assert engine.receive(RECEIVE, {"w": torch.zeros(4)}) == RECEIVE
    assert not engine.dirty


def test_failpoint_apply(daemon: FakeDaemon, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the commit and the clearing of dirty a test can stop the engine."""
    reached: list[tuple[str, object, bool]] = []

    def record(name: str, **facts: object) -> bool:
        reached.append((name, facts["key"], engine.dirty))
        return False

    monkeypatch.setattr(engine_module, "failpoint", record)
    receiving = Receiving(engine, RECEIVE, {"w": torch.zeros(4)})
    daemon.seen("receive")
    _commit(daemon, RECEIVE)
    receiving.join()
    assert reached == [("apply", KEY, True)]


@pytest.mark.parametrize(
    ("ticket", "error", "field"),
    [(APPLY, InputError, "ticket.kind"), (Ticket.from_json({**TICKET, "replica": "r9"}), Refused, "ticket.replica"),
     (_newer(RECEIVE, -7), Refused, "ticket")],
)  # fmt: skip
def test_wrong_tickets(daemon: FakeDaemon, engine: Engine, ticket: Ticket, error: type[InputError], field: str) -> None:
    """A ticket of another kind, of another replica, or older than what is served is refused before dirty is set."""
    engine.client.page.generation, engine.client.page.revision = 1, 7
    with pytest.raises(error) as caught:
        engine.receive(ticket, {"w": torch.zeros(4)})
    assert caught.value.field == field
    assert not engine.dirty


def test_bad_mode(daemon: FakeDaemon, engine: Engine) -> None:
    """An unknown mode and a keep that is no list are refused."""
    with pytest.raises(InputError, match="mode: expected in_place, host_shadow or device_shadow"):
        engine.register(LAYOUT, mode="magic")
    with pytest.raises(InputError, match="keep: expected a list of patterns"):
        engine.register(LAYOUT, keep="kv.*")


def test_shadow_commit_and_apply(daemon: FakeDaemon, shadowed: tuple[Engine, int]) -> None:
    """Taking an apply ticket is the commit: on the page, then told; apply() copies all but what is kept."""
    engine, shadow = shadowed
    tensors = {"w": torch.zeros(4), "kv.scale": torch.full((1,), 9.0)}
    os.pwrite(shadow, torch.arange(4.0).numpy().tobytes(), 0)
    daemon.page(KEY).set_shadow_publication(1, 7)
    daemon.say(KEY, "ticket", ticket=APPLY.to_json())
    assert daemon.page(KEY).taken is None
    assert engine.pending(wait=10) == APPLY
    assert daemon.page(KEY).taken == Taken(1, 7, 5)
    assert daemon.seen("committed")["ticket"] == APPLY.to_json()
    assert (engine.publication, tensors["w"].tolist()) == (None, [0, 0, 0, 0])
    engine.apply(APPLY, tensors)
    assert (engine.publication, engine.step, engine.dirty) == ((1, 7), 3, False)
    assert (tensors["w"].tolist(), tensors["kv.scale"].tolist()) == ([0, 1, 2, 3], [9])
    assert daemon.seen("applied")["ticket"] == APPLY.to_json()
    assert engine.pending() is None
    assert daemon.seen("register")["keep"] == ["kv.*", "extra.*"]


def test_taken_ticket_is_frozen(daemon: FakeDaemon, shadowed: tuple[Engine, int]) -> None:
    """A newer ticket replaces one that was not taken; after pending() returned it, it stays until it is applied."""
    engine, _shadow = shadowed
    daemon.page(KEY).set_shadow_publication(1, 8)
    daemon.say(KEY, "ticket", ticket=APPLY.to_json())
    daemon.say(KEY, "ticket", ticket=_newer(APPLY).to_json())
    taken = engine.pending(wait=10)
    assert taken == _newer(APPLY)
    daemon.say(KEY, "ticket", ticket=_newer(APPLY, 2).to_json())
    assert engine.pending() == taken
    engine.apply(taken, {"w": torch.zeros(4)})
    daemon.page(KEY).set_shadow_publication(1, 9)
    assert engine.pending(wait=10) == _newer(APPLY, 2)
    daemon.seen("committed", 2)
    assert [message["ticket"]["revision"] for message in daemon.of("committed")] == [8, 9]


def test_a_ticket_to_apply_what_is_served_is_not_taken(daemon: FakeDaemon, shadowed: tuple[Engine, int]) -> None:
    """It is for another rank of the replica. Whoever does nothing about it is not stuck with it: the next one comes."""
    engine, _shadow = shadowed
    daemon.page(KEY).set_shadow_publication(1, 7)
    engine.apply(APPLY, {"w": torch.zeros(4)})
    again = Ticket.from_json({**APPLY.to_json(), "token": APPLY.token + 1})
    daemon.say(KEY, "ticket", ticket=again.to_json())
    assert engine.pending(wait=10) == again
    assert daemon.page(KEY).taken == Taken(1, 7, APPLY.token)
    daemon.page(KEY).set_shadow_publication(1, 8)
    daemon.say(KEY, "ticket", ticket=_newer(APPLY).to_json())
    assert engine.pending(wait=10) == _newer(APPLY)
    assert daemon.page(KEY).taken == Taken(1, 8, APPLY.token)


def test_apply_of_another_shadow(daemon: FakeDaemon, shadowed: tuple[Engine, int]) -> None:
    """A shadow that holds another publication is refused before a byte moves, and the ticket is given up."""
    engine, _shadow = shadowed
    daemon.page(KEY).set_shadow_publication(1, 7)
    daemon.say(KEY, "ticket", ticket=APPLY.to_json())
    ticket = engine.pending(wait=10)
    assert ticket is not None
    daemon.page(KEY).set_shadow_publication(1, 8)
    weights = torch.full((4,), 5.0)
    with pytest.raises(Refused, match=r"the publication in the shadow, \(1, 8\)"):
        engine.apply(ticket, {"w": weights})
    assert (weights.tolist(), engine.dirty, engine.pending()) == ([5, 5, 5, 5], False, None)


@pytest.mark.parametrize("change", ["word", "publication"])
def test_apply_of_a_shadow_that_changes(
    daemon: FakeDaemon, shadowed: tuple[Engine, int], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A shadow that changes during the copy leaves the rank dirty and the publication as it was (I1)."""
    engine, _shadow = shadowed
    page = daemon.page(KEY)
    page.set_shadow_publication(1, 7)

    def overwrite(name: str, **facts: str) -> bool:
        if change == "word":
            page.shadow_loan_word += 1
        else:
            page.set_shadow_publication(1, 8)
        return False

    monkeypatch.setattr(engine_module, "failpoint", overwrite)
    with pytest.raises(ReceiveFailed, match="the shadow changed while it was copied"):
        engine.apply(APPLY, {"w": torch.zeros(4)})
    assert (engine.dirty, engine.publication) == (True, None)


def _received(daemon: FakeDaemon, engine: Engine, weights: torch.Tensor) -> None:
    receiving = Receiving(engine, RECEIVE, {"w": weights})
    daemon.seen("receive")
    _commit(daemon, RECEIVE)
    assert receiving.join().error is None


def _next_daemon(daemon: FakeDaemon, engine: Engine) -> dict[str, Any]:
    """What a daemon that comes anew is told."""
    daemon.stop()
    assert engine.pending() is None
    daemon.start()
    deadline = time.monotonic() + 10
    while not engine.client.ready:
        assert engine.pending() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return daemon.of("register")[-1]


def test_pending_brings_the_daemon_back(daemon: FakeDaemon, engine: Engine) -> None:
    """pending() returns None without a daemon and registers with the next one, telling what is served."""
    _received(daemon, engine, torch.zeros(4))
    state = _next_daemon(daemon, engine)["state"]
    assert state == {"generation": 1, "revision": 7, "step": 3, "token": 5, "dirty": False}
    daemon.say(KEY, "ticket", ticket=_newer(RECEIVE).to_json())
    assert engine.pending(wait=10) == _newer(RECEIVE)


@pytest.mark.parametrize("staged", [False, True])
def test_the_next_daemon_is_lent_what_is_served(daemon: FakeDaemon, engine: Engine, staged: bool) -> None:
    """A rank's neighbours can read it from a daemon that came anew, wherever its weights are."""
    found: list[bytes] = []

    def register(session, message, fds):
        (entry,) = message["shadow"]["memory"]
        found.append(os.pread(fds[1 + entry["fd"]], entry["nbytes"], entry["offset"]))
        return {"digest": "d"}, []

    weights = torch.zeros(4) if staged else shared_empty((4,), torch.float32)
    weights += torch.arange(4.0)
    _received(daemon, engine, weights)
    daemon.replies["register"] = register
    told = _next_daemon(daemon, engine)
    assert (told["mode"], told["shadow"]["device"]) == ("in_place", None)
    assert found == [torch.arange(4.0).numpy().tobytes()]


def test_what_was_released_is_not_lent_again(daemon: FakeDaemon, engine: Engine) -> None:
    """Its owner frees it, or uses it for something else."""
    _received(daemon, engine, shared_empty((4,), torch.float32))
    engine.release()
    assert "shadow" not in _next_daemon(daemon, engine)


def test_a_dirty_rank_is_not_lent_with_the_registration(daemon: FakeDaemon, engine: Engine) -> None:
    """What a receive left half-written belongs to no publication."""
    weights = shared_empty((4,), torch.float32)
    _received(daemon, engine, weights)
    receiving = Receiving(engine, _newer(RECEIVE), {"w": weights})
    daemon.seen("receive", 2)
    daemon.say(KEY, "failed", reason="superseded")
    assert isinstance(receiving.join().error, ReceiveFailed)
    told = _next_daemon(daemon, engine)
    assert (told["state"]["dirty"], "shadow" in told) == (True, False)


def test_another_layout_ends_what_was_lent(daemon: FakeDaemon, engine: Engine) -> None:
    """Memory of the old geometry says nothing about the new one."""
    _received(daemon, engine, shared_empty((4,), torch.float32))
    engine.register(LAYOUT)
    assert "shadow" not in daemon.of("register")[-1]


def test_release(daemon: FakeDaemon, engine: Engine) -> None:
    """release() ends the loan first and returns with the daemon's answer; without a daemon it says so. What stands on
    the page between them is ended as well: another lane may have begun to read under it."""
    word, seen = engine.client.page.loan_word, []

    def answer(session, message, fds):
        seen.append(session.page.loan_word)
        return {}, []

    daemon.replies["release"] = answer
    engine.release()
    assert (seen, engine.client.page.loan_word) == ([word + 1], word + 2)
    daemon.stop()
    with pytest.raises(DaemonUnavailable):
        engine.release()


def test_release_waits_for_the_registration_that_is_under_way(daemon: FakeDaemon, engine: Engine) -> None:
    """The next daemon may know the memory already, though its answer was not read yet."""
    _received(daemon, engine, shared_empty((4,), torch.float32))
    daemon.stop()
    assert engine.pending() is None
    daemon.start()
    engine.client._retry_at = 0.0
    engine.release()
    assert [request["method"] for request in daemon.requests[-2:]] == ["register", "release"]


def test_starts_without_daemon(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An engine starts without a daemon, keeps its layout and asks for tickets in vain."""
    with connect_engine("grpo", "r0", 0, 1, str(tmp_path / "none.sock")) as engine:
        engine.register(LAYOUT)
        assert engine.pending() is None
        assert engine.pending(wait=0.05) is None
        with pytest.raises(ReceiveFailed, match="none came back"):
            engine.receive(RECEIVE, {"w": torch.zeros(4)}, timeout=0.2)
    assert len(caplog.records) == 1


def test_bad_tensors_are_refused_first(daemon: FakeDaemon, engine: Engine) -> None:
    """A tensor that is not the layout's is refused before the rank becomes dirty."""
    with pytest.raises(InputError, match=r"tensors\['w'\]"):
        engine.receive(RECEIVE, {"w": torch.zeros(5)})
    assert not engine.dirty
    assert daemon.of("receive") == []
