"""Programs of hand-made and random moves for the kernels' tests, on any device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.kernels import prepare, wire_offsets
from refitd.plan import execute
from refitd.plan.program import PEER, Bucket, Program, StorageRef

POISON = 0xA5
SHAPES = {  # how an end of a move lies in its storage: (row stride, column stride, span) for rows, cols
    "dense": lambda rows, cols: (cols, 1),
    "rows": lambda rows, cols: (cols + 16, 1),
    "odd rows": lambda rows, cols: (cols + 3, 1),
    "turned": lambda rows, cols: (1, rows),
    "turned rows": lambda rows, cols: (1, rows + 5),
    "spread": lambda rows, cols: (2 * cols + 1, 2),
}


def make_program(moves, dtypes, buckets=1, gap=0):
    """``moves``: (source shape, source offset, destination shape, destination offset, rows, cols), by `SHAPES`.

    Every move has its own stretch of both storages, ``offset`` elements after the end of the one before.
    """
    table, src_at, dst_at = [], 0, 0
    for src, src_offset, dst, dst_offset, rows, cols in moves:
        src_at, dst_at = src_at + src_offset, dst_at + dst_offset
        s0, s1 = SHAPES[src](rows, cols)
        d0, d1 = SHAPES[dst](rows, cols)
        table.append((0, src_at, s0, s1, 1, dst_at, d0, d1, rows, cols))
        src_at += (rows - 1) * s0 + (cols - 1) * s1 + 1
        dst_at += (rows - 1) * d0 + (cols - 1) * d1 + 1
    table = np.array(table, np.int64)
    storages = (StorageRef("s", "from", dtypes[0], src_at), StorageRef("d", "to", dtypes[1], dst_at))
    cuts = np.linspace(0, len(table), buckets + 1).astype(int)
    sizes = table[:, 8] * table[:, 9] * ITEMSIZE[dtypes[1]]
    made = [
        Bucket(7 + 3 * i, "s", "d", PEER, 0, int(sizes[a:b].sum()), int(a), int(b))
        for i, (a, b) in enumerate(pairwise(cuts))
    ]
    program = Program("d", "digest", tuple(made), table, storages)
    return Program.from_bytes(program.to_bytes())


def random_bits(numel, dtype, seed, exact=False):
    """A flat array of ``numel`` elements of every bit pattern but NaNs, whose payloads casts do not keep.

    ``exact``: of floats only those that bfloat16 has too, and no subnormal ones.
    """
    raw = np.random.default_rng(seed).integers(0, 256, numel * ITEMSIZE[dtype], np.uint8)
    flat = raw.view(execute.array_dtype(dtype)).copy()
    values = torch.from_numpy(flat).view(getattr(torch, dtype))
    if values.is_floating_point():
        if exact and dtype == "float32":
            flat.view(np.uint32)[...] &= 0xFFFF0000
        unfit = values.float().isnan() | (exact & (values.float().abs() < 2.0**-120))
        flat[unfit.numpy()] = 0
    return flat


class Bench:
    """Both storages of a program on ``device``, beside what the CPU makes of the same moves."""

    def __init__(self, program, device, backend, seed=0):
        self.program, self.device, self.backend = program, device, backend
        ref = {s.rank: s for s in program.storages}
        interpreted = (device, backend) == ("cpu", "triton")  # Triton's interpreter cuts off what bfloat16 has not
        self.from_cpu = {"from": random_bits(ref["s"].numel, ref["s"].dtype, seed, exact=interpreted)}
        size = ref["d"].numel * ITEMSIZE[ref["d"].dtype]
        self.to_cpu = {"to": np.full(size, POISON, np.uint8).view(execute.array_dtype(ref["d"].dtype))}
        self.src = torch.from_numpy(self.from_cpu["from"].view(np.uint8)).to(device)
        if device == "cpu":
            self.src = self.src.clone()
        self.dst = torch.full((size,), POISON, dtype=torch.uint8, device=device)
        self.sources, self.destinations = {"from": self.src.data_ptr()}, {"to": self.dst.data_ptr()}

    def wire(self):
        """Poisoned packed buckets by id, and their addresses."""
        made = {
            b.id: torch.full((wire_offsets(self.program, b)[1],), POISON, dtype=torch.uint8, device=self.device)
            for b in self.program.buckets
        }
        return made, {number: buffer.data_ptr() for number, buffer in made.items()}

    def run(self, table):
        """Checksums by bucket id."""
        launch = prepare(table, self.device, self.backend)
        launch.run()
        return launch.checksums()

    def packed(self, bucket):
        """The CPU's packed form of a bucket."""
        return execute.pack(self.program, bucket, self.from_cpu)

    def padded(self, bucket):
        """The same with every move at its place in the packed form of a device."""
        packed, (offsets, size) = self.packed(bucket), wire_offsets(self.program, bucket)
        width = ITEMSIZE[self.program.dtypes_of(bucket)[1]]
        out, at = np.full(size, POISON, np.uint8), 0
        for offset, move in zip(offsets.tolist(), self.program.moves_of(bucket).tolist(), strict=True):
            nbytes = move[8] * move[9] * width
            out[offset : offset + nbytes] = packed[at : at + nbytes]
            at += nbytes
        return out

    def expected(self):
        """The destination as the CPU leaves it."""
        for bucket in self.program.buckets:
            execute.copy(self.program, bucket, self.from_cpu, self.to_cpu)
        return self.to_cpu["to"].view(np.uint8)
