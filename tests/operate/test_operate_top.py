"""`refitd top`: refits, links with rates, faults and the status, once or again and again."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from refitd.cli import main
from refitd.errors import DaemonUnavailable
from refitd.operate.top import link_rates, plain, watch
from refitd.testing import LocalDaemon


def link(src: str, moved: int, late: bool = False) -> dict[str, Any]:
    return {"src": src, "dst": "engine/r0/0", "link": "network", "planned": 8_000_000, "moved": moved, "late": late}


def answer(moved: int = 2_000_000) -> dict[str, Any]:
    """A daemon with a refit under way, after one that ended and one that failed and began again."""
    job = {
        "leader": "n0", "generation": 1, "publication": [1, 9], "paused": False, "paused_reason": "", "limit": None,
        "draining": [], "parked": [], "slow": ["replica r0 has been in transfer for 4.2 s: t1 -> engine/r0/0"],
        "faults": [{"age": 3.2, "what": "the mover of t1 died"}],
        "members": [{"node": "n0", "address": "10.0.0.1:9465", "ranks": [{"key": "trainer/a/0"}]}],
        "lanes": [
            {"replica": "r0", "stage": "transfer", "seconds": 4.21, "why": "waiting for n0", "excluded": []},
            {"replica": "r1", "stage": "committed", "seconds": 60.0, "why": "it serves 1/9", "excluded": []},
            {"replica": "r2", "stage": "prepare", "seconds": None, "why": "waiting for n1", "excluded": []},
        ],
        "replicas": [
            {"name": "r0", "publication": [1, 5], "step": 4, "lag": 1, "ready": True, "why": "", "mode": "in_place"},
        ],
        "refits": [
            {"replica": "r0", "publication": [1, 9], "phases": {"offer": 0.1}, "moved": {}, "outcome": "",
             "failures": 1, "why": "t1 -> engine/r0/0: closed"},
            {"replica": "r1", "publication": [1, 9], "phases": {"offer": 0.1, "transfer": 0.4},
             "moved": {"network": 8_000_000, "local": 5}, "outcome": "ok", "failures": 0, "why": ""},
            {"replica": "r0", "publication": [1, 5], "phases": {}, "moved": {}, "outcome": "skipped", "failures": 2,
             "why": "paused"},
        ],
        "links": [link("t1", moved, late=True), link("t0", 8_000_000)],
    }  # fmt: skip
    drain = {"wanted": False, "drained": False, "reason": ""}
    return {"node": "n0", "store": {"url": "memory://", "answers": True}, "drain": drain, "jobs": {"grpo": job}}


PLAIN = """\
node n0, store memory:// (answers)

job grpo: leader n0, generation 1, newest publication 1/9
replica r0 has been in transfer for 4.2 s: t1 -> engine/r0/0
the refit of r0 to 1/9 has failed once: t1 -> engine/r0/0: closed
3 s ago: the mover of t1 died

REFIT  PUBLICATION  PHASE              SECONDS  MOVED                  END
r0     1/9          transfer           4.2                             waiting for n0
r2     -            prepare            -                               waiting for n1
r1     1/9          longest: transfer  0.500    5 B local, 8 MB network  ok
r0     1/5          longest: -         0.000    -                      skipped, 2 failed before: paused

FROM  TO           LINK     MOVED  PLANNED  RATE
t1    engine/r0/0  network  2 MB   8 MB     1MB/s  late
t0    engine/r0/0  network  8 MB   8 MB     -

REPLICA  PUBLICATION  STEP  LAG  READY  MODE      WHY NOT
r0       1/5          4     1    yes    in_place

LANE  STAGE      WHY             EXCLUDED
r0    transfer   waiting for n0
r1    committed  it serves 1/9
r2    prepare    waiting for n1

NODE  ADDRESS        RANKS        STATE
n0    10.0.0.1:9465  trainer/a/0"""


def words(text: str) -> list[list[str]]:
    return [re.split(r"  +", line) for line in text.splitlines()]


def test_everything_is_shown() -> None:
    """Refits that run with their phase, those that ended, links with their rates, and the status below."""
    rates = {("t1", "engine/r0/0", "network"): 1e6}
    assert words(plain(answer(), rates)) == words(PLAIN)


def test_rates_come_from_two_looks() -> None:
    """Bytes between them over the time; a link that began anew counts from nothing; one look has no rates."""
    rates = link_rates(answer(2_000_000), answer(5_000_000), 2.0)
    assert rates == {("t1", "engine/r0/0", "network"): 1.5e6, ("t0", "engine/r0/0", "network"): 0.0}
    assert link_rates(answer(5_000_000), answer(1_000_000), 2.0)["t1", "engine/r0/0", "network"] == 5e5
    assert link_rates({}, answer(), 2.0) == {}


def asking(*answers: dict[str, Any] | None) -> Callable[[], dict[str, Any]]:
    """Gives the answers (None: nobody does), then is interrupted."""
    left: Iterator[dict[str, Any] | None] = iter(answers)

    def ask() -> dict[str, Any]:
        try:
            found = next(left)
        except StopIteration:
            raise KeyboardInterrupt from None
        if found is None:
            raise DaemonUnavailable("nobody answers")
        return found

    return ask


def test_without_a_terminal_blocks_follow_each_other() -> None:
    """Each with its time; an interrupt ends it well."""
    stream = io.StringIO()
    assert watch(asking(answer(), answer(3_000_000)), stream, 0.1) == 0
    blocks = re.split(r"^-- \d\d:\d\d:\d\d\n", stream.getvalue(), flags=re.MULTILINE)
    assert len(blocks) == 3
    assert words(blocks[1])[:1] == [["node n0, store memory:// (answers)"]]
    assert "3 MB" in blocks[2]


def test_a_daemon_that_went_away_is_waited_for() -> None:
    """What was last known stays, and is said to be old; the next answer is new again. The first one must come."""
    stream = io.StringIO()
    assert watch(asking(answer(), None, answer(3_000_000)), stream, 0.1) == 0
    blocks = re.split(r"^-- \d\d:\d\d:\d\d\n", stream.getvalue(), flags=re.MULTILINE)
    assert [block.startswith("nobody answers; what follows is old\nnode n0") for block in blocks[1:]] == [
        False, True, False,
    ]  # fmt: skip
    with pytest.raises(DaemonUnavailable):
        watch(asking(None), stream, 0.1)


def test_a_terminal_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the other screen, which is left at the end; what comes from outside is never markup."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("LINES", "60")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    marked = answer()
    marked["jobs"]["grpo"]["slow"] = ["[red]slow[/red]"]
    assert watch(asking(marked, answer(3_000_000)), stream, 0.1) == 0
    text = stream.getvalue()
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert "[red]slow[/red]" in text
    assert "waiting for n0" in text


def test_the_command_looks_once(capsys: pytest.CaptureFixture[str]) -> None:
    """``--once`` as text, ``--json`` as one object, a daemon that is away as status 1, a hasty interval as usage."""
    with LocalDaemon() as daemon:
        assert main(["top", "--once", "--socket", daemon.socket]) == 0
        assert capsys.readouterr().out == "node node0, store memory:// (not asked yet)\n"
        assert main(["top", "--json", "--socket", daemon.socket]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["ok"], found["node"], found["jobs"]) == (True, "node0", {})
    assert main(["top", "--once", "--socket", daemon.socket]) == 1
    assert "no refitd daemon answers" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["top", "--interval", "0.01"])
    assert caught.value.code == 2
    assert "expected 0.1 seconds or more, got '0.01'" in capsys.readouterr().err
