"""A trainer rank as a process of its own: publishes steps forever, as python trainer_process.py SOCKET JOB RUN STEP."""

from __future__ import annotations

import itertools
import sys
import time

from e2e_refit import WHOLE, weights

from refitd import connect_trainer
from refitd.testing import split_layout


def main(socket: str, job: str, run: str, first: int) -> None:
    with connect_trainer(job, run, 0, 1, socket) as trainer:
        trainer.plan_seconds = 60.0
        trainer.register(split_layout(WHOLE, 0, 1))
        for step in itertools.count(first):
            offer = trainer.publish(step, {"w": weights(step)})
            offer.committed(timeout=60.0)
            time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
