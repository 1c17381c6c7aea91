"""The run of all steps that need a GPU, with steps that need none: what is written, done again, and left."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from refitd.bench import main as bench
from refitd.bench import mover, pack, pause, repair
from refitd.bench.arguments import parse as parse_refit
from refitd.bench.gpu_run import ROOT, STEPS, Step, main

GOOD = Step("good", 30, ("-c", "print('words'); print('{\"rows\": [1]}')"))
BAD = Step("bad", 30, ("-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"))


def parse(words: tuple[str, ...]) -> None:
    """By the parser of what is measured: a word that it does not know ends the process."""
    subject, *options = words
    if subject == "refit":
        parse_refit(words)
    elif subject in ("repair", "mover", "pause"):
        {"repair": repair, "mover": mover, "pause": pause}[subject]._parse(options)
    else:
        assert subject == "pack"
        assert options[options.index("--only") + 1] in pack.PARTS
        usual = {"cuda": "cpu", **dict.fromkeys(pack.PARTS, "kernels")}  # parts that a CPU has
        pack._parse([usual.get(word, word) for word in options])


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """How each step ended, by the last line."""
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1])["steps"])


def test_a_step_that_fails_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each leaves its own file, with what it printed; what went well is not done again."""
    assert main(["--out", str(tmp_path)], [BAD, GOOD]) == 1
    assert said(capsys) == {"bad": "failed", "good": "good"}
    good, bad = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("good", "bad"))
    assert (good["document"], good["status"]) == ({"rows": [1]}, 0)
    assert (bad["document"], bad["status"], bad["stderr"]) == (None, 3, "why\n")
    (tmp_path / "good.json").write_text(json.dumps({"ended": "good", "mark": 1}))
    assert main(["--out", str(tmp_path)], [GOOD]) == 0
    assert json.loads((tmp_path / "good.json").read_text())["mark"] == 1
    assert main(["--out", str(tmp_path), "--again"], [GOOD]) == 0
    assert "mark" not in json.loads((tmp_path / "good.json").read_text())


def test_a_step_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its limit; the next one is done."""
    child = tmp_path / "child"
    command = f"import os, time; p = os.fork(); open({str(child)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(99)"
    assert main(["--out", str(tmp_path)], [Step("hangs", 3, ("-c", command)), GOOD]) == 1
    assert said(capsys) == {"hangs": "out of time", "good": "good"}
    deadline = time.monotonic() + 10
    for pid in map(int, child.read_text().split()):
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_no_step_is_begun_that_would_not_end_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is left for the next run, and steps for more GPUs than there are do not apply."""
    assert main(["--out", str(tmp_path), "--seconds", "10"], [GOOD]) == 1
    assert said(capsys) == {"good": "left for the next run"}
    assert main(["--out", str(tmp_path)], [GOOD._replace(gpus=2)]) == 0
    assert said(capsys) == {}


def test_every_command_of_the_real_run_is_one_that_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files exist and options are known; a run's limits fit a command of ten minutes, one step after the other."""
    assert bench(["gpu", "--out", str(tmp_path), "--gpus", "8", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(STEPS)
    assert max(step.seconds for step in STEPS) < 530
    for step in STEPS:
        for word in step.command:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word
    for step in (step for step in STEPS if step.command[:3] == ("-m", "refitd.cli", "bench")):
        parse(step.command[3:])


def test_steps_run_beside_each_other_on_cards_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two that wait for each other both end; a step of all cards has them alone."""
    wait = "import os, pathlib, time; here = pathlib.Path({mine!r}); here.touch(); other = pathlib.Path({other!r})\n"
    wait += "while not other.exists(): time.sleep(0.01)\n"
    wait += "print('\"' + os.environ['CUDA_VISIBLE_DEVICES'] + '\"')"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    both = Step("both", 30, ("-c", "import os; print('\"' + os.environ['CUDA_VISIBLE_DEVICES'] + '\"')"), 2)
    steps = [
        Step("one", 30, ("-c", wait.format(mine=a, other=b))),
        Step("two", 30, ("-c", wait.format(mine=b, other=a))),
        both,
    ]
    assert main(["--out", str(tmp_path), "--gpus", "2"], steps) == 0
    assert said(capsys) == {"one": "good", "two": "good", "both": "good"}
    documents = {
        name: json.loads((tmp_path / f"{name}.json").read_text())["document"] for name in ("one", "two", "both")
    }
    assert documents == {"one": "0", "two": "1", "both": "0,1"}
