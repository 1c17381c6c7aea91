"""Kernels against the CPU's pack, unpack and copy: every byte, no byte more, and the checksum's reference.

On the CPU Triton's interpreter runs the same kernel; with a CUDA device (`make test-gpu`) it is compiled.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported

from kernel_rig import SHAPES, Bench, make_program

from refitd.errors import InputError
from refitd.layout.dtypes import CASTS
from refitd.mover.kernels import bucket_checksum, gather, prepare, reread, scatter, through
from refitd.mover.kernels.table import SAMPLES, Kind, samples
from refitd.mover.kernels.touch import Touch, touch

PLACES = [
    pytest.param(("cpu", "torch"), id="torch"),
    pytest.param(("cpu", "triton"), id="interpreted"),
    pytest.param(("cuda", "torch"), id="cuda-torch", marks=pytest.mark.gpu),
    pytest.param(("cuda", "triton"), id="cuda", marks=pytest.mark.gpu),
]
PAIRS = [("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn"), ("float64", "float64"), ("int32", "int32")]
PAIRS += sorted(CASTS)


pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of NumPy, in the interpreter


@pytest.fixture(params=PLACES)
def place(request):
    """A device and a backend; Triton's interpreter only where no device would be asked instead."""
    if request.param == ("cpu", "triton") and torch.cuda.is_available():
        pytest.skip("with a device here the kernel runs compiled, in the tests beside this one")
    return request.param


def _all_shapes(rows, cols, place):
    """Each pair of shapes, starting aligned and one element off; a third of them where they are interpreted."""
    every = [(s, off, d, off, rows, cols) for s in SHAPES for d in SHAPES for off in (0, 1)]
    return every[::3] if place == ("cpu", "triton") else every


def _check(bench):
    """Gather, scatter, through and reread give the CPU's bytes, touch nothing else, and agree on the checksums."""
    program, buckets = bench.program, bench.program.buckets
    sums = {b.id: bucket_checksum(program, b, bench.packed(b)) for b in buckets}
    wire, at = bench.wire()
    assert bench.run(gather(program, buckets, bench.sources, at)) == sums
    for bucket in buckets:
        assert np.array_equal(wire[bucket.id].cpu().numpy(), bench.padded(bucket))
    assert bench.run(scatter(program, buckets, at, bench.destinations)) == sums
    expected = bench.expected()
    assert np.array_equal(bench.dst.cpu().numpy(), expected)
    bench.dst.fill_(0xA5)
    assert bench.run(through(program, buckets, bench.sources, bench.destinations)) == sums
    assert np.array_equal(bench.dst.cpu().numpy(), expected)
    assert bench.run(reread(program, buckets, bench.destinations)) == sums
    assert np.array_equal(bench.dst.cpu().numpy(), expected)


@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
def test_every_shape_at_both_ends(place, dtypes):
    """72 moves of one bucket, aligned and not, in one launch; and the same as three buckets."""
    for rows, cols, buckets in ((3, 8, 1), (5, 7, 3)):
        _check(Bench(make_program(_all_shapes(rows, cols, place), dtypes, buckets), *place))


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids="-".join)
@pytest.mark.parametrize(("rows", "cols"), [(70, 72), (65, 36), (17, 131)])
def test_matrices_larger_than_a_tile(place, dtypes, rows, cols):
    """Turned storages by tiles, with edges; odd row lengths element by element."""
    shapes = [(s, d) for s in ("rows", "turned", "turned rows") for d in ("dense", "turned rows")]
    moves = [(s, 0, d, offset, rows, cols) for s, d in shapes for offset in ((-rows * cols) % 4, 1)]
    _check(Bench(make_program(moves, dtypes, 2), *place))


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids="-".join)
def test_rows_and_runs_longer_than_a_tile(place, dtypes):
    """A dense run of several tiles, rows longer than a tile, and single elements."""
    moves = [
        ("dense", 0, "dense", 0, 3, 12_000),
        ("rows", 8, "dense", 8, 3, 9_000),
        ("rows", 1, "odd rows", 1, 3, 9_001),
    ]
    _check(
        Bench(make_program([*moves, ("dense", 0, "dense", 0, 1, 1), ("dense", 1, "dense", 1, 1, 1)], dtypes), *place)
    )


def test_random_moves(place):
    """Shapes, sizes and offsets drawn anew from a fixed seed."""
    draw = np.random.default_rng(5)
    names = list(SHAPES)
    for turn in range(1 if place == ("cpu", "triton") else 3):
        moves = [
            (names[draw.integers(6)], int(draw.integers(9)), names[draw.integers(6)], int(draw.integers(9)),
             int(draw.integers(1, 40)), int(draw.integers(1, 90)))
            for _ in range(30)
        ]  # fmt: skip
        _check(Bench(make_program(moves, ("bfloat16", "bfloat16"), 4), *place, seed=turn))


