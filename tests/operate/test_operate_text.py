"""The status for people: everything that the daemon says, plain or with colour, never taken for markup."""

from __future__ import annotations

import io
from typing import Any

from refitd.operate.text import plain_status, print_status


def answer(**job: Any) -> dict[str, Any]:
    """A daemon of one job."""
    facts: dict[str, Any] = {
        "leader": "n0", "generation": 2, "publication": [2, 17], "paused": False, "paused_reason": "", "limit": None,
        "draining": [], "parked": [],
        "members": [
            {"node": "n0", "address": "10.0.0.1:9465", "ranks": [{"key": "trainer/a/0"}, {"key": "engine/r0/0"}]},
            {"node": "n1", "address": "10.0.0.2:9465", "ranks": []},
        ],
        "lanes": [{
            "replica": "r0", "stage": "transfer", "why": "waiting for n0 to verify",
            "excluded": [{"rank": "trainer/a/1", "reason": "n0: no byte for 3 s"}],
        }],
        "replicas": [
            {"name": "r0", "publication": [2, 11], "step": 40, "lag": 1, "ready": False, "why": "[red]slow[/red]",
             "mode": "in_place"},
            {"name": "r10", "publication": None, "step": None, "lag": None, "ready": True, "why": "",
             "mode": "host_shadow"},
        ],
    }  # fmt: skip
    drain = {"wanted": False, "drained": False, "reason": ""}
    store = {"url": "etcd://10.0.0.9:2379", "local": False, "answers": True}
    return {"node": "n0", "store": store, "drain": drain, "jobs": {"grpo": {**facts, **job}}}


PLAIN = """\
node n0, store etcd://10.0.0.9:2379 (answers)

job grpo: leader n0, generation 2, newest publication 2/17

REPLICA  PUBLICATION  STEP  LAG  READY  MODE         WHY NOT
r0       2/11         40    1    no     in_place     [red]slow[/red]
r10      -            -     -    yes    host_shadow

LANE  STAGE     WHY                       EXCLUDED
r0    transfer  waiting for n0 to verify  trainer/a/1: n0: no byte for 3 s

NODE  ADDRESS        RANKS                     STATE
n0    10.0.0.1:9465  trainer/a/0, engine/r0/0
n1    10.0.0.2:9465"""


def test_plain_text_is_aligned() -> None:
    """Character for character."""
    assert plain_status(answer()) == PLAIN


def test_a_rank_whose_mover_is_a_thread_of_its_client_is_marked() -> None:
    """Beside its key, as far as this daemon knows."""
    text = plain_status(
        answer(ranks=[{"key": "engine/r0/0", "path": "library"}, {"key": "trainer/a/0", "path": "child"}])
    )
    assert "trainer/a/0, engine/r0/0 (library)" in text


def test_what_operators_asked_for_is_shown() -> None:
    """Pause and its reason, the limit, drains and parked nodes beside the node, this node's own drain on top."""
    facts = answer(
        paused=True, paused_reason="the network is being repaired", limit=500_000_000,
        draining=[{"node": "n1", "reason": "its operator drains it"}], parked=[{"node": "n0", "reason": "6 joins"}],
    )  # fmt: skip
    facts["drain"] = {"wanted": True, "drained": False, "reason": "grpo: lane r0 uses engine/r0/0"}
    lines = plain_status(facts).splitlines()
    assert lines[0].endswith("(answers), draining: grpo: lane r0 uses engine/r0/0")
    assert lines[2].endswith("2/17, limit 500MB/s a node, paused: the network is being repaired")
    assert lines[-2].endswith("trainer/a/0, engine/r0/0  parked: 6 joins")
    assert lines[-1].endswith("draining: its operator drains it")


def test_what_takes_too_long_is_said_first() -> None:
    """Sentences about slow lanes stand below the job's line; where none is slow there is no empty line."""
    slow = "replica r0 has been in transfer for 8.2 s: trainer/a/0 -> engine/r0/1 over network, 3 MB of 12 MB"
    lines = plain_status(answer(slow=[slow])).splitlines()
    assert lines[3] == slow
    assert plain_status(answer(slow=[])) == PLAIN


def test_a_job_without_lanes_and_a_daemon_without_jobs() -> None:
    """Nothing is made up: tables without rows are left out."""
    empty = answer(leader=None, publication=None, paused=True, members=[], lanes=[], replicas=[])
    assert plain_status(empty).splitlines()[2:] == [
        "job grpo: leader none, generation 2, newest publication -, paused: no reason given"
    ]
    nothing = {**empty, "jobs": {}, "store": {**empty["store"], "answers": None}}
    assert plain_status(nothing) == "node n0, store etcd://10.0.0.9:2379 (not asked yet)"
    away = {**nothing, "store": {**empty["store"], "answers": False}}
    assert plain_status(away) == "node n0, store etcd://10.0.0.9:2379 (does not answer)"


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_tables_and_a_pipe_gets_plain_text(monkeypatch: Any) -> None:
    """The same words; what a reason says is not taken for markup; a pipe gets no control characters."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, pipe = Terminal(), io.StringIO()
    print_status(answer(), terminal)
    print_status(answer(), pipe)
    assert pipe.getvalue() == PLAIN + "\n"
    assert "\x1b[" in terminal.getvalue()
    for words in (
        "replicas",
        "[red]slow[/red]",
        "trainer/a/1: n0: no byte for 3 s",
        "10.0.0.2:9465",
        "newest publication 2/17",
    ):
        assert words in terminal.getvalue()


def test_what_goes_wrong_is_said_below_the_job() -> None:
    """What is slow, a refit that goes on after failures, what broke in the last ten minutes; not what ended well."""
    refit = {"replica": "r0", "publication": [2, 17], "failures": 1, "outcome": "", "why": "a -> b: closed"}
    text = plain_status(
        answer(
            slow=["replica r0 has been in transfer for 4.0 s: a -> b over network"],
            refits=[refit, {**refit, "replica": "r1", "failures": 3}, {**refit, "outcome": "ok"}],
            faults=[{"age": 7.4, "what": "the mover of a died"}, {"age": 300.0, "what": "older"},
                    {"age": 601.0, "what": "forgotten"}],
        )
    )  # fmt: skip
    assert text.split("\n\n")[1].splitlines()[1:] == [
        "replica r0 has been in transfer for 4.0 s: a -> b over network",
        "the refit of r0 to 2/17 has failed once: a -> b: closed",
        "the refit of r1 to 2/17 has failed 3 times: a -> b: closed",
        "7 s ago: the mover of a died",
        "5 min ago: older",
    ]
