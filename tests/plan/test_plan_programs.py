"""Programs as bytes, and buckets carried out on arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_helpers import distinct, ranks, simple

from refitd.errors import InputError
from refitd.layout import Box
from refitd.plan import Held, Program, copy, flat_array, make_plan, pack, unpack
from refitd.plan.cast import cast, cast_numpy
from refitd.plan.execute import array_dtype

W = distinct({"w": (6, 4), "v": (5,)})


def program(destination: str = "float32") -> Program:
    boxes = {"w": [Box((0, 0), (6, 2)), Box((0, 2), (6, 4))], "v": [Box((0,), (5,))]}
    sources = [simple(W, {"w": [Box((0, 0), (6, 4))], "v": [Box((0,), (5,))]})]
    members = ranks("engine/d", [simple(W, boxes, destination)], "x")
    return make_plan(ranks("trainer/s", sources, "a"), members).program("engine/d/0")


def test_a_program_survives_its_bytes() -> None:
    """Bytes give back the same buckets, moves, storages and digest."""
    p = program()
    q = Program.from_bytes(p.to_bytes())
    assert (q.rank, q.plan_digest, q.buckets, q.storages) == (p.rank, p.plan_digest, p.buckets, p.storages)
    assert q.moves.tolist() == p.moves.tolist()
    assert q.to_bytes() == p.to_bytes()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_program_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    """Any change of any bytes gives InputError, or a program whose moves stay inside their storages."""
    raw = bytearray(program().to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.sampled_from([len(raw), len(raw), len(raw) - 1, 7]))]
    try:
        p = Program.from_bytes(bytes(raw))
    except InputError:
        return
    for bucket in p.receives():
        used = [p.storages[i] for i in np.unique(p.moves_of(bucket)[:, 0])]
        if all(s.numel < 1000 for s in used):
            arrays = {s.name: np.zeros(s.numel, array_dtype(s.dtype)) for s in used}
            assert pack(p, bucket, arrays).nbytes == bucket.nbytes


def test_held_survives_its_bytes() -> None:
    """Held gives back equal boxes and digest; overlapping input becomes disjoint."""
    held = Held({"w": [Box((0, 0), (4, 2)), Box((2, 0), (6, 1))], "s": [Box((), ())], "none": [Box((3,), (3,))]})
    assert held.elements == 8 + 2 + 1
    assert Held.from_bytes(held.to_bytes()) == held
    assert Held.from_bytes(held.to_bytes()).digest == held.digest
    assert held.union(Held({"w": [Box((0, 0), (6, 2))]})).boxes["w"][0].lo == (0, 0)
    assert held.union(Held({"w": [Box((0, 0), (6, 2))]})).elements == 12 + 1


@pytest.mark.parametrize("raw", [b"", b"RFT1", b"x" * 100, program().to_bytes()])
def test_garbage_is_no_held(raw: bytes) -> None:
    """Held.from_bytes raises InputError on anything else."""
    with pytest.raises(InputError):
        Held.from_bytes(raw)


def test_pack_lays_moves_one_after_the_other() -> None:
    """The packed form is each move row-major in the destination's dtype, and unpack puts it in place."""
    p = program("bfloat16")
    (bucket,) = p.buckets
    sources = {"w.0": W["w"].numpy().ravel(), "v.0": W["v"].numpy().ravel()}
    packed = pack(p, bucket, sources)
    values = torch.from_numpy(packed).view(torch.bfloat16).float().tolist()
    w = W["w"]
    order = [int(row[4]) for row in p.moves_of(bucket).tolist()]
    parts = {"w.0": w[:, :2].flatten().tolist(), "w.1": w[:, 2:].flatten().tolist(), "v.0": W["v"].tolist()}
    assert values == [x for storage in order for x in parts[p.storages[storage].name]]
    for fill in (lambda out: unpack(p, bucket, packed, out), lambda out: copy(p, bucket, sources, out)):
        out = {s.name: np.zeros(s.numel, np.uint16) for s in p.storages if s.rank == "engine/d/0"}
        fill(out)
        got = {name: torch.from_numpy(a).view(torch.bfloat16).float().tolist() for name, a in out.items()}
        assert got == parts


def test_pack_reads_read_only_memory_into_a_given_buffer() -> None:
    """Sources may be read-only buffers; ``out`` is used where it is given."""
    p = program("bfloat16")
    (bucket,) = p.buckets
    sources = {name: flat_array(tensor.numpy().tobytes(), "float32") for name, tensor in
               (("w.0", W["w"]), ("v.0", W["v"]))}  # fmt: skip
    out = np.zeros(bucket.nbytes + 10, np.uint8)
    packed = pack(p, bucket, sources, out)
    assert packed.base is out
    assert out[bucket.nbytes :].tolist() == [0] * 10


def test_a_view_that_leaves_its_memory_is_refused_before_a_byte_moves() -> None:
    """An array shorter than the program says raises ValueError."""
    p = program()
    (bucket,) = p.buckets
    with pytest.raises(ValueError, match="buffer"):
        pack(p, bucket, {"w.0": np.zeros(23, np.float32), "v.0": np.zeros(5, np.float32)})


SPECIAL = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x3F808000, 0x3F818000, 0x7F7FFFFF,
           0x00000001, 0x33800000, 0x477FF000, 0x477FEFFF, 0x38800000, 0x387FFFFF]  # fmt: skip


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_casts_have_torch_s_bits(target: str) -> None:
    """Special and random float32 values, NaN included, are cast as a contiguous torch tensor is."""
    rng = np.random.default_rng(7)
    raw = np.concatenate([np.array(SPECIAL, np.uint32), rng.integers(0, 1 << 32, 5000, dtype=np.uint32)])
    values = raw.view(np.float32)
    expected = torch.from_numpy(values).to(getattr(torch, target)).view(torch.uint16).numpy()
    out = np.zeros(values.size, array_dtype(target))
    cast(values, "float32", out, target)
    assert out.view(np.uint16).tolist() == expected.tolist()
    cast_numpy(values, "float32", out, target)
    real = ~np.isnan(values)
    assert out.view(np.uint16)[real].tolist() == expected[real].tolist()
    assert np.isnan(torch.from_numpy(out.view(np.uint16)).view(getattr(torch, target)).float().numpy()[~real]).all()


def test_widening_is_exact_without_torch() -> None:
    """All 65,536 bfloat16 values widen to the same float32 bits with and without torch."""
    raw = np.arange(1 << 16, dtype=np.uint16)
    out = np.zeros(raw.size, np.float32)
    cast_numpy(raw, "bfloat16", out, "float32")
    expected = torch.from_numpy(raw).view(torch.bfloat16).float().numpy()
    assert out.view(np.uint32).tolist() == expected.view(np.uint32).tolist()
