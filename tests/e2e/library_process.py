"""A client on the library path in a process of its own.

python library_process.py SOCKET trainer JOB RUN STEP   publishes STEP until it is killed
python library_process.py SOCKET engine JOB             receives forever; a line each: step, and whether it is right
"""

from __future__ import annotations

import sys
import time

import numpy as np
from e2e_refit import weights

from refitd import ReceiveFailed, connect_engine, connect_trainer
from refitd.testing import split_layout

SHAPE = (1200, 1000)
LAYOUT = split_layout({"w": (SHAPE, "float32")}, 0, 1)


def train(socket: str, job: str, run: str, step: int) -> None:
    with connect_trainer(job, run, 0, 1, socket, path="library") as trainer:
        trainer.plan_seconds = 60.0
        trainer.register(LAYOUT)
        trainer.publish(step, {"w": weights(step, SHAPE)}).committed(timeout=60.0)
        time.sleep(60.0)


def serve(socket: str, job: str) -> None:
    memory = np.zeros(SHAPE, np.float32)
    with connect_engine(job, "r0", 0, 1, socket, path="library") as engine:
        engine.register(LAYOUT)
        while True:
            if (ticket := engine.pending(wait=1.0)) is None:
                continue
            try:
                done = engine.receive(ticket, {"w": memory}, timeout=20.0)
            except ReceiveFailed:
                continue
            print(done.step, np.array_equal(memory, weights(done.step, SHAPE)), flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "trainer":
        train(sys.argv[1], *sys.argv[3:5], int(sys.argv[5]))
    else:
        serve(sys.argv[1], sys.argv[3])
