"""Named moments of a refit: who keeps them, and that nobody does who was not asked."""

import os
import subprocess
import sys
import time

import pytest

from refitd import stamps
from refitd.bench import moments
from refitd.stamps import Stamp, collecting, read, stamp


def test_without_being_asked_nothing_is_kept(tmp_path, monkeypatch):
    """No file, no error."""
    monkeypatch.chdir(tmp_path)
    stamp("begun", "trainer/run/0")
    assert list(tmp_path.iterdir()) == []


def test_moments_of_all_processes_come_in_the_order_of_the_clock(tmp_path):
    """This process, a fork of it and one that it starts: a file each, one list."""
    before = time.monotonic()
    with collecting(tmp_path):
        stamp("first", "a")
        if (pid := os.fork()) == 0:
            stamp("second", "b")
            os._exit(0)
        os.waitpid(pid, 0)
        subprocess.run([sys.executable, "-c", "from refitd.stamps import stamp; stamp('third')"], check=True)
        stamp("fourth", "a")
    stamp("after", "a")
    found = read(tmp_path)
    assert [(one.name, one.key) for one in found] == [("first", "a"), ("second", "b"), ("third", ""), ("fourth", "a")]
    assert before < found[0].at < found[3].at < time.monotonic()
    assert len(list(tmp_path.glob("*.stamps"))) == 3


def test_a_folder_that_is_not_there_harms_nobody(tmp_path):
    """A trainer does not die of a benchmark."""
    with collecting(tmp_path / "nowhere"):
        stamp("begun")
        stamp("begun")
    assert read(tmp_path) == []


def test_a_full_file_drops_what_comes_later(tmp_path, monkeypatch):
    """And what it has stays readable."""
    monkeypatch.setattr(stamps, "_BYTES", 4096)
    with collecting(tmp_path):
        for _ in range(200):
            stamp("again", "x" * 20)
    found = read(tmp_path)
    assert 50 < len(found) < 200
    assert {(one.name, one.key) for one in found} == {("again", "x" * 20)}


def test_steps_are_the_times_between_what_each_waits_for():
    """The first of the writes after it, the last of the ranks; what has no stamp takes no time."""
    found = [
        Stamp(1.0, "publish", "trainer/run/0"), Stamp(1.5, "publish", "trainer/run/1"),
        Stamp(1.2, "written.offers", "offers/n"), Stamp(2.0, "daemon.offer", "trainer/run/1"),
        Stamp(2.25, "written.offers", "offers/n"), Stamp(9.0, "receive.ended", "engine/r0/1"),
        Stamp(12.0, "receive.ended", "engine/r0/0"),
    ]  # fmt: skip
    took = moments.steps((1.0, 10.0), sorted(found))
    named = {step.label: seconds for step, seconds in zip(moments.STEPS, took, strict=True) if seconds}
    assert named == {
        "hook_publish_begun": 0.5, "daemon_heard_offers": 0.5, "daemon_wrote_offers": 0.25,
        "hook_took_commit": pytest.approx(6.75),
    }  # fmt: skip
    assert sum(took) == pytest.approx(8.0)
