"""One loan after another: what a daemon that was stopped says, or does, of the first is nothing to the second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_daemon import TICKET, FakeDaemon, Mover, Plain

from refitd.errors import DaemonUnavailable, DeviceError, ProtocolError, ReceiveFailed, Refused
from refitd.hook.blocks import blocks_of
from refitd.hook.channel import readable
from refitd.hook.engine import Engine, connect_engine
from refitd.hook.loan import Loan
from refitd.hook.memory import Staging
from refitd.hook.messages import Ticket, check
from refitd.hook.page import ControlPage, Taken

KEY, RECEIVE = "engine/r0/0", Ticket.from_json(TICKET)
SAID = {"commit": {"ticket": TICKET}, "failed": {"reason": "superseded"}, "relend": {"reason": "the mover died"}}


@pytest.fixture
def engine(daemon: FakeDaemon, mover: Mover) -> Iterator[Engine]:
    daemon.replies["receive"] = mover.reply
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as made:
        made.register(Plain({"w": (4, "float32")}))
        yield made


@pytest.mark.parametrize("event", SAID)
def test_what_is_said_of_an_earlier_receive(event: str, daemon: FakeDaemon, engine: Engine, mover: Mover) -> None:
    """It was on its way when the receive gave up: a commit of bytes that went with the staging copy above all."""
    weights, words = torch.full((4,), 7.0), list[int]()

    def late(session: Any, message: dict[str, Any], fds: Any) -> Any:
        words.append(message["word"])
        if len(words) > 1:
            session.event(event, loan=words[0], **SAID[event])
        return mover.reply(session, message, fds)

    daemon.replies["receive"] = late
    for _ in range(2):
        with pytest.raises(ReceiveFailed, match="no commit came within the timeout"):
            engine.receive(RECEIVE, {"w": weights}, timeout=0.2)
    assert (engine.dirty, engine.publication, len(words)) == (True, None, 2)
    assert daemon.of("relent") == daemon.of("committed") == []
    assert weights.tolist() == [7, 7, 7, 7]


def test_what_is_said_of_this_one_counts_after_it_was_lent_again(
    daemon: FakeDaemon, engine: Engine, mover: Mover
) -> None:
    """The loan's name stays, though its word changes."""

    def again(session: Any, message: dict[str, Any], fds: Any) -> Any:
        for event in ("relend", "commit"):
            session.event(event, loan=message["word"], **SAID[event])
        return mover.reply(session, message, fds)

    daemon.replies["receive"] = again
    assert engine.receive(RECEIVE, {"w": torch.zeros(4)}, timeout=20) == RECEIVE
    assert daemon.seen("relent")["word"] == daemon.seen("receive")["word"] + 1


