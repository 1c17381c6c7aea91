"""A refit on a GPU with a fault in it: usage: faults.py kill|stop|trainer|crowded MODEL [TRANSPORT]. Prints one JSON.

``kill``, ``stop``: SIGKILL, SIGSTOP for an engine's mover in the middle of its transfer. ``trainer``: SIGKILL for a
trainer whose memory two movers have mapped; a new one takes its place, and as much memory; ``crowded``: on a card that
others have filled. Each ends with a refit that nothing disturbs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from parties import FAKE, Trainer, asked, beside

from refitd.bench import contest, models
from refitd.bench.daemon import Settings
from refitd.bench.party import Process, ask_all
from refitd.testing import wait_until

LEFT_MIB = 512
STOP_SECONDS = 20.0
FREE_SECONDS, NEARLY_ALL = 1.0, 0.95
folder = Path(tempfile.mkdtemp())
os.environ["REFITD_FAILPOINTS"] = str(folder / "failpoints")
VICTIM = "engine/r0/0"


def serve_failpoints(passed):
    """In a process of its own: tell ``passed`` of every failpoint that a process is at, and let that go on."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ["REFITD_FAILPOINTS"])
    listener.listen(64)
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    while True:
        sock, _address = listener.accept()
        with sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who has been killed hears nothing
            passed(json.loads(sock.makefile().readline() or "{}"))
            sock.sendall(b"go\n")


def hit_victim(said):
    """As the file ``armed`` says, where it is there."""
    if said.get("name") == "transfer" and said.get("key") == VICTIM and (folder / "armed").exists():
        number = signal.Signals[(folder / "armed").read_text()]
        (folder / "armed").unlink()
        os.kill(said["pid"], number)
        (folder / "hitting").write_text(str(time.monotonic()))
        (folder / "hitting").rename(folder / "hit")
        wait_until(lambda: at_rest(said["pid"]), "the victim's threads to stop", STOP_SECONDS)


def at_rest(pid):
    """Whether no thread of a process runs any more: on a busy processor a signal reaches one after the other."""
    states = set()
    for task in Path("/proc").glob(f"{pid}/task/*/stat"):
        with contextlib.suppress(OSError):
            states.add(task.read_text().rpartition(")")[2].split()[0])
    return states <= {"T", "t", "Z", "X"}


def hit_mover(one, name):
    one.round(0)
    before = one.round(1)
    (folder / "arming").write_text(name)
    (folder / "arming").rename(folder / "armed")
    during = one.round(2)
    wait_until((folder / "hit").exists, "the fault", STOP_SECONDS)
    hit = float((folder / "hit").read_text())
    return {
        "before_s": before,
        "during_s": during,
        "from_fault_to_commit_s": one.times[1] - hit,
        "after_s": one.round(3),
    }


def kill_trainer(one, model, make_trainer, card, crowded):
    """Its memory is free again, and its restart takes that much; ``crowded``: of a card that has little else."""
    one.round(0)
    before = one.round(1)
    size = sum(shard.shape[0] * shard.shape[1] * 2 for shard in models.trainer_shards(model, 1))
    if crowded:
        asked(card, "fill", LEFT_MIB)
    free = asked(card, "free")
    killed = time.monotonic()
    one.trainers[1].end()
    while asked(card, "free") < free + size:
        assert time.monotonic() < killed + 10, "its memory is not free"
    freed_s = time.monotonic() - killed
    time.sleep(1.0)
    freed = asked(card, "free") - free
    one.trainers[1] = Process("trainer1", make_trainer)
    ask_all([one.trainers[1]], "start")
    after, left = one.round(2), asked(card, "free")
    return {
        "before_s": before, "bytes": size, "free_again_s": freed_s, "after_s": after, "free_before": free,
        "freed": freed, "taken_again": free + freed - left, "free_at_end": left,
    }  # fmt: skip


def main():
    what, name, *more = sys.argv[1:]
    transport = more[0] if more else "peer"
    model = models.model(name)
    on_trainer = what in ("trainer", "crowded")
    server = 0 if on_trainer else serve_failpoints(hit_victim)
    card = beside()
    try:
        with contest.refit(model, transport, "cuda", Settings(bucket_bytes=8 << 20, traced=True)) as one:
            if on_trainer:
                make = partial(Trainer, model, 1, one.daemon.socket, "cuda")
                found = kill_trainer(one, model, make, card, what == "crowded")
            else:
                found = hit_mover(one, f"SIG{what.upper()}")
            said = [json.loads(line) for line in one.lines() if "mover_" in line]
            found["movers"] = [f"{line['event']} {line.get('reason', '')}".strip() for line in said]
    finally:
        card.end()
        if server:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
    if on_trainer:
        soon = FAKE or found["free_again_s"] < FREE_SECONDS
        found["ok"] = soon and found["taken_again"] >= NEARLY_ALL * found["freed"]
    print(json.dumps({"fault": what, "model": name, "transport": transport, **found}))
    return 0 if found.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
