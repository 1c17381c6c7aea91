"""An engine with a shadow on the device gives it back and takes another, with a real daemon. Prints one JSON object."""

import json
import threading
from pathlib import Path

import fake_bench
import fake_gpu
import torch

from refitd.hook.engine import connect_engine
from refitd.hook.trainer import connect_trainer
from refitd.layout import Layout
from refitd.testing import LocalDaemon, wait_until


def mapped(path, daemon):
    """Whether a mover has the file of an allocation mapped."""
    pids = [rank["mover"] for rank in daemon.status()["jobs"]["job"]["ranks"]]
    return any(path in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def publish(trainer, weights, step):
    """In a thread: the engine takes its time."""
    weights["w"].fill_(step)
    thread = threading.Thread(target=lambda: trainer.publish(step, weights).released(timeout=20))
    thread.start()
    return thread


def take(engine, weights):
    ticket = engine.pending(wait=20)
    assert ticket is not None
    assert ticket.kind == "apply"
    engine.apply(ticket, weights)
    return [engine.step, float(weights["w"].min()), float(weights["w"].max())]


with LocalDaemon(config={"timeouts.offer": 20.0}) as daemon:
    weights = [{"w": fake_bench.device_empty((64, 64), torch.bfloat16)} for _ in range(2)]
    layout, found = Layout.from_tensors(weights[0]), {"steps": []}
    with (
        connect_engine("job", "r0", 0, 1, socket=daemon.socket) as engine,
        connect_trainer("job", "run", 0, 1, socket=daemon.socket) as trainer,
    ):
        engine.register(layout, mode="device_shadow", budget=1 << 20)
        shadow = str(next(reversed(fake_gpu._mine.values()))[1])
        trainer.register(layout)
        trainer.plan_seconds = 30.0
        wait_until(
            lambda: [lane["stage"] for lane in daemon.status()["jobs"]["job"]["lanes"]] == ["idle"], "a lane", 30.0
        )
        thread = publish(trainer, weights[0], 1)
        found["steps"].append(take(engine, weights[1]))
        thread.join()
        found["mapped"] = [mapped(shadow, daemon)]
        engine.release()
        found["mapped"].append(mapped(shadow, daemon))
        thread = publish(trainer, weights[0], 2)
        found["released"] = engine.pending(wait=1.0) is None
        engine.register(layout, mode="device_shadow", budget=1 << 20)
        found["steps"].append(take(engine, weights[1]))
        thread.join()
        found["mode"] = daemon.status()["jobs"]["job"]["replicas"][0]["mode"]
print(json.dumps(found))