def test_rounding_is_torchs(place):
    """Ties go to even, overflow to infinity, and every NaN stays one; Triton's interpreter does not round at all."""
    device, backend = place if place != ("cpu", "triton") else ("cpu", "torch")
    program = make_program([("dense", 0, "dense", 0, 1, 16)], ("float32", "bfloat16"))
    bench = Bench(program, device, backend)
    special = [1.00390625, 1.01171875, -1.00390625, 3.4e38, -3.4e38, 1e-40, -0.0, float("inf"), 3.3961e38, 1.0, 65504.0]
    values = torch.tensor([*special, 2.0**-133, 2.0**-134 * 3, 0.1, float("nan"), -float("nan")], device=device)
    bench.src.copy_(values.view(torch.uint8))
    bench.run(through(program, program.buckets, bench.sources, bench.destinations))
    got, expected = bench.dst.view(torch.bfloat16), values.to(torch.bfloat16)
    assert torch.equal(got[:14].view(torch.int16), expected[:14].view(torch.int16))
    assert got[14:].isnan().all()


def test_alignment_decides_how_a_row_is_moved():
    """The widest access that addresses, strides and lengths allow; merged rows count as one."""
    wide = [("dense", 0, "dense", 0, 4, 24), ("rows", 0, "dense", 0, 4, 16), ("turned", 0, "dense", 0, 16, 16)]
    program = make_program(wide, ("bfloat16", "bfloat16"))
    table = through(program, program.buckets, {"from": 1 << 20}, {"to": 1 << 21})
    assert table.rows[:, 6:9].tolist() == [[1, 12, Kind.WIDE], [4, 2, Kind.WIDE], [16, 16, Kind.TURN_SRC]]
    for shift, kind in ((8, Kind.BYTES_8), (4, Kind.BYTES_4), (2, Kind.BYTES_2), (1, Kind.BYTES_1)):
        program = make_program([("rows", 0, "dense", 0, 4, 16)], ("bfloat16", "bfloat16"))
        table = through(program, program.buckets, {"from": (1 << 20) + shift}, {"to": 1 << 21})
        assert table.rows[0, 6:9].tolist() == [4, 32 // shift, kind]


def test_bytes_at_odd_addresses(place):
    """Contiguous rows move byte by byte where even their elements are not aligned."""
    device, backend = place
    program = make_program([("rows", 0, "odd rows", 0, 5, 16)], ("bfloat16", "bfloat16"))
    bench = Bench(program, device, backend)
    shifted = torch.zeros(bench.src.numel() + 1, dtype=torch.uint8, device=device)
    shifted[1:] = bench.src
    bucket = program.buckets[0]
    table = through(program, [bucket], {"from": shifted.data_ptr() + 1}, bench.destinations)
    assert bench.run(table) == {bucket.id: bucket_checksum(program, bucket, bench.packed(bucket))}
    assert np.array_equal(bench.dst.cpu().numpy(), bench.expected())


def test_a_launch_runs_again_and_again(place):
    """Each run has its own sums, of the bytes as they then are, whatever ran between; asking twice changes nothing."""
    device, backend = place
    program = make_program([("rows", 0, "dense", 0, 4, 16)], ("bfloat16", "bfloat16"))
    bench = Bench(program, device, backend)
    launch = prepare(through(program, program.buckets, bench.sources, bench.destinations), device, backend)
    launch.run()
    before = launch.checksums()
    bucket = program.buckets[0]
    assert before == launch.checksums() == {bucket.id: bucket_checksum(program, bucket, bench.packed(bucket))}
    launch.run()
    launch.run(sums=False)
    launch.run()
    assert launch.checksums() == before
    bench.src.add_(1)
    launch.run()
    after = launch.checksums()
    bench.from_cpu["from"].view(np.uint8)[:] += 1
    assert before != after == {bucket.id: bucket_checksum(program, bucket, bench.packed(bucket))}
    assert np.array_equal(bench.dst.cpu().numpy(), bench.expected())


def test_what_cannot_be_moved_is_refused():
    """No dtypes in common, storages without an address, strided elements at odd addresses."""
    program = make_program([("spread", 0, "dense", 0, 4, 4)], ("bfloat16", "bfloat16"))
    with pytest.raises(InputError, match="strided views aligned to their elements"):
        through(program, program.buckets, {"from": 1}, {"to": 16})
    with pytest.raises(InputError, match="storage to: expected an address, got none"):
        through(program, program.buckets, {"from": 16}, {})
    with pytest.raises(InputError, match="one pair of dtypes, got none"):
        through(program, [], {"from": 16}, {"to": 16})


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids="-".join)
def test_what_is_sampled_is_where_tiles_begin(dtypes):
    """Dense, in rows, by single elements and turned, at both ends; the last tile is among them."""
    size = 4 if dtypes[0] == "float32" else 2
    moves = [("dense", 0, "rows", 0, 64, 1024), ("odd rows", 1, "dense", 1, 40, 601), ("turned", 1, "dense", 1, 96, 72)]
    program = make_program(moves, dtypes)
    table = through(program, program.buckets, {"from": 1 << 20}, {"to": 1 << 30})
    found = samples(table).reshape(2, SAMPLES // 2)
    expected = [set(), set()]
    for move in program.moves.tolist():
        rows, cols = move[8:10]
        for end, (start, row, col) in enumerate((move[1:4], move[5:8])):
            width, base = (size, 1 << 20) if end == 0 else (2, 1 << 30)
            expected[end] |= {base + (start + i * row + j * col) * width for i in range(rows) for j in range(cols)}
    assert [set(part.tolist()) <= every for part, every in zip(found, expected, strict=True)] == [True, True]
    assert len(set(found[1].tolist())) == len(table.tiles) < SAMPLES // 2
    assert samples(replace(table, tiles=table.tiles[:0])).tolist() == [0] * SAMPLES


def test_a_touch_reads_at_both_ends_and_writes_nowhere(place):
    """Only its own memory; before it has run, not even that. Where kernels move nothing there is none."""
    device, backend = place
    if backend == "torch":
        assert device != "cpu" or touch([], device) is None
        return
    bench = Bench(make_program([("dense", 0, "rows", 0, 64, 1024)], ("bfloat16", "bfloat16")), *place)
    table = through(bench.program, bench.program.buckets, bench.sources, bench.destinations)
    before = bench.src.clone(), bench.dst.clone()
    one = Touch([table], device)
    assert one.found.tolist() == [0] * SAMPLES
    for _ in range(2):
        bench.src[:] += 1
        one.run()
        half = SAMPLES // 2
        at = samples(table) - np.repeat([bench.src.data_ptr(), bench.dst.data_ptr()], half)
        assert one.found[:half].tolist() == bench.src.cpu().numpy()[at[:half]].tolist()
        assert one.found[half:].tolist() == bench.dst.cpu().numpy()[at[half:]].tolist()
    assert torch.equal(bench.src, before[0] + 2)
    assert torch.equal(bench.dst, before[1])


def test_checksums_see_what_went_wrong(place):
    """A flipped bit, two flipped signs, swapped words, a shifted row, and another bucket's bytes."""
    device, backend = place
    program = make_program(
        [("dense", 0, "dense", 0, 1, 4096), ("rows", 0, "dense", 0, 4, 16)], ("bfloat16", "bfloat16")
    )
    bench = Bench(program, device, backend)
    (bucket,) = program.buckets
    table = reread(program, [bucket], bench.destinations)
    bench.run(through(program, [bucket], bench.sources, bench.destinations))
    words = bench.dst.view(torch.int64)
    good, before = bench.run(table)[bucket.id], words.clone()
    seen = {good}
    for change in (
        {5: words[5] ^ 1}, {5: words[5] ^ (-1 << 63), 9: words[9] ^ (-1 << 63)}, {5: words[6], 6: words[5]},
        {i: words[i + 1] for i in range(20)}, {0: words[0] + 1, 1: words[1] - 1},
    ):  # fmt: skip
        for at, value in {at: value.clone() for at, value in change.items()}.items():
            words[at] = value
        seen.add(bench.run(table)[bucket.id])
        words.copy_(before)
    seen.add(bucket_checksum(program, bucket._replace(id=8), bench.packed(bucket)))
    assert len(seen) == 7


def test_the_checksum_stays_what_it_is():
    """Peers of two versions must agree on it: values worked out by hand-written SplitMix64."""
    program = make_program([("dense", 0, "dense", 0, 1, 5), ("dense", 0, "dense", 0, 1, 4)], ("uint16", "uint16"))
    bucket = program.buckets[0]._replace(id=0)
    packed = np.arange(1, 10, dtype=np.uint16).view(np.uint8)

    def mix(x):
        mask = 2**64 - 1
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    words = [0x0004000300020001, 0x5, 0x0009000800070006]
    keys = [((k + 1) * 0x9E3779B97F4A7C15 + mix(1)) % 2**64 for k in range(3)]
    assert bucket_checksum(program, bucket, packed) == sum(mix(w ^ k) for w, k in zip(words, keys, strict=True)) % 2**64
