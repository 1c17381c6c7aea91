"""Who sits on which card, and what of a model each rank holds: layouts by the number of cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from refitd.bench.models import DTYPE, Matrix, Shard
from refitd.layout import Layout
from refitd.layout.box import Box, Piece

TRAINER, ENGINE = "trainer", "engine"
RUN = "run"
WHOLE, ROWS, COLS, MATRICES = "whole", "rows", "cols", "matrices"
CONTIGUOUS = 64 << 10  # bytes of a row that is long enough to be as good as one piece
_MOST = 1 << 30  # bytes of one storage


class Seat(NamedTuple):
    """A rank, number ``number`` of the ``world`` of its ``group`` (the run, or a replica), on card ``card``."""

    side: str
    group: str
    number: int
    world: int
    card: int

    @property
    def key(self) -> str:
        return f"{self.side}/{self.group}/{self.number}"


@dataclass(frozen=True, slots=True)
class Scene:
    """``trainer_cut``, ``engine_cut``: how a side splits each matrix, or deals the matrices out. Seats by card."""

    name: str
    cards: int
    trainers: tuple[Seat, ...]
    engines: tuple[Seat, ...]
    trainer_cut: str
    engine_cut: str

    @property
    def seats(self) -> tuple[Seat, ...]:
        return (*self.trainers, *self.engines)

    @property
    def replicas(self) -> list[str]:
        return sorted({seat.group for seat in self.engines})

    def node(self, seat: Seat) -> int:
        """The simulated node of a seat: the cards are halved between two, and one card is one."""
        return seat.card // max(self.cards // 2, 1)

    @property
    def nodes(self) -> int:
        return min(self.cards, 2)


def _trainers(*cards: int) -> tuple[Seat, ...]:
    return tuple(Seat(TRAINER, RUN, number, len(cards), card) for number, card in enumerate(cards))


def _engines(*replicas: tuple[int, ...]) -> tuple[Seat, ...]:
    return tuple(
        Seat(ENGINE, f"r{replica}", number, len(cards), card)
        for replica, cards in enumerate(replicas)
        for number, card in enumerate(cards)
    )


SCENES = (
    Scene("two_replicas", 1, _trainers(0, 0), _engines((0, 0), (0, 0)), ROWS, COLS),
    Scene("one_to_one", 2, _trainers(0), _engines((1,)), WHOLE, WHOLE),
    Scene("rows_to_cols", 2, _trainers(0, 1), _engines((0, 1)), ROWS, COLS),
    Scene("tp2_to_tp2", 4, _trainers(0, 1), _engines((2, 3)), ROWS, COLS),
    Scene("tp2_to_2xtp1", 4, _trainers(0, 1), _engines((2,), (3,)), ROWS, WHOLE),
    Scene("tp4_to_tp4", 8, _trainers(0, 1, 2, 3), _engines((4, 5, 6, 7)), ROWS, COLS),
    Scene("ep4_to_tp2xdp2", 8, _trainers(0, 1, 2, 3), _engines((4, 5), (6, 7)), MATRICES, COLS),
    Scene("four_to_four", 8, _trainers(0, 1, 2, 3), _engines((4,), (5,), (6,), (7,)), ROWS, WHOLE),
)


def scenes(cards: int) -> list[Scene]:
    """Those for the largest number of cards that is at most ``cards``."""
    most = max(scene.cards for scene in SCENES if scene.cards <= cards)
    return [scene for scene in SCENES if scene.cards == most]


@dataclass(frozen=True, slots=True)
class Model:
    """``count`` storages of ``rows`` x ``fused * cols`` bfloat16; each block of ``cols`` is a tensor of its own."""

    count: int
    rows: int
    cols: int
    fused: int

    @property
    def nbytes(self) -> int:
        return self.count * self.rows * self.cols * self.fused * 2


def model(scene: Scene, nbytes: int, row_bytes: int) -> Model:
    """About ``nbytes`` for each trainer, of which every row that an engine gets as one piece has ``row_bytes``.

    Where engines hold whole tensors, and rows are not to be contiguous, trainers hold two tensors side by side.
    """
    world, parts = len(scene.trainers), scene.engines[0].world
    fused = 2 if scene.engine_cut == WHOLE and row_bytes < CONTIGUOUS else 1
    cols = row_bytes // 2 * (parts if scene.engine_cut == COLS else 1)
    total = nbytes * world
    per = world if scene.trainer_cut == MATRICES else 1
    count = -(-total // (_MOST * (1 if per > 1 else world)))
    count = -(-count // per) * per
    rows = total // count // (cols * fused * 2) // world * world
    return Model(count, max(rows, world), cols, fused)


class Held(NamedTuple):
    """A shard as a strided part of a storage: element (i, j) is at ``offset + i * stride + j``."""

    shard: Shard
    storage: str
    offset: int
    stride: int

    def view(self, storage: Tensor) -> Tensor:
        """The shard in its storage, a flat bfloat16 tensor."""
        return storage.as_strided(self.shard.shape, (self.stride, 1), self.offset)


def held(scene: Scene, model: Model, seat: Seat) -> list[Held]:
    """Everything that the rank holds."""
    trains = seat.side == TRAINER
    cut = scene.trainer_cut if trains else scene.engine_cut
    found = []
    for number in range(model.count):
        if cut == MATRICES and number % seat.world != seat.number:
            continue
        for block in range(model.fused):
            shard = _shard(Matrix(f"w{number}.{block}", model.rows, model.cols), cut, seat)
            if trains:
                found.append(Held(shard, f"w{number}", block * model.cols, model.fused * model.cols))
            else:
                found.append(Held(shard, shard.matrix.name, 0, shard.shape[1]))
    return found


def _shard(matrix: Matrix, cut: str, seat: Seat) -> Shard:
    lo, hi = [0, 0], [matrix.rows, matrix.cols]
    if cut in (ROWS, COLS):
        axis = 0 if cut == ROWS else 1
        size = hi[axis]
        lo[axis], hi[axis] = size * seat.number // seat.world, size * (seat.number + 1) // seat.world
    return Shard(matrix, (lo[0], lo[1]), (hi[0], hi[1]))


def sizes(parts: list[Held]) -> dict[str, int]:
    """Elements of every storage."""
    found: dict[str, int] = {}
    for part in parts:
        found[part.storage] = found.get(part.storage, 0) + part.shard.shape[0] * part.shard.shape[1]
    return found


def layout(parts: list[Held]) -> Layout:
    """As the rank registers it."""
    tensors = {one.shard.matrix.name: ((one.shard.matrix.rows, one.shard.matrix.cols), DTYPE) for one in parts}
    pieces = [
        Piece(one.shard.matrix.name, Box(one.shard.lo, one.shard.hi), one.storage, one.offset, (one.stride, 1))
        for one in parts
    ]
    return Layout.from_pieces(tensors, {name: (n, DTYPE) for name, n in sizes(parts).items()}, pieces)


def network_bytes_min(scene: Scene, model: Model) -> int:
    """What has to pass between the simulated nodes: of what engines of a node hold, what no trainer of it holds."""
    return sum(_entering(scene, model, node) for node in range(scene.nodes))


def _entering(scene: Scene, model: Model, node: int) -> int:
    there = [seat for seat in scene.seats if scene.node(seat) == node]
    needed: dict[str, list[Shard]] = {}
    have: dict[str, list[Shard]] = {}
    for seat in there:
        for part in held(scene, model, seat):
            side = have if seat.side == TRAINER else needed
            side.setdefault(part.shard.matrix.name, []).append(part.shard)
    return sum(_area(needed[name], have.get(name, [])) * 2 for name in needed)


def _area(needed: list[Shard], have: list[Shard]) -> int:
    """Elements in any of ``needed`` and in none of ``have``."""
    edges = [sorted({end for one in (*needed, *have) for end in (one.lo[axis], one.hi[axis])}) for axis in (0, 1)]
    cells = [
        ((r0, c0), (r1 - r0) * (c1 - c0))
        for r0, r1 in zip(edges[0], edges[0][1:], strict=False)
        for c0, c1 in zip(edges[1], edges[1][1:], strict=False)
    ]
    return sum(area for at, area in cells if _covers(needed, at) and not _covers(have, at))


def _covers(shards: list[Shard], at: tuple[int, int]) -> bool:
    return any(one.lo[0] <= at[0] < one.hi[0] and one.lo[1] <= at[1] < one.hi[1] for one in shards)
