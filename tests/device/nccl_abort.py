"""Whether NCCL keeps memory of a card when communicators end: nccl_abort.py CYCLES. Prints one JSON; asserts nothing.

Two processes on one card, each a host of its own for NCCL. Free bytes of the card after each cycle, by what a cycle is:
``communicators``: init, a transfer, revoke, abort, on a stream that is used again; ``streams``: a new stream, and
something small on it, which torch keeps memory for; ``same_stream``: something small on one stream, always the same.
``lost``: bytes a cycle and process, after the warm ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from parties import FAKE  # with the fake card, where there is one

from refitd.bench.cards import card
from refitd.bench.party import Process, ask_all
from refitd.bench.repair_rank import FolderMeeting
from refitd.mover.nccl import library as seam
from refitd.mover.nccl import opening
from refitd.mover.nccl.together import Together, new_ids

RANKS, WARM, SECONDS = 2, 3, 20.0
NBYTES = 64 << 20
KINDS = ("communicators", "streams", "same_stream")


class Rank:
    """Each kind is a method of its own."""

    def __init__(self, number, folder):
        self.number, self.folder = number, folder
        self.where = card.use(0)
        self.library = opening.open_library(f"abort#{number}")
        self.buffer = torch.zeros(NBYTES, dtype=torch.uint8, device=self.where)
        self.stream = None if FAKE else torch.cuda.Stream()

    def communicators(self, step):
        """As a lane makes and ends them."""
        meeting = FolderMeeting(self.folder / str(step), self.number, RANKS)
        if self.number == 0:
            meeting.tell("ids", new_ids(self.library))
        together = Together()
        together.make(self.library, RANKS, self.number, meeting.hear("ids", SECONDS), f"abort{step}", self._settled)
        part = seam.Part(1 - self.number, self.buffer.data_ptr(), NBYTES)
        for comm in together:
            work = comm.exchange([] if self.number else [part], [part] if self.number else [])
            seam.finish("step", work, SECONDS, lambda: None)
        together.revoke(SECONDS)
        together.abort()

    def _settled(self, comm):
        seam.settle("init", [comm], SECONDS, lambda: None)

    def streams(self, _step):
        self._small(None if FAKE else torch.cuda.Stream())

    def same_stream(self, _step):
        self._small(self.stream)

    def _small(self, stream):
        if stream is not None:
            with torch.cuda.stream(stream):
                torch.zeros(1000, device=self.where)
            stream.synchronize()

    def free(self, _step):
        """Of the card."""
        return 0 if FAKE else torch.cuda.mem_get_info()[0]

    def close(self):
        pass


def main():
    cycles, free, failed = int(sys.argv[1]), {}, ""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Process(f"rank{i}", partial(Rank, i, Path(folder))) for i in range(RANKS)]
        try:
            for kind in KINDS:
                free[kind] = []
                for step in range(WARM + cycles):
                    ask_all(ranks, kind, step)
                    free[kind].append(ask_all(ranks[:1], "free")[0])
                    print(f"{kind} {step}: {free[kind][-1]:.0f} bytes free", file=sys.stderr, flush=True)
        except Exception as error:  # noqa: BLE001  what is known so far is said
            failed = str(error)[-2000:]
        finally:
            for rank in ranks:
                rank.end()
    lost = {kind: (seen[WARM - 1] - seen[-1]) / cycles / RANKS for kind, seen in free.items() if len(seen) > WARM}
    print(json.dumps({"cycles": cycles, "lost": lost, "free": free, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
