"""What else moves the bytes of a scene between cards, from buffers that are there already; nobody may fail here.

One process a card for what has ranks (NCCL called directly, torch.distributed), and one process with all cards for
copies. Every rival is timed from a barrier of all to the moment when its bytes are there, and the slowest counts.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from refitd.bench.cards import card
from refitd.bench.cards.layouts import ENGINE, Held, Model, Scene, Seat, held, sizes
from refitd.bench.repair_rank import FolderMeeting
from refitd.mover.nccl import library as seam
from refitd.mover.nccl import nccl4py, opening

Pairs = dict[tuple[int, int], int]  # (card from, card to) -> bytes
SECONDS = 60.0
CTAS = (8, 16, 32)  # how many blocks NCCL may use; the last is the movers' limit
_GATHER, _DTENSOR = "gather_broadcast", "dtensor_redistribute"


class Barrier:
    """Of processes that were forked after it was made: they spin, so that they leave within microseconds."""

    def __init__(self, parties: int) -> None:
        self._parties, self._turn = parties, 0
        self._page = mmap.mmap(-1, 64 * parties)

    def wait(self, number: int) -> float:
        """Return when all have come; the time. Raises TimeoutError."""
        self._turn += 1
        struct.pack_into("q", self._page, 64 * number, self._turn)
        deadline = time.monotonic() + SECONDS
        while any(struct.unpack_from("q", self._page, 64 * i)[0] < self._turn for i in range(self._parties)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"party {number} waited {SECONDS:g} s for the others")
        return time.monotonic()


class Meeting(NamedTuple):
    """What the ranks of one scene share: how they meet, how many they are, what each card must send to each."""

    folder: Path
    barrier: Barrier
    pairs: Pairs


def names(scene: Scene) -> list[str]:
    """Of the rivals that have ranks; a `CardRank` is asked for them by number."""
    found = [f"send_recv_{ctas}" for ctas in CTAS] + [_GATHER]
    return found + [_DTENSOR] * (scene.name == "rows_to_cols")


class CardRank:
    """One card of the scene. A step is the number of a rival in `names`."""

    def __init__(self, scene: Scene, model: Model, number: int, meeting: Meeting) -> None:
        self._scene, self._model, self._number, self._meeting = scene, model, number, meeting
        self._where = card.use(number)
        self._ready: tuple[str, Callable[[], None], Callable[[], None]] | None = None
        self._distributed = False
        self._receivers: list[int] = []
        self._among: dist.ProcessGroup | None = None

    def fill(self, step: int) -> None:
        """Make ready for the rival, and let go of the one before."""
        if self._ready is not None:
            self._ready[2]()
            self._ready = None
            card.flush()
        name = names(self._scene)[step]
        make, *words = self._makers()[name]
        self._ready = (name, *make(*words))

    def _makers(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {f"send_recv_{ctas}": (self._send_recv, ctas) for ctas in CTAS}
        return {**found, _GATHER: (self._gather,), _DTENSOR: (self._dtensor,)}

    def move(self, step: int) -> float:
        """Seconds from the barrier to the end."""
        assert self._ready is not None
        assert self._ready[0] == names(self._scene)[step]
        card.settle()
        began = self._meeting.barrier.wait(self._number)
        self._ready[1]()
        card.settle()
        return time.monotonic() - began

    def exact(self, step: int) -> bool:  # noqa: ARG002  rivals are trusted
        return True

    def close(self) -> None:
        if self._ready is not None:
            self._ready[2]()
        if self._distributed:
            dist.destroy_process_group()

    # -- NCCL, called directly: as many bytes as refitd moved, contiguous, nothing packed

    def _send_recv(self, ctas: int) -> tuple[Callable[[], None], Callable[[], None]]:
        comm = self._communicator(ctas)
        sends: list[seam.Part] = []
        receives: list[seam.Part] = []
        kept: list[Tensor] = []
        for (src, dst), nbytes in sorted(self._meeting.pairs.items()):
            if self._number in (src, dst):
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._where)
                kept.append(buffer)
                ours, peer = (sends, dst) if self._number == src else (receives, src)
                ours.append(seam.Part(peer, buffer.data_ptr(), nbytes))

        def run() -> None:
            if sends or receives:
                seam.finish("send/recv", comm.exchange(sends, receives), SECONDS, _idle)

        def end() -> None:
            kept.clear()
            comm.abort()

        return run, end

    def _communicator(self, ctas: int) -> seam.Communicator:
        nccl4py.MAX_CTAS = ctas  # of this process's communicators from here on
        library = opening.open_library("")
        meeting = FolderMeeting(self._meeting.folder / f"ctas{ctas}", self._number, self._scene.cards)
        if self._number == 0:
            meeting.tell("id", library.unique_id().hex())
        id_ = bytes.fromhex(meeting.hear("id", SECONDS))
        comm = library.init(self._scene.cards, self._number, id_, f"rival{ctas}")
        seam.settle("init", [comm], SECONDS, _idle)
        return comm

    # -- torch.distributed

    def _group(self) -> None:
        if not self._distributed:
            self._distributed = True
            dist.init_process_group(
                card.BACKEND, init_method=f"file://{self._meeting.folder / 'rendezvous'}", rank=self._number,
                world_size=self._scene.cards, timeout=timedelta(seconds=SECONDS),
            )  # fmt: skip

    def _gather(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """The first trainer's card gathers every storage whole and broadcasts it; engines copy their part out."""
        self._group()
        root = self._scene.trainers[0].card
        self._receivers = sorted({root, *(seat.card for seat in self._scene.engines)})
        self._among = dist.new_group(self._receivers)
        mine = [(seat, held(self._scene, self._model, seat)) for seat in self._scene.seats if seat.card == self._number]
        weights = {
            (seat.key, name): torch.empty(n, dtype=torch.bfloat16, device=self._where)
            for seat, parts in mine
            for name, n in sizes(parts).items()
        }
        whole = torch.empty(
            self._model.rows * self._model.fused * self._model.cols, dtype=torch.bfloat16, device=self._where
        )

        def run() -> None:
            for number in range(self._model.count):
                self._one_storage(f"w{number}", whole, mine, weights)

        def end() -> None:
            weights.clear()

        return run, end

    def _one_storage(
        self, name: str, whole: Tensor, mine: Sequence[tuple[Seat, list[Held]]], weights: dict[tuple[str, str], Tensor]
    ) -> None:
        width = self._model.fused * self._model.cols
        root = self._scene.trainers[0].card
        for trainer in self._scene.trainers:
            rows = next((h.shard for h in held(self._scene, self._model, trainer) if h.storage == name), None)
            if rows is None:
                continue
            part = whole[rows.lo[0] * width : rows.hi[0] * width]
            if self._number == trainer.card:
                own = weights[trainer.key, name]
                if trainer.card == root:
                    part.copy_(own)
                else:
                    dist.send(own.view(torch.uint8), root)
            elif self._number == root:
                dist.recv(part.view(torch.uint8), trainer.card)
        if self._number in self._receivers:
            dist.broadcast(whole.view(torch.uint8), root, group=self._among)
        square = whole.view(self._model.rows, width)
        for seat, parts in mine:
            for part_ in parts if seat.side == ENGINE else ():
                self._cut_out(square, seat, part_, name, weights)

    def _cut_out(
        self, square: Tensor, seat: Seat, part: Held, name: str, weights: dict[tuple[str, str], Tensor]
    ) -> None:
        storage, _dot, block = part.shard.matrix.name.partition(".")
        if storage != name:
            return
        shard, left = part.shard, int(block) * self._model.cols
        taken = square[shard.lo[0] : shard.hi[0], left + shard.lo[1] : left + shard.hi[1]]
        part.view(weights[seat.key, part.storage]).copy_(taken)

    def _dtensor(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Rows to columns of the same cards, tensor by tensor."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        self._group()
        mesh = init_device_mesh(self._where.type, (self._scene.cards,))
        seat = self._scene.trainers[self._number]
        shards = [
            DTensor.from_local(
                torch.empty(part.shard.shape, dtype=torch.bfloat16, device=self._where), mesh, [Shard(0)]
            )
            for part in held(self._scene, self._model, seat)
        ]

        def run() -> None:
            for shard in shards:
                shard.redistribute(mesh, [Shard(1)])

        return run, shards.clear


class Copies:
    """All cards in one process. Step 0: as many bytes as refitd moved, as plain copies, all at once; step 1: a loop of
    torch's ``copy_`` over the shards as they lie.
    """

    def __init__(self, scene: Scene, model: Model, pairs: Pairs) -> None:
        self._scene, self._model, self._pairs = scene, model, pairs
        self._wheres = [card.use(number) for number in range(scene.cards)]
        self._todo: list[tuple[Tensor, Tensor]] = []
        self._asides: list[tuple[int, int] | None] = []  # cards whose other copies each copy is not to wait for

    def fill(self, step: int) -> None:
        self._todo.clear()
        card.flush()
        self._todo = self._plain() if step == 0 else self._shards()
        self._asides = [*sorted(self._pairs)] if step == 0 else [None] * len(self._todo)

    def _plain(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (torch.empty(n, dtype=torch.uint8, device=self._wheres[dst]),
             torch.zeros(n, dtype=torch.uint8, device=self._wheres[src]))
            for (src, dst), n in sorted(self._pairs.items())
        ]  # fmt: skip

    def _shards(self) -> list[tuple[Tensor, Tensor]]:
        lay = {seat.key: held(self._scene, self._model, seat) for seat in self._scene.seats}
        weights = {
            (seat.key, name): torch.empty(n, dtype=torch.bfloat16, device=self._wheres[seat.card])
            for seat in self._scene.seats
            for name, n in sizes(lay[seat.key]).items()
        }
        found = []
        for engine in self._scene.engines:
            for part in lay[engine.key]:
                for trainer in self._scene.trainers:
                    found += [
                        (part.view(weights[engine.key, part.storage])[both[0]],
                         other.view(weights[trainer.key, other.storage])[both[1]])
                        for other in lay[trainer.key]
                        if other.shard.matrix == part.shard.matrix and (both := part.shard.overlap(other.shard))
                    ]  # fmt: skip
        return found

    def move(self, step: int) -> float:  # noqa: ARG002  it is what was filled
        """Seconds of all copies: plain ones all at once, the loop as torch orders it."""
        cards = range(self._scene.cards)
        card.settle(*cards)
        began = time.monotonic()
        for (target, source), cards_ in zip(self._todo, self._asides, strict=True):
            with card.aside(*cards_) if cards_ else contextlib.nullcontext():
                target.copy_(source, non_blocking=True)
        card.settle(*cards)
        return time.monotonic() - began

    def exact(self, step: int) -> bool:  # noqa: ARG002  a plain copy is trusted
        return True

    def close(self) -> None:
        self._todo.clear()


def pairs_of(scene: Scene, edges: dict[tuple[str, str, str], int]) -> Pairs:
    """Bytes from card to card, of what refitd moved; those inside a card count only where it is alone."""
    place = {seat.key: seat.card for seat in scene.seats}
    found: Pairs = {}
    for (src, dst, _link), nbytes in edges.items():
        if place[src] != place[dst] or scene.cards == 1:
            pair = place[src], place[dst]
            found[pair] = found.get(pair, 0) + nbytes
    return found


def _idle() -> None:
    """Between polls there is nothing to do."""
