"""An in_place engine on the device outlives its daemon, and a joiner elsewhere reads from it. Prints one JSON object.

Then it releases its memory, and lends nothing any more.
"""

import json
import threading

from parties import _device_empty  # before anything else: the fake GPU's

from refitd.hook.engine import connect_engine
from refitd.hook.trainer import connect_trainer
from refitd.layout import Layout
from refitd.store.spawn import spawn_etcd
from refitd.testing import LocalDaemon, wait_until

SECONDS = 60.0
TCP = {"data.transport": "tcp"}  # NCCL refuses a card of two nodes
etcd = spawn_etcd(prefer="distro")


def lends(daemon):
    ranks = daemon.status()["jobs"].get("job", {}).get("ranks", [])
    return {rank["key"]: rank["lends"] for rank in ranks}.get("engine/r0/0")


def receive(engine, weights):
    ticket = engine.pending(wait=SECONDS)
    assert ticket is not None, "no ticket came"
    engine.receive(ticket, weights, SECONDS)
    return [engine.step, float(weights["w"].min()), float(weights["w"].max())]


def publish_once(daemon, layout, weights):
    """In a thread: the trainer goes as soon as its memory is free again."""

    def run():
        with connect_trainer("job", "run", 0, 1, socket=daemon.socket) as trainer:
            trainer.register(layout)
            wait_until(lambda: daemon.status()["jobs"]["job"]["lanes"], "a lane", SECONDS)
            trainer.publish(7, weights).released(timeout=SECONDS)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


with LocalDaemon(etcd.url, name="a", config=TCP) as a, LocalDaemon(etcd.url, name="b", config=TCP) as b:
    weights = [{"w": _device_empty((64, 64))} for _ in range(3)]
    layout, found = Layout.from_tensors(weights[0]), {}
    weights[0]["w"].fill_(7)
    with (
        connect_engine("job", "r0", 0, 1, socket=a.socket) as holder,
        connect_engine("job", "r1", 0, 1, socket=b.socket) as joiner,
    ):
        holder.register(layout)
        thread = publish_once(a, layout, weights[0])
        found["received"] = receive(holder, weights[1])
        thread.join()
        a.kill()
        a.start()
        wait_until(lambda: holder.pending() is None and lends(a), "the engine to lend again", SECONDS)
        joiner.register(layout)
        found["joined"] = receive(joiner, weights[2])
        holder.release()
        found["released"] = lends(a) is False
etcd.stop()
print(json.dumps(found))
