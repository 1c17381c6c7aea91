"""An engine rank as a process of its own, which asks for tickets and says why it has no daemon whenever that changes:
python engine_process.py SOCKET JOB REPLICA."""

from __future__ import annotations

import sys

from e2e_refit import WHOLE

from refitd import connect_engine
from refitd.testing import split_layout


def main(socket: str, job: str, replica: str) -> None:
    with connect_engine(job, replica, 0, 1, socket) as engine:
        engine.register(split_layout(WHOLE, 0, 1))
        print("registered", flush=True)
        said = engine.client.failure
        while True:
            assert engine.pending(wait=0.1) is None, "a ticket for who was replaced"
            if engine.client.failure != said:
                said = engine.client.failure
                print(said, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
