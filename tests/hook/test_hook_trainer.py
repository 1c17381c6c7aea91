"""The trainer's side, against a real HookServer with a scripted handler."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_daemon import REPORT, FakeDaemon, Plain

from refitd.errors import InputError, LayoutError, Refused
from refitd.hook.memory import shared_empty
from refitd.hook.messages import RELEASED, SKIPPED, Report
from refitd.hook.trainer import Trainer, connect_trainer

KEY = "trainer/run1/0"
LAYOUT = Plain({"w": (4, "float32")})


@pytest.fixture
def trainer(daemon: FakeDaemon) -> Iterator[Trainer]:
    with connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as made:
        made.register(LAYOUT)
        yield made


def _lone(path: Path) -> Trainer:
    made = connect_trainer("grpo", "run1", 0, 1, str(path))
    made.register(LAYOUT)
    return made


def test_released_after_its_readers(daemon: FakeDaemon, trainer: Trainer) -> None:
    """Live memory is lent under the loan word of the publish, and the word changes before RELEASED is returned."""
    weights = shared_empty((4,), torch.float32)
    offer = trainer.publish(3, {"w": weights})
    published = daemon.seen("publish")
    assert (published["seq"], published["step"], published["word"]) == (1, 3, daemon.page(KEY).loan_word)
    daemon.say(KEY, "planned", seq=1)
    daemon.say(KEY, "released", seq=1, outcome="RELEASED", reason="")
    assert offer.released(timeout=10) is RELEASED
    assert offer.reason == ""
    assert daemon.page(KEY).loan_word == published["word"] + 1
    assert offer.released() is RELEASED
    assert daemon.page(KEY).loan_word == published["word"] + 1


def test_copied_weights_are_released_at_once(daemon: FakeDaemon, trainer: Trainer) -> None:
    """Weights outside of an arena were copied by publish: they may change at once, and the copy stays on loan."""
    weights = torch.arange(4.0)
    copies = []
    daemon.replies["publish"] = lambda session, message, fds: (copies.append(os.pread(fds[0], 16, 0)), ({}, []))[1]
    offer = trainer.publish(1, {"w": weights})
    word = daemon.page(KEY).loan_word
    assert offer.released(timeout=0) is RELEASED
    assert copies == [weights.numpy().tobytes()]
    assert daemon.page(KEY).loan_word == word == daemon.seen("publish")["word"]
    trainer.publish(2, {"w": weights})
    assert daemon.page(KEY).loan_word > word


def test_unchanged_memory_is_not_described_again(daemon: FakeDaemon, trainer: Trainer) -> None:
    """The second publish of the same memory carries no memory; that of other memory does."""
    weights = shared_empty((4,), torch.float32)
    for tensor in (weights, weights, shared_empty((4,), torch.float32)):
        trainer.publish(1, {"w": tensor})
    assert [request["memory"] is None for request in daemon.of("publish")] == [False, True, False]


def test_skipped_by_the_daemon(daemon: FakeDaemon, trainer: Trainer) -> None:
    """The daemon may skip an offer and says why."""
    offer = trainer.publish(1, {"w": shared_empty((4,), torch.float32)})
    daemon.say(KEY, "released", seq=1, outcome="SKIPPED", reason="the job is paused")
    assert offer.released(timeout=10) is SKIPPED
    assert offer.reason == "the job is paused"


def test_not_planned_in_time(daemon: FakeDaemon, trainer: Trainer) -> None:
    """An offer that no lane plans is skipped long before the caller's timeout, and withdrawn with its loan ended."""
    trainer.plan_seconds = 0.05
    offer = trainer.publish(1, {"w": shared_empty((4,), torch.float32)})
    assert offer.released(timeout=60) is SKIPPED
    assert "planned" in offer.reason
    assert daemon.seen("withdraw")["seq"] == 1
    assert daemon.page(KEY).loan_word == daemon.seen("publish")["word"] + 1


def test_callers_timeout(daemon: FakeDaemon, trainer: Trainer) -> None:
    """A planned offer is held until the caller's timeout; a later release changes nothing."""
    offer = trainer.publish(1, {"w": shared_empty((4,), torch.float32)})
    daemon.say(KEY, "planned", seq=1)
    assert offer.released(timeout=0.1) is SKIPPED
    daemon.seen("withdraw")
    daemon.say(KEY, "released", seq=1, outcome="RELEASED", reason="")
    assert offer.released() is SKIPPED


