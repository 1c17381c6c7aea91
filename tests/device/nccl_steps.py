"""What a step costs NCCL between two cards: nccl_steps.py GB [BLOCKS…]. Prints one JSON.

One process a card; so many GB go one way in steps, of which three are under way at a time, as movers have it. GB/s by
blocks, size of a step, and how: ``plain``, NCCL alone; ``priority``, on a stream that goes before others; ``packed``,
while the sender copies the next step into its buffer and the receiver sums the last one, as movers' kernels do;
``packed_priority``, both; ``two``, by two communicators in turn. ``whole`` is one step of everything.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import parties  # noqa: F401  the fake card, where there is one
import torch

from refitd.bench.cards import card, rivals
from refitd.bench.party import Process, ask_all
from refitd.bench.repair_rank import FolderMeeting
from refitd.mover.nccl import library as seam
from refitd.mover.nccl import nccl4py, opening

MIB = 1 << 20
STEPS = (64 * MIB, 256 * MIB, 1024 * MIB)
WAYS = ("plain", "priority", "packed", "packed_priority", "two")
UNDER_WAY, REPEATS, SECONDS = 3, 4, 20.0


class Rank:
    """``move(number)``: the seconds of variant ``number``."""

    def __init__(self, number, folder, barrier, nbytes, blocks):
        self.number, self.folder, self.barrier = number, folder, barrier
        self.variants = variants(nbytes, blocks)
        self.where = card.use(number)
        self.nbytes = nbytes
        self.weights = torch.zeros(nbytes, dtype=torch.uint8, device=self.where)
        self.buffers = torch.zeros(UNDER_WAY + 1, min(nbytes, max(STEPS)), dtype=torch.uint8, device=self.where)
        self.comms = {}
        self.aside = _aside(self.where)

    def _comms(self, blocks, priority, count):
        key = blocks, priority
        found = self.comms.setdefault(key, [])
        while len(found) < count:
            found.append(self._made(blocks, priority, len(found)))
        return found[:count]

    def _made(self, blocks, priority, which):
        library, nccl4py.MAX_CTAS = opening.open_library(""), blocks
        meeting = FolderMeeting(self.folder / f"{blocks}{priority}{which}", self.number, 2)
        if self.number == 0:
            meeting.tell("id", library.unique_id().hex())
        with _streams(-1 if priority else 0):
            comm = library.init(2, self.number, bytes.fromhex(meeting.hear("id", SECONDS)), f"steps{blocks}{which}")
        seam.settle("init", [comm], SECONDS, lambda: None)
        return comm

    def move(self, number):
        nbytes, blocks, way = self.variants[number]
        comms = self._comms(blocks, "priority" in way, 2 if way == "two" else 1)
        times = []
        for _ in range(REPEATS):
            card.settle()
            began = self.barrier.wait(self.number)
            self._all(comms, nbytes, way.startswith("packed"))
            card.settle()
            times.append(time.monotonic() - began)
        return statistics.median(times[1:])

    def _all(self, comms, nbytes, busy):
        under_way = []
        for step, start in enumerate(range(0, self.nbytes, nbytes)):
            size = min(nbytes, self.nbytes - start)
            if len(under_way) == UNDER_WAY:
                self._done(under_way.pop(0), busy)
            under_way.append((self._begun(comms[step % len(comms)], step, start, size, busy), start, size))
        while under_way:
            self._done(under_way.pop(0), busy)

    def _begun(self, comm, step, start, size, busy):
        weights, after = self.weights[start : start + size], []
        if self.number == 0:
            buffer = weights
            if busy:
                buffer, after = self.buffers[step % len(self.buffers)][:size], self._copied(step, weights)
            return comm.exchange([seam.Part(1, buffer.data_ptr(), size)], [], after)
        return comm.exchange([], [seam.Part(0, weights.data_ptr(), size)])

    def _copied(self, step, weights):
        buffer = self.buffers[step % len(self.buffers)][: len(weights)]
        with self.aside[0]:
            torch.add(weights.view(torch.int64), 0, out=buffer.view(torch.int64))  # by processors, as movers do it
        return self.aside[1]()

    def _done(self, flight, busy):
        work, start, size = flight
        seam.finish("step", work, SECONDS, lambda: None)
        if busy and self.number:
            with self.aside[0]:
                self.weights[start : start + size].view(torch.int64).sum()

    def close(self):
        for comm in (comm for comms in self.comms.values() for comm in comms):
            comm.abort()


def _aside(where):
    """A stream for what goes on beside NCCL, and what gives the events after it."""
    if where.type == "cpu":
        return contextlib.nullcontext(), list
    stream = torch.cuda.Stream()
    return torch.cuda.stream(stream), lambda: [stream.record_event()]


@contextlib.contextmanager
def _streams(priority):
    """Whatever streams are made meanwhile have this priority."""
    made = torch.cuda.Stream
    torch.cuda.Stream = lambda device=None, **_asked: made(device=device, priority=priority)
    try:
        yield
    finally:
        torch.cuda.Stream = made


def variants(nbytes, blocks):
    """(step, blocks, way), cheap and telling ones first."""
    found = [(nbytes, number, "plain") for number in blocks]
    return found + [(step, number, way) for number in blocks for step in STEPS if step < nbytes for way in WAYS]


def main():
    gigabytes, *blocks = map(float, sys.argv[1:])
    nbytes, numbers = int(gigabytes * 1e9) // MIB * MIB, [int(number) for number in blocks] or [16, 32]
    barrier, found, failed = rivals.Barrier(2), {}, ""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Process(f"rank{i}", partial(Rank, i, Path(folder), barrier, nbytes, numbers)) for i in range(2)]
        try:
            for number, (step, count, way) in enumerate(variants(nbytes, numbers)):
                seconds = max(ask_all(ranks, "move", number))
                size = "whole" if step == nbytes else f"{step // MIB}MiB"
                found[f"{count}_{size}_{way}"] = round(nbytes / seconds / 1e9, 1)
                print(f"{count}_{size}_{way}: {nbytes / seconds / 1e9:.1f} GB/s, {seconds * 1e3:.2f} ms", flush=True)
            ask_all(ranks, "close")
        except Exception as error:  # noqa: BLE001  what is known so far is said
            failed = str(error)[-2000:]
        finally:
            for rank in ranks:
                rank.end()
    print(json.dumps({"gigabytes": nbytes / 1e9, "rates": found, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
