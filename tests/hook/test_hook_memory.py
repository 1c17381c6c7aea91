"""Arenas, staging, and storages as bytes."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
import torch

from refitd.errors import InputError
from refitd.hook.blocks import blocks_of
from refitd.hook.memory import SharedArena, Staging, shared_empty
from refitd.hook.shadow import shadow_offsets


def _bytes_at(export: Any, name: str) -> bytes:
    entry = next(entry for entry in export.memory if entry["name"] == name)
    return os.pread(export.fds[entry["fd"]], entry["nbytes"], entry["offset"])


def test_arena_tensors_are_lent_where_they_are() -> None:
    """Tensors and arrays in an arena are exported without a copy: later writes show through the descriptor."""
    arena = SharedArena(4096)
    weight = arena.empty((3, 4), torch.bfloat16)
    table = arena.array((5,), "float32")
    blocks = blocks_of({"w": weight, "t": table}, {"w": (12, "bfloat16"), "t": (5, "float32")})
    export = Staging().export(blocks)
    assert (export.live, export.staged, export.fds) == (True, [], [arena.fd])
    assert [(e["offset"], e["nbytes"]) for e in export.memory] == [(0, 24), (64, 20)]
    weight.fill_(1.5)
    table[:] = 2.0
    assert _bytes_at(export, "w") == weight.view(torch.uint8).numpy().tobytes()
    assert _bytes_at(export, "t") == np.full(5, 2.0, "float32").tobytes()


def test_view_inside_of_an_arena() -> None:
    """A part of a shared tensor is found by its address."""
    whole = shared_empty((8, 4), torch.float32)
    whole.copy_(torch.arange(32.0).reshape(8, 4))
    export = Staging().export(blocks_of({"w": whole[2:4]}, {"w": (8, "float32")}))
    assert export.staged == []
    assert _bytes_at(export, "w") == torch.arange(8.0, 16.0).numpy().tobytes()


def test_other_tensors_are_staged() -> None:
    """Tensors outside of every arena go by staging, beside those that are lent live."""
    shared, plain = shared_empty((4,), "int32"), torch.arange(6, dtype=torch.int64)
    staging = Staging()
    blocks = blocks_of({"s": shared, "p": plain}, {"s": (4, "int32"), "p": (6, "int64")})
    export = staging.export(blocks)
    assert (export.live, len(export.staged), len(export.fds)) == (True, 1, 2)
    for block, place in export.staged:
        block.save(place)
    assert _bytes_at(export, "p") == plain.numpy().tobytes()
    assert staging.export(blocks).memory == export.memory


def test_staging_lands_in_the_live_tensor() -> None:
    """Bytes that arrived in staging are copied into the storage, whatever the order of its dimensions."""
    live = torch.zeros(2, 3, dtype=torch.bfloat16).t()
    export = Staging().export(blocks_of({"w": live}, {"w": (6, "bfloat16")}))
    ((block, place),) = export.staged
    place[:] = torch.arange(6, dtype=torch.bfloat16).view(torch.uint8).numpy()
    block.load(place)
    assert live.t().flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_memory_goes_with_its_last_tensor() -> None:
    """The descriptor of an arena is closed when neither arena nor tensors are left, and not before."""
    arena = SharedArena(64)
    fd, tensor = arena.fd, arena.empty((4,), torch.float32)
    inode = os.fstat(fd).st_ino
    del arena
    gc.collect()
    assert os.fstat(fd).st_ino == inode
    del tensor
    gc.collect()
    assert all(os.fstat(int(name)).st_ino != inode for name in os.listdir("/proc/self/fd") if _is_open(name))


def _is_open(name: str) -> bool:
    try:
        os.fstat(int(name))
    except OSError:
        return False
    return True


def test_dtensor_is_taken_locally() -> None:
    """A DTensor stands for its local shard."""

    class Sharded(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return torch.ones(3)

    export = Staging().export(blocks_of({"w": torch.zeros(9).as_subclass(Sharded)}, {"w": (3, "float32")}))
    assert export.memory == [{"name": "w", "fd": 0, "offset": 0, "nbytes": 12}]


@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "nothing"), (torch.zeros(3), "3 elements of float32"),
     (torch.zeros(4, dtype=torch.int8), "4 elements of int8"),
     (torch.zeros(8)[::2], "shape (4,), strides (2,)"), ([0.0] * 4, "list")],
)  # fmt: skip
def test_tensors_that_are_not_the_layouts(value: object, got: str) -> None:
    """A tensor that is missing, of another size or dtype, full of gaps or none at all is named."""
    tensors = {} if value is None else {"w": value}
    with pytest.raises(InputError) as caught:
        blocks_of(tensors, {"w": (4, "float32")})
    assert (caught.value.field, caught.value.got) == ("tensors['w']", got)


def test_numpy_stands_in_for_bfloat16() -> None:
    """NumPy holds bfloat16 as uint16; a read-only array is refused."""
    array = np.arange(4, dtype=np.uint16)
    assert blocks_of({"w": array}, {"w": (4, "bfloat16")})["w"].nbytes == 8
    array.flags.writeable = False
    with pytest.raises(InputError, match="read-only"):
        blocks_of({"w": array}, {"w": (4, "bfloat16")})


def test_empty_storages() -> None:
    """A rank that holds nothing of a storage exports it with no bytes."""
    export = Staging().export(blocks_of({"w": torch.empty(0)}, {"w": (0, "float32")}))
    assert export.memory == [{"name": "w", "fd": 0, "offset": 0, "nbytes": 0}]


def test_arena_is_full() -> None:
    """An arena says how much it has left."""
    arena = SharedArena(100)
    arena.empty((10,), "int8")
    with pytest.raises(InputError, match="at most 36 bytes, got 40 bytes"):
        arena.empty((10,), "float32")
    with pytest.raises(InputError, match="complex64"):
        arena.empty((1,), torch.complex64)


def test_shadow_offsets() -> None:
    """Storages lie in the layout's order, each on a multiple of 64 bytes."""
    places, total = shadow_offsets({"a": (3, "float32"), "b": (0, "int8"), "c": (65, "int8"), "d": (1, "float64")})
    assert places == {"a": (0, 12), "b": (64, 0), "c": (64, 65), "d": (192, 8)}
    assert total == 200
    assert shadow_offsets({}) == ({}, 1)
