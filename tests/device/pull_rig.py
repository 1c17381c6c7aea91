"""A mover of one rank in this process, and those whose memory it reads, on the fake GPU."""

from __future__ import annotations

import json
import os
import queue

import numpy as np

from refitd.hook.gpu.export import Extent, export
from refitd.hook.memfd import create_document, create_memory
from refitd.hook.page import ControlPage
from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.child import Mover
from refitd.mover.device import bytes_at
from refitd.plan import execute
from refitd.plan.program import PEER, Bucket, Program, StorageRef

OWNERS, READER = ("trainer/run/0", "trainer/run/1"), "engine/r0/0"
ROWS, COLS, PIECES = 32, 48, 4


def make_program(dtypes=("bfloat16", "bfloat16")):
    """Two owners hold the halves of the rows of "w"; the reader takes the left half of the columns."""
    half, width, step = ROWS // 2, COLS // 2, ROWS // 2 // PIECES
    storages = [StorageRef(key, "w", dtypes[0], half * COLS) for key in OWNERS]
    storages.append(StorageRef(READER, "w", dtypes[1], ROWS * width))
    moves, buckets = [], []
    for owner, key in enumerate(OWNERS):
        for piece in range(PIECES):
            row = piece * step
            moves.append((owner, row * COLS, COLS, 1, 2, (owner * half + row) * width, width, 1, step, width))
            nbytes = step * width * ITEMSIZE[dtypes[1]]
            buckets.append(Bucket(len(buckets), key, READER, PEER, 0, nbytes, len(buckets), len(buckets) + 1))
    return Program(READER, "d" * 32, tuple(buckets), np.array(moves, np.int64), storages)


class Owner:
    """A rank whose storage "w" is on the fake device, or in a memfd."""

    def __init__(self, gpu, key, ref, on_device=True):
        self.key, self.nbytes = key, ref.numel * ITEMSIZE[ref.dtype]
        self.page, self.on_device = ControlPage.create(), on_device
        self.dtype = ref.dtype
        self.fd = -1 if on_device else create_memory("w", self.nbytes)
        if on_device:
            self.address = gpu.allocate(self.nbytes)
            self.bytes = bytes_at(self.address, self.nbytes, "cpu").numpy()
            self.message = export(gpu.FakeDriver(), {"w": Extent(self.address, self.nbytes)}).message
            self.message["uuid"] = gpu.UUID
        else:
            self.bytes = np.memmap(f"/proc/self/fd/{self.fd}", np.uint8, "r+")

    def mount(self, mover, writable=False, pid=None, **changes):
        message = {
            "kind": "mount", "memory": self.key, "writable": writable, "word_index": 0, "storages": [], "device": None,
        }  # fmt: skip
        fds = [os.pidfd_open(pid or os.getpid()), os.dup(self.page.fd)]
        if self.on_device:
            message["device"] = self.message
        else:
            os.close(fds[0])
            fds[0] = os.dup(self.fd)
            message["storages"] = [{"name": "w", "fd": 0, "offset": 0, "nbytes": self.nbytes, "dtype": self.dtype}]
        mover.handle({**message, **changes}, fds)


class Rig:
    """A mover of the reader in this process."""

    def __init__(self, gpu, program, on_device=(True, True, True)):
        self.program, self.said = program, queue.Queue()
        self.mover = Mover(READER, self.said.put)
        refs = program.storages
        self.ranks = [Owner(gpu, ref.rank, ref, there) for ref, there in zip(refs, on_device, strict=True)]
        rng = np.random.default_rng(1)
        for one in self.ranks[:2]:
            one.bytes[:] = rng.integers(0, 120, one.nbytes, np.uint8)
        self.mine = self.ranks[2]

    def mount(self):
        self.mine.mount(self.mover, writable=True)
        for one in self.ranks[:2]:
            one.mount(self.mover)
        assert [self.wait("mounted")["memory"] for _ in range(3)] == [READER, *OWNERS]

    def build(self, token=1, **more):
        message = {
            "kind": "build", "lane": "r0", "token": token, "rank": READER, "connect": [], "accept": [], "secret": "",
            "job": "job", **more,
        }  # fmt: skip
        self.mover.handle(message, [create_document("program", self.program.to_bytes())])
        self.wait("built")

    def run(self, attempt=1, token=1, words=None, **more):
        words = words or {one.key: one.page.loan_word for one in self.ranks}
        message = {"kind": "run", "lane": "r0", "token": token, "attempt": attempt, "publication": [1, attempt]}
        self.mover.handle({**message, "words": words, **more}, [])

    def wait(self, kind):
        while (message := self.said.get(timeout=10))["kind"] != kind:
            assert message["kind"] != "failed", message
        return json.loads(json.dumps(message))

    def expected(self):
        """The reader's bytes once all have come."""
        refs = self.program.storages
        out = {"w": np.zeros(refs[2].numel, execute.array_dtype(refs[2].dtype))}
        for bucket in self.program.buckets:
            owner = self.ranks[OWNERS.index(bucket.src)]
            source = {"w": owner.bytes.view(execute.array_dtype(owner.dtype))}
            execute.copy(self.program, bucket, source, out)
        return out["w"].view(np.uint8)

    def round(self):
        return self.mover._lanes["r0"]._board.round

    def close(self):
        self.mover.close()
        for one in self.ranks:
            one.page.close()
            if one.fd >= 0:
                os.close(one.fd)


def failures(one, count):
    """Reasons by edge, once there are so many, and what was verified by then."""
    failed = []
    while len(failed) < count:
        if (message := one.said.get(timeout=10))["kind"] == "failed":
            failed.append(message)
    return {tuple(message["edge"]): message["reason"] for message in failed}, failed[-1]["verified"]
