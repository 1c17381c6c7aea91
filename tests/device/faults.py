"""A refit on a GPU with a fault in it: usage: faults.py kill|stop|trainer MODEL [TRANSPORT]. Prints one JSON.

``kill``, ``stop``: SIGKILL, SIGSTOP for an engine's mover in the middle of its transfer. ``trainer``: SIGKILL for a
trainer whose memory two movers have mapped; a new one takes its place. Each ends with a refit that nothing disturbs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

FAKE = bool(os.environ.get("REFITD_FAKE_GPU"))
folder = Path(tempfile.mkdtemp())
os.environ["REFITD_FAILPOINTS"] = str(folder / "failpoints")
VICTIM = "engine/r0/0"


def serve_failpoints():
    """In a process of its own: answer every failpoint; hit the victim where the file ``armed`` is there."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ["REFITD_FAILPOINTS"])
    listener.listen(64)
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    while True:
        sock, _address = listener.accept()
        said = json.loads(sock.makefile().readline() or "{}")
        if said.get("name") == "transfer" and said.get("key") == VICTIM and (folder / "armed").exists():
            number = signal.Signals[(folder / "armed").read_text()]
            (folder / "armed").unlink()
            os.kill(said["pid"], number)
            (folder / "hit").write_text(str(time.monotonic()))
        sock.sendall(b"go\n")
        sock.close()


def hit_mover(one, name):
    one.round(0)
    before = one.round(1)
    (folder / "arming").write_text(name)
    (folder / "arming").rename(folder / "armed")
    during = one.round(2)
    hit = float((folder / "hit").read_text())
    return {
        "before_s": before,
        "during_s": during,
        "from_fault_to_commit_s": one.times[1] - hit,
        "after_s": one.round(3),
    }


def kill_trainer(one, model, make_trainer, observe):
    one.round(0)
    before = one.round(1)
    size = 0 if FAKE else sum(shard.shape[0] * shard.shape[1] * 2 for shard in models.trainer_shards(model, 1))
    free = observe()
    killed = time.monotonic()
    one._trainers[1].end()
    while observe() < free + size:
        assert time.monotonic() < killed + 10, "its memory is not free"
    freed = time.monotonic() - killed
    one._trainers[1] = Process("trainer1", make_trainer)
    ask_all([one._trainers[1]], "start")
    time.sleep(1.0)
    return {"before_s": before, "bytes": size, "free_again_s": freed, "after_s": one.round(2)}


def patient_move(self, step):
    """A trainer's part where a report may be closed before the replica whose mover died has come back."""
    began = time.monotonic()
    self._trainer.publish(step, self._weights).released(clients.WAIT_SECONDS)
    return began


def main():
    what, name, *more = sys.argv[1:]
    transport = more[0] if more else "peer"
    clients.TrainerParty.move = patient_move
    model = models.model(name)
    server = serve_failpoints() if what != "trainer" else 0
    observer = Process("observer", Observer)
    ask_all([observer], "start")
    try:
        with contest.refit(model, transport, "cuda", Settings(bucket_bytes=8 << 20, traced=True)) as one:
            if what == "trainer":
                make = partial(clients.TrainerParty, model, 1, one._daemon.socket, "cuda")
                found = kill_trainer(one, model, make, lambda: ask_all([observer], "move")[0])
            else:
                found = hit_mover(one, f"SIG{what.upper()}")
            said = [json.loads(line) for line in one.lines() if "mover_" in line]
            found["movers"] = [f"{line['event']} {line.get('reason', '')}".strip() for line in said]
    finally:
        observer.end()
        if server:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
    print(json.dumps({"fault": what, "model": name, "transport": transport, **found}))


if FAKE:
    import fake_bench  # noqa: F401  makes tensors of the fake GPU's memory

from refitd.bench import clients, contest, models  # noqa: E402
from refitd.bench.daemon import Settings  # noqa: E402
from refitd.bench.party import Process, ask_all  # noqa: E402


class Observer:
    """Says how much memory the GPU has left."""

    def move(self, step):
        if FAKE:
            return 0.0
        import torch

        return float(torch.cuda.mem_get_info()[0])


if __name__ == "__main__":
    main()
