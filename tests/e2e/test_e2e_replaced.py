"""A process hangs, and its scheduler starts the same rank on another node: the later one speaks for it from then on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from e2e_refit import PATIENT, WHOLE, receive_all, weights

import refitd
from refitd.testing import LocalDaemon, split_layout, wait_until

SECONDS = 60.0
LAYOUT = split_layout(WHOLE, 0, 1)
REFUSAL = "rank: expected engine/r0/0 to be free, got a later process speaks for it on a"


def ranks(daemon: LocalDaemon) -> list[str]:
    return [rank["key"] for rank in daemon.status()["jobs"].get("job", {}).get("ranks", [])]


@contextmanager
def engine_process(daemon: LocalDaemon, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(Path(__file__).with_name("engine_process.py")), daemon.socket, "job", "r0"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_later_process_of_a_rank_takes_its_place_whichever_node_joined_first(etcd: str, tmp_path: Path) -> None:
    """The lane goes on with it at once; the one that was stopped is told why nobody calls it when it wakes, and by the
    next daemon of its node too."""
    log = tmp_path / "log"
    with ExitStack() as stack:
        a, b = (stack.enter_context(LocalDaemon(etcd, name=name, config=PATIENT)) for name in "ab")
        trainer = stack.enter_context(refitd.connect_trainer("job", "run", 0, 1, a.socket))
        trainer.register(LAYOUT)
        wait_until(lambda: ranks(a) == ["trainer/run/0"], "node a to join", SECONDS)
        hung = stack.enter_context(engine_process(b, log))
        wait_until(lambda: a.status()["jobs"]["job"]["lanes"], "the lane to be made", SECONDS)
        hung.send_signal(signal.SIGSTOP)
        fresh = stack.enter_context(refitd.connect_engine("job", "r0", 0, 1, a.socket))
        fresh.register(LAYOUT)
        wait_until(lambda: ranks(b) == [], "node b to give the rank up", SECONDS)
        offer, received = trainer.publish(1, {"w": weights(1)}), np.zeros_like(weights(1))
        receive_all([fresh], [{"w": received}])
        assert offer.released(SECONDS) == refitd.RELEASED
        assert offer.committed(SECONDS).committed == ["r0"]
        assert received.tolist() == weights(1).tolist()
        hung.send_signal(signal.SIGCONT)
        for times in (1, 2):
            wait_until(lambda n=times: log.read_text().splitlines().count(REFUSAL) >= n, "the refusal", SECONDS)
            b.kill()
            b.start()
        assert hung.poll() is None, "nobody ends it"
        assert ranks(b) == []
        assert ranks(a) == ["engine/r0/0", "trainer/run/0"]
