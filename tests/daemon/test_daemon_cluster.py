"""Three daemons and an etcd: pause, drain, joiners that catch up from a neighbour, and daemons that are refused."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from refitd import RELEASED, SKIPPED, Report, connect_engine, connect_trainer, shared_empty
from refitd.cli import main
from refitd.hook.admin import ask
from refitd.hook.engine import Engine
from refitd.hook.trainer import Trainer
from refitd.store import spawn_etcd
from refitd.testing import LocalDaemon, split_layout, wait_until

SECONDS = 60.0
CONFIG: dict[str, object] = {"timeouts.offer": SECONDS, "store.lease_ttl": 5.0, "store.keepalive": 1.0}
SHAPE, NBYTES = (1024, 1024), 4 << 20
LAYOUT = split_layout({"w": (SHAPE, "float32")}, 0, 1)
Daemons = dict[str, LocalDaemon]


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    process = spawn_etcd(prefer="distro")
    yield process.url
    process.stop()


@pytest.fixture(scope="module")
def nodes(etcd: str) -> Iterator[Daemons]:
    """t for trainers, a and b for engines."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(LocalDaemon(etcd, name=name, config=CONFIG)) for name in "tab"}


@pytest.fixture(autouse=True)
def undrained(nodes: Daemons) -> Iterator[None]:
    """A node that a failed test leaves draining would fail the others."""
    yield
    ask("drain", nodes["a"].socket, cancel=True)


@contextlib.contextmanager
def trainer(nodes: Daemons, job: str) -> Iterator[Trainer]:
    with connect_trainer(job, "run0", 0, 1, nodes["t"].socket) as found:
        found.plan_seconds = SECONDS
        found.register(LAYOUT)
        yield found


@contextlib.contextmanager
def engine(nodes: Daemons, job: str, name: str) -> Iterator[Engine]:
    """The replica of this node, with its layout."""
    with connect_engine(job, f"r{name}", 0, 1, nodes[name].socket) as found:
        found.register(LAYOUT)
        yield found


def take(engine: Engine) -> np.ndarray[Any, Any]:
    """The weights of the next refit."""
    memory = np.zeros(SHAPE, np.float32)
    ticket = engine.pending(wait=SECONDS)
    assert ticket is not None
    engine.receive(ticket, {"w": memory}, timeout=SECONDS)
    return memory


def refit(trainer: Trainer, step: int, *engines: Engine) -> Report:
    offer = trainer.publish(step, {"w": np.full(SHAPE, step, np.float32)})
    for each in engines:
        assert np.all(take(each) == step)
    return offer.committed(timeout=SECONDS)


def job_of(daemon: LocalDaemon, job: str) -> dict[str, Any]:
    found = daemon.status()["jobs"][job]
    assert isinstance(found, dict)
    return found


def replica(daemon: LocalDaemon, job: str, name: str) -> dict[str, Any]:
    return {r["name"]: r for r in job_of(daemon, job)["replicas"]}.get(name, {})


def lane(daemon: LocalDaemon, job: str, name: str) -> dict[str, Any]:
    return {x["replica"]: x for x in job_of(daemon, job)["lanes"]}.get(name, {})