def test_a_release_that_is_not_answered_ends_the_connection(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may carry it out later and forget memory that is in use by then; it is told of it anew."""
    monkeypatch.setattr("refitd.hook.engine.RELEASE_SECONDS", 0.2)
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as engine:
        engine.register(Plain({"w": (4, "float32")}), mode="host_shadow")
        daemon.freeze()
        with pytest.raises(Refused) as caught:
            engine.release()
        daemon.thaw()
        assert (caught.value.field, caught.value.expected) == ("release", "an answer within 0.2 s")
        engine.pending(wait=5.0)
        assert len(daemon.of("register")) == 2


def test_a_loan_that_could_not_be_made_leaves_a_clean_rank_clean(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was lent."""

    def full(*_arguments: object) -> None:
        raise DeviceError("copy", "out of memory")

    monkeypatch.setattr(Loan, "_fill_staging", full)
    with pytest.raises(DeviceError):
        engine.receive(RECEIVE, {"w": torch.zeros(4)})
    assert not engine.dirty


def test_a_ticket_of_what_the_shadow_does_not_hold_any_more_is_not_taken(daemon: FakeDaemon, engine: Engine) -> None:
    """It is being filled with a newer publication: the others could not apply this one. Its daemon sees what was
    written, whichever looked first."""
    engine.register(Plain({"w": (4, "float32")}), mode="host_shadow")
    page, ticket = engine.client.page, {**TICKET, "kind": "apply"}
    daemon.say(KEY, "ticket", ticket=ticket)
    assert engine.pending(wait=0.3) is None
    assert page.taken == Taken(1, 7, 5)
    page.set_shadow_publication(1, 7)
    daemon.say(KEY, "ticket", ticket=ticket)
    assert engine.pending(wait=10) == Ticket.from_json(ticket)
    daemon.seen("committed")
    assert len(daemon.of("committed")) == 1


def test_a_new_shadow_holds_nothing(engine: Engine) -> None:
    """Whatever the page says of the one before."""
    engine.client.page.set_shadow_publication(1, 7)
    engine.register(Plain({"w": (4, "float32")}), mode="host_shadow")
    assert engine.client.page.shadow_publication == (0, 0)


def test_what_the_last_daemon_said_of_the_shadow_before_is_not_said_of_a_new_one(
    daemon: FakeDaemon, engine: Engine
) -> None:
    """It filled the one before until it ended, after the page was emptied, and never heard of the new one."""
    engine.register(Plain({"w": (4, "float32")}), mode="host_shadow")
    page, words = engine.client.page, list[tuple[int, int]]()
    ticket = Ticket.from_json({**TICKET, "kind": "apply"})

    def dies(session: Any, _message: dict[str, Any], _fds: Any) -> Any:
        page.set_shadow_publication(1, 7)
        session.close("it ends")
        return {}, []

    def lives(_session: Any, _message: dict[str, Any], _fds: Any) -> Any:
        words.append(page.shadow_publication)
        return {"digest": "d"}, []

    daemon.replies["register"] = dies
    engine.client._backoff = 60.0
    engine.register(Plain({"w": (4, "float32")}), mode="host_shadow")
    assert page.shadow_publication == (1, 7)
    with pytest.raises(Refused, match=r"the publication in the shadow, \(0, 0\)"):
        engine.apply(ticket, {"w": torch.zeros(4)})
    daemon.replies["register"] = lives
    engine.client._retry_at = 0.0
    assert engine.pending(wait=1.0) is None
    assert words == [(0, 0)]
    page.set_shadow_publication(1, 7)
    engine.apply(ticket, {"w": torch.zeros(4)})
    assert engine.publication == (1, 7)


def test_a_client_that_closes_ends_its_loan(daemon: FakeDaemon, engine: Engine) -> None:
    """Its daemon hears of the end later than its memory changes, and movers read the page until then."""
    page = ControlPage.map(engine.client.page.fd)
    word = page.loan_word
    engine.close()
    engine.close()
    assert page.loan_word == word + 1
    page.close()


def test_a_worker_that_is_only_told_to_apply_reads_what_its_daemon_says(daemon: FakeDaemon, engine: Engine) -> None:
    """Else the socket fills, and the daemon hangs up on it."""
    engine.register(Plain({"w": (4, "float32")}), mode="host_shadow")
    engine.client.page.set_shadow_publication(1, 7)
    channel = engine.client._channel
    assert channel is not None
    for _time in range(3):
        engine.apply(Ticket.from_json({**TICKET, "kind": "apply"}), {"w": torch.zeros(4)})
        assert len(channel._forgotten) == 1  # the answers of the calls before it were read
        assert readable(channel._sock.fileno(), time.monotonic() + 10)


def test_what_was_staged_is_lent_again_only_from_where_it_is(engine: Engine) -> None:
    """Memory that a driver cannot share at this moment would be described as a new arena: zeros, read as weights."""
    served, weights = engine._served, {"w": torch.ones(4)}
    blocks = blocks_of(weights, {"w": (4, "float32")})
    arena = engine._staging.export(blocks).arena
    served.keep(blocks, arena)
    with served.lend() as (fields, fds):
        assert ([region["name"] for region in fields["shadow"]["memory"]], len(fds)) == (["w"], 1)
    served.keep(blocks, None)  # as where all was lent on a GPU
    with served.lend() as lent:
        assert lent == ({}, ())
    engine._staging.discard()
    served.keep(blocks, arena)
    with served.lend() as lent:
        assert lent == ({}, ())


def test_a_shadow_on_a_gpu_that_cannot_be_shared_now_is_registered_later() -> None:
    """Not as host memory, which nothing was ever written to and which it would not be filled from."""
    staging = Staging()
    blocks = blocks_of({"w": torch.ones(4)}, {"w": (4, "float32")})
    with pytest.raises(DaemonUnavailable, match="cannot be shared at present"), staging.registered(blocks):
        pass


@pytest.mark.parametrize("loan", [-1, "7", None, 1 << 64])
def test_a_loan_that_is_no_word_is_refused(loan: object) -> None:
    """Named, with what was expected."""
    with pytest.raises(ProtocolError) as caught:
        check({"event": "failed", "reason": "superseded", "loan": loan})
    assert (caught.value.field, caught.value.expected) == ("loan", "an unsigned 64-bit integer")
