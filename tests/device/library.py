"""Refits on a GPU on the library path: usage: library.py MODEL TRANSPORT PATH... Prints one JSON.

For each PATH (``child``, ``library``, ``auto``): refits, every bit compared; then a trainer whose memory the engines'
movers have mapped is killed, a new one takes its place, and they go on. On the fake GPU REFITD_FAKE_GPU_EXCLUSIVE keeps
children off the card, which ``auto`` finds out.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial

import torch

if os.environ.get("REFITD_FAKE_GPU"):
    import fake_bench  # noqa: F401  makes tensors of the fake GPU's memory

from refitd.bench import clients, contest, models
from refitd.bench.daemon import Settings
from refitd.bench.party import Process, ask_all
from refitd.hook.admin import ask

ROUNDS = 5


def rounds(one, first):
    """Milliseconds of `ROUNDS` refits, of which the first two, that warm up, are left out."""
    return [1000 * one.round(step) for step in range(first, first + ROUNDS)][2:]


def paths(one):
    """By rank: where its mover runs, why, and how many it has had."""
    ranks = ask("status", one._daemon.socket)["jobs"][clients.JOB]["ranks"]
    return {rank["key"]: [rank["path"], rank["path_why"], rank["life"]] for rank in ranks}


def alone(party):
    """NCCL wants one rank a host on a card; a thread of a client leaves that to its process."""
    made = party.__init__

    def init(self, model, rank, *more):
        os.environ["NCCL_HOSTID"] = f"{party.__name__}{rank}"
        made(self, model, rank, *more)

    party.__init__ = init


def replace_trainer(one, model):
    one._trainers[1].end()
    make = partial(clients.TrainerParty, model, 1, one._daemon.socket, "cuda")
    one._trainers[1] = Process("trainer1", make)
    ask_all([one._trainers[1]], "start")
    time.sleep(1.0)  # its mover starts; it joins its run at the next publish


def measure(model, transport, path):
    with contest.refit(model, transport, "cuda", Settings(bucket_bytes=8 << 20, path=path)) as one:
        found = {"ms": rounds(one, 0), "before": paths(one)}
        replace_trainer(one, model)
        found |= {"after_ms": rounds(one, ROUNDS), "after": paths(one)}
    return found | {"median_ms": statistics.median(found["ms"])}


def main():
    name, transport, *ways = sys.argv[1:]
    torch.set_num_threads(1)  # before the parties are forked: the fake's kernels would else wait for each other
    alone(clients.TrainerParty)
    alone(clients.EngineParty)
    found = {path: measure(models.model(name), transport, path) for path in ways}
    print(json.dumps({"model": name, "transport": transport, **found}))


if __name__ == "__main__":
    main()