def test_newer_publish_replaces(daemon: FakeDaemon, trainer: Trainer) -> None:
    """Publishing again ends the loan of the offer before."""
    weights = shared_empty((4,), torch.float32)
    first, _second = trainer.publish(1, {"w": weights}), trainer.publish(2, {"w": weights})
    assert first.released() is SKIPPED
    words = [request["word"] for request in daemon.of("publish")]
    assert words[0] < words[1]


def test_refused_publish(daemon: FakeDaemon, trainer: Trainer) -> None:
    """A publish that the daemon refuses is skipped with the daemon's words; the trainer goes on."""

    def refuse(session, message, fds):
        raise Refused("run", "the newest run", "an older one")

    daemon.replies["publish"] = refuse
    offer = trainer.publish(1, {"w": torch.zeros(4)})
    assert offer.released() is SKIPPED
    assert offer.reason == "run: expected the newest run, got an older one"


def test_report(daemon: FakeDaemon, trainer: Trainer) -> None:
    """committed() returns the stored report as soon as the daemon has it."""
    offer = trainer.publish(3, {"w": torch.zeros(4)})
    daemon.say(KEY, "report", seq=1, report=REPORT)
    assert offer.committed(timeout=10) == Report.from_json(REPORT)


def test_report_is_closed_at_the_timeout(daemon: FakeDaemon, trainer: Trainer) -> None:
    """When the timeout passes the daemon is asked to close the report, and its answer is returned."""
    daemon.replies["report"] = lambda session, message, fds: ({"report": REPORT if message["close"] else None}, [])
    offer = trainer.publish(3, {"w": torch.zeros(4)})
    assert offer.committed(timeout=0.05, min_replicas=2) == Report.from_json(REPORT)
    assert [(m["close"], m["min_replicas"]) for m in daemon.of("report")] == [(False, 2), (True, 2)]


def test_a_copy_that_is_skipped_is_not_waited_for(daemon: FakeDaemon, trainer: Trainer) -> None:
    """Copied weights are RELEASED at once; where the daemon skips the copy later, committed() ends and says why."""
    daemon.replies["report"] = lambda session, message, fds: ({"report": None}, [])
    offer = trainer.publish(1, {"w": torch.zeros(4)})
    assert offer.released() is RELEASED
    daemon.say(KEY, "released", seq=1, outcome="SKIPPED", reason="no lane has planned it within 2 s")
    assert offer.committed(timeout=1e9) == Report(0, 0, 1, [], {}, "no lane has planned it within 2 s")
    assert offer.released() is RELEASED


def test_no_daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a daemon everything returns quickly and says so; one warning an outage."""
    with _lone(tmp_path / "none.sock") as trainer:
        began = time.monotonic()
        for step in range(5):
            offer = trainer.publish(step, {"w": torch.zeros(4)})
            assert offer.released() is SKIPPED
            assert "No such file" in offer.reason
            assert offer.committed() == Report(0, 0, step, [], {}, "no daemon")
        assert time.monotonic() - began < 2
    assert len(caplog.records) == 1


def test_frozen_daemon(daemon: FakeDaemon, trainer: Trainer) -> None:
    """A stopped daemon costs the trainer about a second once; after that each step is SKIPPED at once."""
    trainer.publish(1, {"w": torch.zeros(4)})
    daemon.freeze()
    offer = trainer.publish(2, {"w": shared_empty((4,), torch.float32)})
    word = trainer.client.page.loan_word
    assert offer.released(timeout=60) is SKIPPED
    assert "heartbeat" in offer.reason
    assert trainer.client.page.loan_word == word + 1
    began = time.monotonic()
    assert trainer.publish(3, {"w": torch.zeros(4)}).released() is SKIPPED
    assert time.monotonic() - began < 1
    daemon.thaw()


def test_registers_again_by_itself(daemon: FakeDaemon, trainer: Trainer) -> None:
    """After a daemon's death an open offer is SKIPPED; the next daemon gets the layout and the next publish."""
    incarnation = daemon.sessions[KEY].incarnation
    offer = trainer.publish(1, {"w": shared_empty((4,), torch.float32)})
    daemon.stop()
    assert offer.released() is SKIPPED
    assert offer.committed() == Report(0, 0, 1, [], {}, "no daemon")
    daemon.start()
    trainer.client._retry_at = 0.0  # as if the backoff had passed
    offer = trainer.publish(2, {"w": torch.zeros(4)})
    assert offer.released() is RELEASED
    assert daemon.sessions[KEY].incarnation == incarnation
    assert [message["method"] for message in daemon.requests] == ["register", "publish", "register", "publish"]
    assert daemon.requests[-1]["memory"] is not None


