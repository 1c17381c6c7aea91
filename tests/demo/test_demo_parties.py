"""The demo's processes and the driver's picture of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refitd.demo.cluster import Cluster, Daemon, descendants, tail
from refitd.demo.driver import parse
from refitd.demo.faults import FailpointServer, Fault, choose
from refitd.demo.ledger import Ledger
from refitd.demo.nursery import Nursery, Options
from refitd.demo.parties import RETRY_SECONDS, Engine, Replica, Trainer, until
from refitd.demo.report import Result
from refitd.failpoints import failpoint
from refitd.hook.wire import Connection

TICKET = {"kind": "receive", "job": "demo", "replica": "r0", "generation": 1, "revision": 9, "step": 2, "token": 3}


def echo(options: Options, connection: Connection) -> None:
    if options.get("fail"):
        raise ValueError("as it was told")
    print("started as", options["name"], flush=True)
    while True:
        message, _fds = connection.receive()
        connection.send({"echo": message, "pid": os.getpid()})


@pytest.fixture
def nursery() -> Any:
    with_children = Nursery.start(echo)
    yield with_children
    with_children.close()


def test_children_of_the_nursery_talk_log_and_die_with_it(tmp_path: Path) -> None:
    """A forked child answers on its socket, logs to its file, and ends when the nursery does."""
    nursery = Nursery.start(echo)
    pid, sock = nursery.spawn({"name": "one"}, tmp_path / "log")
    connection = Connection(sock)
    connection.send({"hello": 1})
    assert connection.receive(timeout=10)[0] == {"echo": {"hello": 1}, "pid": pid}
    assert (tmp_path / "log").read_text() == "started as one\n"
    nursery.close()
    with pytest.raises(EOFError):
        connection.receive(timeout=10)
    connection.close()


def test_a_child_that_fails_leaves_its_reason_in_the_log(nursery: Nursery, tmp_path: Path) -> None:
    """The driver sees the end of the socket; the log has the traceback."""
    _pid, sock = nursery.spawn({"fail": True}, tmp_path / "log")
    connection = Connection(sock)
    with pytest.raises(EOFError):
        connection.receive(timeout=10)
    connection.close()
    assert tail(tmp_path / "log", 1) == "ValueError: as it was told"


def engines() -> tuple[Replica, list[list[dict[str, Any]]]]:
    """A replica of two ranks that remember what they were told."""
    told: list[list[dict[str, Any]]] = [[], []]
    ranks = []
    for rank in (0, 1):
        options = {"role": "engine", "node": "c", "replica": "r0", "rank": rank}
        engine = Engine(f"r0 rank {rank}", options, Daemon("c", Path("/none")), Path("/none/log"), ready=True)
        engine.tell = lambda rank=rank, **command: told[rank].append(command)  # type: ignore[method-assign]
        ranks.append(engine)
    return Replica("r0", ranks, Ledger({2: ["a", "b"]})), told


def test_a_replica_serves_again_when_every_rank_has_switched() -> None:
    """A ticket of the lead goes to all ranks; only when the last one took it are they told to serve."""
    replica, told = engines()
    lead, worker = replica.engines
    replica.hear(lead, {"event": "ticket", "ticket": TICKET})
    assert told[0] == told[1] == [{"do": "hold"}, {"do": "ticket", "ticket": TICKET}]
    replica.hear(lead, {"event": "switched", "ticket": TICKET, "at": 5.0})
    assert len(told[0]) == 2
    replica.hear(worker, {"event": "switched", "ticket": TICKET, "at": 7.0})
    assert told[0][-1] == told[1][-1] == {"do": "serve", "spell": 1}
    assert replica.switched_at == 7.0
    replica.hear(lead, {"event": "serving", "step": 2, "digest": "a", "spell": 1})
    assert replica.step is None
    replica.hear(worker, {"event": "serving", "step": 2, "digest": "b", "spell": 1})
    assert replica.step == 2
    assert replica.ledger.torn == []


def test_what_was_on_its_way_when_the_replica_was_held_is_not_served_with_what_comes() -> None:
    """A rank's word of an earlier spell is checked for whole weights, and is no part of the next spell."""
    replica, _told = engines()
    replica.ledger.digests = {1: ["x", "y"], 2: ["a", "b"]}
    lead, worker = replica.engines
    replica.hear(lead, {"event": "ticket", "ticket": TICKET})
    replica.hear(worker, {"event": "serving", "step": 1, "digest": "y", "spell": 0})
    for engine in (lead, worker):
        replica.hear(engine, {"event": "switched", "ticket": TICKET, "at": 1.0})
    replica.hear(lead, {"event": "serving", "step": 2, "digest": "a", "spell": 1})
    assert (replica.ledger.torn, worker.step) == ([], None)
    replica.hear(worker, {"event": "serving", "step": 1, "digest": "y", "spell": 1})
    assert replica.ledger.torn == ["r0 served steps [1, 2] at once"]
    replica.hear(worker, {"event": "serving", "step": 1, "digest": "z", "spell": 0})
    assert len(replica.ledger.torn) == 2