def drain(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    """What `refitd drain` ends with and says."""
    code = main(["drain", "--json", "--socket", daemon.socket, *more])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return code, found


def test_a_paused_job_skips_offers_with_the_reason_and_resume_goes_on(nodes: Daemons) -> None:
    """Said at one node, it counts on all: the trainer is told why, the engine serves, and then the next step goes."""
    with trainer(nodes, "pause") as training, engine(nodes, "pause", "a") as serving:
        assert refit(training, 1, serving).committed == ["ra"]
        ask("pause", nodes["a"].socket, job="pause", reason="the network is repaired")
        wait_until(lambda: job_of(nodes["t"], "pause")["paused"], "the pause to reach the trainer's node")
        served = serving.publication
        memory = shared_empty(SHAPE, "float32")
        offer = training.publish(2, {"w": memory})
        assert (offer.released(timeout=SECONDS), offer.reason) == (
            SKIPPED,
            "the job is paused: the network is repaired",
        )
        report = offer.committed(timeout=SECONDS)
        assert (report.committed, report.closed) == ([], f"it was never published: {offer.reason}")
        assert (serving.pending(wait=0.5), serving.publication) == (None, served)
        shown = replica(nodes["a"], "pause", "ra")
        assert (shown["ready"], shown["lag"], shown["why"]) == (True, 0, "")
        ask("resume", nodes["t"].socket, job="pause")
        wait_until(lambda: not job_of(nodes["t"], "pause")["paused"], "the end of the pause")
        assert refit(training, 3, serving).committed == ["ra"]


def test_a_drain_ends_drained_and_the_others_go_on(nodes: Daemons, capsys: pytest.CaptureFixture[str]) -> None:
    """The lane of its engine closes with the reason, the other replica commits on; taken back, it takes part again."""
    with (
        trainer(nodes, "drain") as training,
        engine(nodes, "drain", "a") as leaving,
        engine(nodes, "drain", "b") as staying,
    ):
        for node in nodes.values():  # whichever leads closes a report when all have committed that it knows by then
            wait_until(lambda node=node: all(replica(node, "drain", name) for name in ("ra", "rb")), "both replicas")  # type: ignore[misc]
        assert sorted(refit(training, 1, leaving, staying).committed) == ["ra", "rb"]
        code, said = drain(nodes["a"], capsys, "--timeout", "30")
        assert (code, said["ok"], said["drained"]) == (0, True, True)
        assert "drain: no lane uses this node" in said["reason"].split("; ")
        assert lane(nodes["b"], "drain", "ra")["turned"] == "a: draining"
        report = refit(training, 2, staying)
        assert report.committed == ["rb"]
        assert report.missing == {"ra": "a: draining"}
        shown = wait_until(lambda: replica(nodes["b"], "drain", "ra"), "the drained replica")
        assert (shown["ready"], shown["why"]) == (False, "a: draining")
        assert drain(nodes["a"], capsys, "--cancel")[0] == 0
        assert np.all(take(leaving) == 2)
        wait_until(lambda: replica(nodes["b"], "drain", "ra")["ready"], "the node to take part again")


def catch_up(nodes: Daemons, job: str, training: Trainer, holder: Engine) -> None:
    """The holder has publication 1, whose trainer has its memory back and has changed it: only the holder has it."""
    memory = shared_empty(SHAPE, "float32")
    memory[:] = 1
    offer = training.publish(1, {"w": memory})
    assert np.all(take(holder) == 1)
    assert offer.released(timeout=SECONDS) is RELEASED
    memory[:] = -1
    assert offer.committed(timeout=SECONDS).committed == ["ra"]


def test_a_joiner_catches_up_from_a_neighbour_and_is_not_ready_before(
    nodes: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a byte comes from a trainer. Meanwhile its only holder drains: it stays until it is needed no more."""
    job = "join"
    with trainer(nodes, job) as training, engine(nodes, job, "a") as holder:
        catch_up(nodes, job, training, holder)
        ask("limit", nodes["a"].socket, job=job, rate=2_000_000)
        with engine(nodes, job, "b") as joiner:
            found: list[np.ndarray[Any, Any]] = []
            receiving = threading.Thread(target=lambda: found.append(take(joiner)))
            receiving.start()
            wait_until(lambda: lane(nodes["b"], job, "rb").get("stage") == "transfer", "the transfer", SECONDS)
            assert lane(nodes["b"], job, "rb")["sources"] == ["engine/ra/0"]
            shown = replica(nodes["b"], job, "rb")
            assert (shown["ready"], shown["publication"], shown["lag"]) == (False, None, None)
            assert shown["why"].startswith("its present ranks have committed nothing yet: ")
            code, said = drain(nodes["a"], capsys, "--timeout", "0.2")
            assert (code, said["drained"]) == (1, False)
            assert "lane rb uses engine/ra/0" in said["reason"]
            assert lane(nodes["b"], job, "rb")["sources"] == ["engine/ra/0"], "the last holder stays"
            receiving.join(SECONDS)
            assert np.all(found[0] == 1)
            wait_until(lambda: replica(nodes["b"], job, "rb")["ready"], "the joiner to be ready")
            assert replica(nodes["b"], job, "rb")["lag"] == 0
            assert job_of(nodes["b"], job)["last_refit"]["network_bytes"] == NBYTES
            code, said = drain(nodes["a"], capsys, "--timeout", "30")
            assert (code, said["drained"]) == (0, True)
            assert drain(nodes["a"], capsys, "--cancel")[0] == 0


def logged(daemon: LocalDaemon, event: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    return next((line for line in lines if line["event"] == event), {})


def test_a_second_daemon_of_a_name_is_refused_until_the_first_is_gone(etcd: str) -> None:
    """Another state folder, the same name: its record is held off, and it joins once the lease of the first ends."""
    with (
        LocalDaemon(etcd, name="twin", config=CONFIG) as first,
        LocalDaemon(etcd, name="twin", config=CONFIG) as second,
        connect_engine("twins", "r0", 0, 1, first.socket) as one,
    ):
        one.register(LAYOUT)
        wait_until(lambda: job_of(first, "twins")["joined"], "the first to join")
        with connect_engine("twins", "r1", 0, 1, second.socket) as two:
            two.register(LAYOUT)
            line = wait_until(lambda: logged(second, "node_refused"), "the refusal to be logged")
            assert line["reason"] == (
                "another daemon of this name holds the record: on another machine, or with another state folder"
            )
            assert line["address"] == job_of(first, "twins")["members"][0]["address"]
            assert job_of(second, "twins")["joined"] is False
            assert list(job_of(first, "twins")["replicas"]) == [replica(first, "twins", "r0")]
            first.kill()
            wait_until(lambda: job_of(second, "twins")["joined"], "the second to join", SECONDS)
            assert [r["name"] for r in job_of(second, "twins")["replicas"]] == ["r1"]


def test_a_device_belongs_to_one_daemon(etcd: str) -> None:
    """The second daemon joins and offers no rank; it has them once the first is gone."""
    config = {**CONFIG, "node.devices": "gpu-0,gpu-1"}
    with (
        LocalDaemon(etcd, name="first", config=config) as first,
        LocalDaemon(etcd, name="second", config={**CONFIG, "node.devices": "gpu-1"}) as second,
        connect_engine("device", "r0", 0, 1, first.socket) as one,
    ):
        one.register(LAYOUT)
        wait_until(lambda: replica(first, "device", "r0"), "the first rank")
        with connect_engine("device", "r1", 0, 1, second.socket) as two:
            two.register(LAYOUT)
            line = wait_until(lambda: logged(second, "device_refused"), "the refusal to be logged")
            assert line["reason"] == "first works with gpu-1"
            assert [r["name"] for r in job_of(second, "device")["replicas"]] == ["r0"]
            first.stop()
            wait_until(lambda: replica(second, "device", "r1"), "the second to have its device", SECONDS)
