"""In which order one launch takes the parts of what it moves."""

import numpy as np

from refitd.mover.kernels import interleaved, through
from refitd.mover.kernels.table import TILE_WORDS
from refitd.plan.program import PEER, Bucket, Program, StorageRef

TILE = TILE_WORDS * 8 // 2  # elements of bfloat16


def table_of(tiles):
    """A reader with a bucket of that many tiles from each source, dense at both ends."""
    sizes = [count * TILE for count in tiles]
    refs = [StorageRef(f"s{i}", f"s{i}/w", "bfloat16", size) for i, size in enumerate(sizes)]
    refs.append(StorageRef("r", "r/w", "bfloat16", sum(sizes)))
    starts = np.cumsum(sizes) - sizes
    moves = [(i, 0, size, 1, len(sizes), starts[i], size, 1, 1, size) for i, size in enumerate(sizes)]
    buckets = tuple(Bucket(i, f"s{i}", "r", PEER, 0, size * 2, i, i + 1) for i, size in enumerate(sizes))
    program = Program("r", "d" * 32, buckets, np.array(moves, np.int64), refs)
    places = {ref.name: 1 << (40 + number) for number, ref in enumerate(refs)}
    return through(program, buckets, places, places), [bucket.src for bucket in buckets]


def test_sources_take_turns_in_proportion_to_what_they_have():
    """At any moment all of them are read from, until the end; every tile is there once."""
    table, sources = table_of((6, 2, 4))
    assert table.tiles[:, 0].tolist() == [0] * 6 + [1] * 2 + [2] * 4
    mixed = interleaved(table, sources)
    assert mixed.tiles[:, 0].tolist() == [0, 2, 0, 1, 2, 0, 0, 2, 0, 1, 2, 0]
    assert sorted(map(tuple, mixed.tiles.tolist())) == sorted(map(tuple, table.tiles.tolist()))
    assert (mixed.rows is table.rows, mixed.buckets, mixed.nbytes) == (True, table.buckets, table.nbytes)


def test_one_source_is_read_in_order():
    """Buckets of the same rank are one source."""
    table, sources = table_of((2, 3))
    assert interleaved(table, ["s0"] * len(sources)) is table
