"""What ``refitd bench pack`` moves: matrices and the slices of them, as programs over real memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from refitd.layout.dtypes import ITEMSIZE
from refitd.plan.program import PEER, Bucket, Program, StorageRef


@dataclass(frozen=True, slots=True)
class Case:
    """``tensors`` matrices of ``rows`` by ``width`` in ``dtype``, ``slices`` slices of ``cols`` columns of each.

    Slices begin at column ``first`` and are as far apart as fits; they arrive dense, in ``to``. With ``turned`` the
    source's storage is column-major.
    """

    name: str
    tensors: int
    rows: int
    width: int
    cols: int
    slices: int = 1
    first: int = 0
    dtype: str = "bfloat16"
    to: str = "bfloat16"
    turned: bool = False

    def shrunk(self, by: int) -> Case:
        """The same with fewer rows and tensors, to try it out."""
        return Case(
            self.name, max(self.tensors // by, 2), max(self.rows // by, 1), self.width, self.cols, self.slices,
            self.first, self.dtype, self.to, self.turned,
        )  # fmt: skip

    @property
    def payload(self) -> int:
        """Bytes that arrive."""
        return self.tensors * self.slices * self.rows * self.cols * ITEMSIZE[self.to]

    @property
    def traffic(self) -> int:
        """Bytes that memory must read and write at least."""
        return self.payload + self.payload // ITEMSIZE[self.to] * ITEMSIZE[self.dtype]


SLICES = Case("slices_512B", 96, 7168, 2048, 256)
CAST = Case("slices_cast", 96, 7168, 2048, 256, dtype="float32")
NARROW = Case("slices_128B", 96, 7168, 2048, 64, slices=4)
ODD = Case("slices_odd", 96, 7168, 2047, 255, first=1)
TURNED = Case("slices_turned", 96, 7168, 2048, 256, turned=True)
SMALL = Case("small_tensors", 4000, 1, 7168, 7168)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A case in memory. ``whole`` are the sources by storage name, ``parts`` the dense destinations."""

    case: Case
    program: Program
    whole: Mapping[str, torch.Tensor]
    parts: Mapping[str, torch.Tensor]

    @property
    def bucket(self) -> Bucket:
        return self.program.buckets[0]

    def source(self, number: int) -> torch.Tensor:
        """The view that slice ``number`` is, shape (rows, cols)."""
        case = self.case
        tensor, at = divmod(number, case.slices)
        matrix = self.whole[f"whole{tensor}"].view(getattr(torch, case.dtype))
        matrix = matrix.view(case.width, case.rows).t() if case.turned else matrix.view(case.rows, case.width)
        return matrix[:, _column(case, at) : _column(case, at) + case.cols]

    def part(self, number: int) -> torch.Tensor:
        """Where it arrives, shape (rows, cols)."""
        case = self.case
        return self.parts[f"part{number}"].view(getattr(torch, case.to)).view(case.rows, case.cols)


def make_scene(case: Case, device: str) -> Scene:
    """Sources with bits of every kind that are finite numbers, destinations poisoned, and the program between them."""
    generator = torch.Generator(device).manual_seed(1)
    whole = {}
    for i in range(case.tensors):
        values = torch.randn(case.rows * case.width, generator=generator, device=device, dtype=torch.float32)
        whole[f"whole{i}"] = values.to(getattr(torch, case.dtype))
    size = case.rows * case.cols * ITEMSIZE[case.to]
    count = case.tensors * case.slices
    parts = {f"part{i}": torch.full((size,), 0xA5, dtype=torch.uint8, device=device) for i in range(count)}
    return Scene(case, program_of(case), whole, parts)


def program_of(case: Case) -> Program:
    """All slices in one bucket."""
    number = np.arange(case.tensors * case.slices)
    tensor, at = number // case.slices, number % case.slices
    column = np.array([_column(case, i) for i in range(case.slices)])[at]
    stride0, stride1 = (1, case.rows) if case.turned else (case.width, 1)
    fixed = np.broadcast_to
    moves = np.stack(
        [tensor, column * stride1, fixed(stride0, len(number)), fixed(stride1, len(number)),
         case.tensors + number, fixed(0, len(number)), fixed(case.cols, len(number)), fixed(1, len(number)),
         fixed(case.rows, len(number)), fixed(case.cols, len(number))],
        axis=1,
    ).astype(np.int64)  # fmt: skip
    storages = [StorageRef("s", f"whole{i}", case.dtype, case.rows * case.width) for i in range(case.tensors)]
    storages += [StorageRef("d", f"part{i}", case.to, case.rows * case.cols) for i in range(len(number))]
    bucket = Bucket(0, "s", "d", PEER, 0, case.payload, 0, len(moves))
    return Program("d", case.name, (bucket,), moves, storages)


def mirror(program: Program) -> Program:
    """The way back: what was read is written."""
    moves = program.moves[:, [4, 5, 6, 7, 0, 1, 2, 3, 8, 9]]
    return replace(program, moves=moves, buckets=tuple(b._replace(src=b.dst, dst=b.src) for b in program.buckets))


def addresses(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Storage name to address."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def wrong_parts(scene: Scene) -> Sequence[int]:
    """Numbers of the slices that are not, bit for bit, what torch's own cast and copy make."""
    destination = getattr(torch, scene.case.to)
    count = scene.case.tensors * scene.case.slices
    return [
        n for n in range(count)
        if not torch.equal(_bits(scene.part(n)), _bits(scene.source(n).to(destination).contiguous()))
    ]  # fmt: skip


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _column(case: Case, at: int) -> int:
    return case.first + at * (case.width // case.slices)