def test_layout_is_refused(daemon: FakeDaemon) -> None:
    """What the daemon finds wrong with a layout is raised with every violation; a better one may follow."""
    wrong = [InputError("w.shape", "(2, 2)", "(4,)"), InputError("b", "a holder", "none")]

    def refuse(session, message, fds):
        raise LayoutError(wrong)

    daemon.replies["register"] = refuse
    with connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as trainer:
        with pytest.raises(LayoutError) as caught:
            trainer.register(LAYOUT)
        assert [(v.field, v.expected, v.got) for v in caught.value.violations] == [
            ("w.shape", "(2, 2)", "(4,)"), ("b", "a holder", "none"),
        ]  # fmt: skip
        del daemon.replies["register"]
        trainer.register(LAYOUT)
        assert trainer.publish(1, {"w": torch.zeros(4)}).released() is RELEASED


def test_rank_is_claimed(daemon: FakeDaemon, trainer: Trainer) -> None:
    """Connecting as a rank that somebody else has raises Refused."""
    with pytest.raises(Refused, match="nobody has claimed"):
        connect_trainer("grpo", "run1", 0, 1, str(daemon.path))


def test_a_rank_that_comes_free_is_waited_for(daemon: FakeDaemon, trainer: Trainer) -> None:
    """The process before may have been killed a moment ago, and not have ended yet."""
    threading.Timer(0.3, trainer.close).start()
    with connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as successor:
        successor.register(LAYOUT)
        assert successor.publish(1, {"w": torch.zeros(4)}).released() is RELEASED


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(("a/b", "run1", 0, 1), "job"), (("grpo", "", 0, 1), "run"), (("grpo", "run1", 1, 1), "rank"),
     (("grpo", "run1", 0, 0), "world_size")],
)  # fmt: skip
def test_bad_identity(arguments: tuple[str, str, int, int], field: str) -> None:
    """Names and ranks that cannot be are refused before anything is opened."""
    with pytest.raises(InputError) as caught:
        connect_trainer(*arguments)
    assert caught.value.field == field


def test_publish_before_register(daemon: FakeDaemon) -> None:
    """Publishing without a layout is an error of the caller."""
    with (
        connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as trainer,
        pytest.raises(InputError, match="a registered layout"),
    ):
        trainer.publish(1, {})


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_forked_child_lets_go(daemon: FakeDaemon, trainer: Trainer) -> None:
    """A forked child has no socket of its parent and cannot use its trainer; the parent's registration outlives it."""
    pid = os.fork()
    if pid == 0:
        try:
            trainer.publish(1, {"w": torch.zeros(4)})
        except Refused as error:
            os._exit(7 if error.field == "process" and not _sockets() else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert daemon.ends == []
    assert trainer.publish(1, {"w": torch.zeros(4)}).released() is RELEASED


def _sockets() -> list[str]:
    """Descriptors of this process that are connected by name to the hook."""
    from refitd.hook import client

    return [one.identity.key for one in client._clients if one._channel is not None]


def test_closed_trainer(daemon: FakeDaemon, trainer: Trainer) -> None:
    """A closed trainer ends its loan and its registration, and says so when it is used."""
    offer = trainer.publish(3, {"w": shared_empty((4,), torch.float32)})
    trainer.close()
    assert offer.released(timeout=10) is SKIPPED
    assert "a closed one" in offer.reason
    daemon.until(lambda: bool(daemon.ends))
    with pytest.raises(Refused, match="a closed one"):
        trainer.publish(1, {"w": torch.zeros(4)})


def test_many_publishes_leave_nothing_behind(daemon: FakeDaemon, trainer: Trainer) -> None:
    """Descriptors do not grow with the number of publishes."""
    for step in range(3):
        trainer.publish(step, {"w": torch.zeros(4)}).released()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for step in range(30):
        trainer.publish(step, {"w": torch.zeros(4)}).released()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
