"""What the destination holds exactly as a packed bucket does, and packing that shows its blocks."""

import numpy as np
import pytest

from refitd.layout import Layout
from refitd.layout.box import Box, Piece
from refitd.plan import Rank, make_plan
from refitd.plan.execute import dense, pack, pack_blocks, unpack

SIZE = 8


def _program(dst_strides=(4, 1), dst_numel=SIZE * 4, dtype="bfloat16"):
    tensors = {"w": ((SIZE, SIZE), dtype)}
    source = Layout.from_pieces(
        tensors, {"w": (SIZE * SIZE, dtype)}, [Piece("w", Box((0, 0), (SIZE, SIZE)), "w", 0, (SIZE, 1))]
    )
    target = Layout.from_pieces(
        {"w": ((SIZE, SIZE), "bfloat16")},
        {"left": (dst_numel, "bfloat16"), "right": (SIZE * 4, "bfloat16")},
        [
            Piece("w", Box((0, 0), (SIZE, 4)), "left", 0, dst_strides),
            Piece("w", Box((0, 4), (SIZE, SIZE)), "right", 0, (4, 1)),
        ],
    )
    plan = make_plan([Rank("s", "a", "a", source)], [Rank("d", "b", "b", target)], bucket_bytes=SIZE * 4 * 2)
    return plan.program("d")


def _bucket(program, name):
    return next(b for b in program.receives() if program.storages[int(program.moves_of(b)[0, 4])].name == name)


@pytest.mark.parametrize("strides", [(4, 1), (1, SIZE)])
def test_a_column_shard_that_is_stored_by_itself_is_dense(strides):
    """The view has the bucket's bytes, and writing to it is what unpack does; moves follow a transposed storage."""
    program = _program(strides)
    bucket = _bucket(program, "left")
    payload = np.arange(bucket.nbytes, dtype=np.uint8)
    one = {"left": np.zeros(SIZE * 4, np.uint16), "right": np.zeros(SIZE * 4, np.uint16)}
    two = {name: array.copy() for name, array in one.items()}
    place = dense(program, bucket, one)
    assert place is not None
    place[:] = payload
    unpack(program, bucket, payload, two)
    assert np.array_equal(one["left"], two["left"])
    assert np.array_equal(one["right"], two["right"])
    assert one["left"].any()


def test_gaps_are_not_dense():
    """Rows that are further apart than they are long have to be scattered."""
    program = _program((5, 1), SIZE * 5)
    arrays = {"left": np.zeros(SIZE * 5, np.uint16), "right": np.zeros(SIZE * 4, np.uint16)}
    assert dense(program, _bucket(program, "left"), arrays) is None


@pytest.mark.parametrize("block_bytes", [8, 24, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_are_what_pack_makes(dtype, block_bytes, monkeypatch):
    """However small the blocks are, smaller than a row too, and with a cast as without."""
    monkeypatch.setattr("refitd.plan.execute._BLOCK_BYTES", block_bytes)
    program = _program(dtype=dtype)
    whole = np.arange(SIZE * SIZE).astype({"bfloat16": np.uint16, "float32": np.float32}[dtype])
    for bucket in program.receives():
        blocks = [block.tobytes() for block in pack_blocks(program, bucket, {"w": whole})]
        assert b"".join(blocks) == pack(program, bucket, {"w": whole}).tobytes()
        assert 0 < min(map(len, blocks)) <= max(map(len, blocks)) <= block_bytes
