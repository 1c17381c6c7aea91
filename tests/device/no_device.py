"""A trainer and an engine with weights on a device, and a daemon whose movers have none. Prints one JSON object."""

import json
import threading

import fake_bench
import fake_gpu
import torch

from refitd.errors import ReceiveFailed
from refitd.hook.engine import connect_engine
from refitd.hook.trainer import connect_trainer
from refitd.layout import Layout
from refitd.testing import LocalDaemon, wait_until

with LocalDaemon(environ={"REFITD_FAKE_GPU_FAILS": "1"}, config={"data.path": "child"}) as daemon:
    weights = [{"w": fake_bench.device_empty((64, 64), torch.bfloat16)} for _ in range(2)]
    assert fake_gpu._mine
    layout = Layout.from_tensors(weights[0])
    found = {}
    with (
        connect_engine("job", "r0", 0, 1, socket=daemon.socket) as engine,
        connect_trainer("job", "run", 0, 1, socket=daemon.socket) as trainer,
    ):
        engine.register(layout)
        trainer.register(layout)
        trainer.plan_seconds = 30.0
        wait_until(
            lambda: [lane["stage"] for lane in daemon.status()["jobs"]["job"]["lanes"]] == ["idle"], "a lane", 30.0
        )
        offer = trainer.publish(1, weights[0])

        def receive():
            ticket = engine.pending(wait=20)
            assert ticket is not None
            try:
                engine.receive(ticket, weights[1], timeout=6)
            except ReceiveFailed as error:
                found["failed"], found["dirty"] = str(error), engine.dirty

        thread = threading.Thread(target=receive)
        thread.start()
        found["outcome"] = offer.released(timeout=8)
        thread.join()
    said = [json.loads(line) for line in daemon.log.splitlines() if "mover_" in line]
    found["killed"] = next(line["reason"] for line in said if line["event"] == "mover_killed")
    found["started"] = len([line for line in said if line["event"] == "mover_started"])
print(json.dumps(found))