def test_a_failed_switch_keeps_the_replica_out_of_service() -> None:
    """One rank that could not take a ticket keeps all of them waiting, says why, and is given the ticket again."""
    replica, told = engines()
    lead, worker = replica.engines

    async def scenario() -> None:
        replica.hear(lead, {"event": "ticket", "ticket": TICKET})
        replica.hear(lead, {"event": "switched", "ticket": TICKET, "at": 1.0})
        replica.hear(worker, {"event": "failed", "why": "ReceiveFailed: x", "at": 1.0})
        await asyncio.sleep(RETRY_SECONDS * 1.5)

    asyncio.run(scenario())
    assert "serve" not in [command["do"] for command in told[0] + told[1]]
    assert replica.failures == ["r0 rank 1: ReceiveFailed: x"]
    assert [command["do"] for command in told[1]] == ["hold", "ticket", "ticket"]
    assert [command["do"] for command in told[0]] == ["hold", "ticket"]


def test_a_rank_that_comes_back_is_given_the_open_ticket() -> None:
    """Its peers wait for it in the middle of a receive; a shadow's ticket is not for a rank with an empty shadow."""
    replica, told = engines()
    lead, worker = replica.engines
    replica.hear(lead, {"event": "ticket", "ticket": TICKET})
    replica.hear(worker, {"event": "ready"})
    assert told[1][-1] == {"do": "ticket", "ticket": TICKET}
    replica.hear(lead, {"event": "ticket", "ticket": TICKET | {"kind": "apply"}})
    before = len(told[1])
    replica.hear(worker, {"event": "ready"})
    assert len(told[1]) == before


def test_a_client_is_heard_until_it_hangs_up() -> None:
    """Messages arrive in order, whatever the chunking, and the end is told once."""

    async def scenario() -> tuple[list[str], list[str]]:
        ours, theirs = socket.socketpair()
        heard: list[str] = []
        ended: list[str] = []
        trainer = Trainer("trainer 0", {"role": "trainer"}, Daemon("a", Path("/none")), Path("/none/log"))
        trainer.attach(1, ours, lambda _c, m: heard.append(m["event"]), lambda c: ended.append(c.name))
        with theirs:
            peer = Connection(theirs)
            await asyncio.to_thread(peer.send, {"event": "ready"})
            await asyncio.to_thread(peer.send, {"event": "publish", "step": 1, "at": 2.0})
            trainer.tell(do="step", step=1)
            assert (await asyncio.to_thread(peer.receive, 5))[0] == {"do": "step", "step": 1}
        await until(lambda: bool(ended), asyncio.Event(), 5)
        await trainer.close()
        return heard, ended

    assert asyncio.run(scenario()) == (["ready", "publish"], ["trainer 0"])


def test_waiting_ends_at_the_condition_or_at_the_limit() -> None:
    """`until` tells the two apart."""

    async def scenario() -> tuple[bool, bool]:
        changed = asyncio.Event()
        return await until(lambda: True, changed, 1), await until(lambda: False, changed, 0.05)

    assert asyncio.run(scenario()) == (True, False)


def test_failpoints_ask_and_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failpoint reports its facts and leaves its step out where the answer is skip."""
    facts: list[dict[str, Any]] = []

    def on_point(fact: dict[str, Any]) -> str:
        facts.append(fact)
        return "skip" if fact["name"] == "verify" else "go"

    async def scenario() -> list[bool]:
        server = FailpointServer(tmp_path / "points", on_point)
        await server.start()
        answers = [await asyncio.to_thread(failpoint, name, role="mover") for name in ("prepare", "verify")]
        await server.close()
        return answers

    monkeypatch.setenv("REFITD_FAILPOINTS", str(tmp_path / "points"))
    assert asyncio.run(scenario()) == [False, True]
    assert facts[0] == {"name": "prepare", "pid": os.getpid(), "role": "mover"}
    assert not (tmp_path / "points").exists()


def cast() -> tuple[Cluster, list[Any]]:
    daemons = {name: Daemon(name, Path("/none")) for name in "abcd"}
    clients = [
        SimpleNamespace(name=f"trainer {k}", trains=True, daemon=daemons["ab"[k // 2]], pid=100 + k, down=False)
        for k in range(4)
    ]
    for name, node in (("r0 rank 0", "c"), ("r0 rank 1", "c"), ("r1 rank 0", "c"), ("r1 rank 1", "d")):
        clients.append(
            SimpleNamespace(name=name, trains=False, daemon=daemons[node], pid=200 + len(clients), down=False)
        )
    return SimpleNamespace(daemons=daemons), clients  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("victim", "phase", "daemons", "clients"),
    [
        ("trainer", "transfer", [], ["trainer 0"]),
        ("engine", "commit", [], ["r0 rank 1"]),
        ("sources", "verify", [], ["trainer 0", "trainer 1", "trainer 2", "trainer 3"]),
        ("daemon", "prepare", ["c"], []),
        ("node", "apply", ["d"], ["r1 rank 1"]),
        ("node", "offer", ["a"], ["trainer 0", "trainer 1"]),
    ],
)
def test_each_victim_is_who_its_name_says(victim: str, phase: str, daemons: list[str], clients: list[str]) -> None:
    """Trainers and workers by name; a node with everything on it; all trainers as sources."""
    cluster, everyone = cast()
    targets = choose(victim, {"name": phase, "pid": 1}, cluster, everyone)
    assert [daemon.name for daemon in targets.daemons] == daemons
    assert [client.name for client in targets.clients] == clients


def test_a_strike_kills_at_once_and_marks_the_victims(nursery: Nursery, tmp_path: Path) -> None:
    """When strike() returns the process has its signal, and nobody counts its death as an accident."""
    pid, sock = nursery.spawn({"name": "victim"}, tmp_path / "log")
    cluster, everyone = cast()
    everyone[0].pid = pid
    fault = Fault("transfer", "trainer", "KILL")
    assert fault.pending
    fault.strike(choose("trainer", {"name": "transfer"}, cluster, everyone))
    assert (fault.active, fault.pending, fault.target, everyone[0].down) == (True, False, "trainer 0", True)
    connection = Connection(sock)
    with pytest.raises(EOFError):
        connection.receive(timeout=10)
    connection.close()


def test_descendants_are_children_and_theirs(nursery: Nursery, tmp_path: Path) -> None:
    """All processes below one are found through /proc."""
    pid, sock = nursery.spawn({"name": "x"}, tmp_path / "log")
    assert {nursery.pid, pid} <= set(descendants(os.getpid()))
    assert descendants(nursery.pid) == [pid]
    os.kill(pid, signal.SIGKILL)
    sock.close()


def test_the_result_has_the_keys_that_scripts_rely_on() -> None:
    """One JSON object with every promised key."""
    keys = json.loads(Result().to_json())
    promised = "ok refits bit_exact torn replicas_committed recovered recover_seconds refit_seconds network_bytes"
    assert {*promised.split(), "network_bytes_min"} <= set(keys)


@pytest.mark.parametrize("argv", [["--kill", "lunch"], ["--victim", "cat"], ["--refits", "0"], ["--plant", "roses"]])
def test_a_wrong_command_line_is_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown phases, victims and plants end with exit status 2."""
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_what_a_rank_took_stays_taken_when_another_one_dies() -> None:
    """The lead has the publication; the rank that ended comes back, gets the ticket again, and both serve."""
    replica, told = engines()
    lead, worker = replica.engines
    replica.hear(lead, {"event": "ticket", "ticket": TICKET})
    replica.hear(lead, {"event": "switched", "ticket": TICKET, "at": 5.0})
    replica.ended(worker)
    replica.hear(worker, {"event": "ready"})
    assert told[1][-1] == {"do": "ticket", "ticket": TICKET}
    replica.hear(lead, {"event": "ready"})
    assert told[0][-1] == {"do": "hold"}, "a lead asks for its ticket itself"
    replica.hear(worker, {"event": "switched", "ticket": TICKET, "at": 7.0})
    assert told[0][-1] == told[1][-1] == {"do": "serve", "spell": 2}
    replica.hear(lead, {"event": "ticket", "ticket": {**TICKET, "revision": 12}})
    assert (lead.taken, worker.taken) == (None, None)
