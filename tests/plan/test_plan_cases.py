"""Cases from the field whose right values are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from refitd.layout import Box, Layout, Piece, check_match
from refitd.layout.tp import column_parallel, dense, fused, fused_elements
from refitd.plan import reshard

F = "float32"


def vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_fused_split_order_is_gate_rows_above_up_rows() -> None:
    """A1: a fused [gate; up] source reaches two ranks as half of gate above half of up each."""
    facts = {"gate": ((6,), F), "up": ((6,), F)}
    whole = Box((0,), (6,))
    source = Layout.from_pieces(facts, {"w13": (12, F)}, fused("w13", ("gate", whole), ("up", whole)))
    targets = []
    for rank in range(2):
        box = column_parallel((6,), rank, 2)
        targets.append(Layout.from_pieces(facts, {"w13": (6, F)}, fused("w13", ("gate", box), ("up", box))))
    out = reshard([source], targets, [{"w13": vector([0, 1, 2, 3, 4, 5, *range(100, 106)])}])
    assert [rank["w13"].tolist() for rank in out] == [[0, 1, 2, 100, 101, 102], [3, 4, 5, 103, 104, 105]]


def test_kv_replication_against_an_interleaved_slab() -> None:
    """A3: 64 query and 4 kv heads of 128 rows, evenly cut slab over 8 to fused qkv over 8 with replicated kv."""
    facts = {"q": ((8192,), F), "k": ((512,), F), "v": ((512,), F)}
    slab = []  # (tensor, first row) of each 128-row head of the interleaved tensor
    for g in range(4):
        slab += [("q", 128 * (16 * g + h)) for h in range(16)] + [("k", 128 * g), ("v", 128 * g)]
    sources = []
    for r in range(8):
        heads = slab[9 * r : 9 * r + 9]
        parts = [(name, Box((row,), (row + 128,))) for name, row in heads]
        sources.append(Layout.from_pieces(facts, {"qkv": (1152, F)}, fused("qkv", *parts)))
    targets = []
    for r in range(8):
        kv = Box((128 * (r // 2),), (128 * (r // 2) + 128,))
        parts = [("q", column_parallel((8192,), r, 8)), ("k", kv), ("v", kv)]
        targets.append(
            Layout.from_pieces(facts, {"qkv": (fused_elements(*(b for _, b in parts)), F)}, fused("qkv", *parts))
        )
    slabs = [torch.arange(1152, dtype=torch.float32) + 10000 * r for r in range(8)]
    out = [rank["qkv"] for rank in reshard(sources, targets, [{"qkv": s} for s in slabs])]
    key, value = slabs[1][896:1024], slabs[1][1024:1152]
    assert torch.equal(out[0], torch.cat([slabs[0][0:1024], key, value]))
    assert torch.equal(out[1], torch.cat([slabs[0][1024:1152], slabs[1][0:896], key, value]))
    assert [len(rank) for rank in out] == [1280] * 8


def segments(sizes: dict[str, int], world: int) -> list[list[tuple[str, Box]]]:
    return [[(name, column_parallel((n,), r, world)) for name, n in sizes.items()] for r in range(world)]


def test_mamba_projection_is_cut_segment_by_segment() -> None:
    """A5: in_proj rows z, x, B, C, dt are each cut over the ranks, and so are conv1d's channels."""
    sizes = {"z": 8, "x": 8, "B": 4, "C": 4, "dt": 4}
    for parts, expected in (
        (sizes, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 20, 21, 24, 25]),
        ({"x": 8, "B": 4, "C": 4}, [0, 1, 2, 3, 8, 9, 12, 13]),
    ):
        facts = {name: ((n,), F) for name, n in parts.items()}
        total = sum(parts.values())
        (full,) = segments(parts, 1)
        source = Layout.from_pieces(facts, {"in": (total, F)}, fused("in", *full))
        targets = [Layout.from_pieces(facts, {"in": (total // 2, F)}, fused("in", *p)) for p in segments(parts, 2)]
        out = reshard([source], targets, [{"in": torch.arange(total, dtype=torch.float32)}])
        assert out[0]["in"].tolist() == expected
        assert out[1]["in"].tolist() == sorted(set(range(total)) - set(expected))


def test_mamba_projection_at_real_size() -> None:
    """A5: eight ranks of 4,384 rows of 35,072; rank 3 has the five ranges that the report gives."""
    sizes = {"z": 16384, "x": 16384, "B": 1024, "C": 1024, "dt": 256}
    facts = {name: ((n,), F) for name, n in sizes.items()}
    (full,) = segments(sizes, 1)
    source = Layout.from_pieces(facts, {"in": (35072, F)}, fused("in", *full))
    part = segments(sizes, 8)[3]
    target = Layout.from_pieces(facts, {"in": (4384, F)}, fused("in", *part))
    (out,) = reshard([source], [target], [{"in": torch.arange(35072, dtype=torch.float32)}])
    ranges = [(6144, 8192), (22528, 24576), (33152, 33280), (34176, 34304), (34912, 34944)]
    assert out["in"].tolist() == [float(i) for a, b in ranges for i in range(a, b)]


def test_two_vocabulary_paddings() -> None:
    """D1: 32,008 rows, padded to 32,256 at the source and to 32,064 at the destination; padding is never sent."""
    facts = {"embed": ((32008,), F)}

    def side(rows: int) -> list[Layout]:
        cuts = [(0, rows), (rows, 32008)]
        return [Layout.from_pieces(facts, {"e": (rows, F)}, [dense("embed", Box((a,), (b,)), "e")]) for a, b in cuts]

    shards = [torch.arange(16128.0), torch.arange(16128.0, 32256.0)]
    shards[1][15880:] = float("nan")
    out = reshard(side(16128), side(16032), [{"e": s} for s in shards])
    assert torch.equal(out[0]["e"], shards[0][:16032])
    assert torch.equal(out[1]["e"], torch.cat([shards[0][16032:16128], shards[1][:15880], torch.zeros(56)]))


def tied_engine() -> Layout:
    facts = {"embed": ((4,), F), "mtp.lm_head.weight": ((4,), F)}
    box = Box((0,), (4,))
    pieces = [dense("embed", box, "embed"), dense("mtp.lm_head.weight", box, "mtp")]
    return Layout.from_pieces(facts, {"embed": (4, F), "mtp": (4, F)}, pieces, tied={"lm_head.weight": "embed"})


@pytest.mark.parametrize("source_tied", [True, False])
def test_a_tied_head_is_written_once_and_the_untied_one_is_still_delivered(source_tied: bool) -> None:
    """D4: the engine's tied head needs nothing of its own, whether or not the source has one; mtp's head arrives."""
    box = Box((0,), (4,))
    facts = {"embed": ((4,), F), "mtp.lm_head.weight": ((4,), F)}
    shard = {"embed": vector([1, 2, 3, 4]), "mtp.lm_head.weight": vector([5, 6, 7, 8])}
    tied = {"lm_head.weight": "embed"} if source_tied else {}
    if not source_tied:
        facts["lm_head.weight"], shard["lm_head.weight"] = ((4,), F), vector([9, 9, 9, 9])
    source = Layout.from_pieces(facts, dict.fromkeys(facts, (4, F)), [dense(n, box, n) for n in facts], tied=tied)
    engine = tied_engine()
    check_match({"trainer/a/0": source}, {"engine/r/0": engine})
    (out,) = reshard([source], [engine], [shard])
    assert {name: t.tolist() for name, t in out.items()} == {"embed": [1, 2, 3, 4], "mtp": [5, 6, 7, 8]}


def test_an_untied_head_is_delivered_separately() -> None:
    """D4: with tie=false on both sides the head gets its own values."""
    names = ("embed", "lm_head.weight")
    facts = dict.fromkeys(names, ((4,), F))
    layout = Layout.from_pieces(facts, dict.fromkeys(names, (4, F)), [dense(n, Box((0,), (4,)), n) for n in names])
    shard = {"embed": vector([1, 2, 3, 4]), "lm_head.weight": vector([5, 6, 7, 8])}
    (out,) = reshard([layout], [layout], [shard])
    assert out["lm_head.weight"].tolist() == [5, 6, 7, 8]


def test_non_contiguous_sources_and_destinations() -> None:
    """J1: a strided view and a transposed view arrive as values, and elements between strides stay untouched."""
    x = vector([0, 1, 2, 3])
    dense_pair = Layout.from_tensors({"x": torch.zeros(2)})
    strided = Layout.from_tensors({"x": x[::2]})
    assert reshard([strided], [dense_pair], [{"x": x[::2]}])[0]["x"].tolist() == [0, 2]
    assert reshard([dense_pair], [strided], [{"x": vector([7, 8])}])[0]["x"].tolist() == [7, 0, 8]
    square, turned = Layout.from_tensors({"x": torch.zeros(2, 2)}), Layout.from_tensors({"x": x.view(2, 2).t()})
    assert reshard([turned], [square], [{"x": x.view(2, 2).t()}])[0]["x"].tolist() == [0, 2, 1, 3]


def test_four_dimensions_in_any_order() -> None:
    """A permuted four-dimensional tensor arrives element by element."""
    x = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5).permute(3, 1, 0, 2)
    plain = Layout.from_tensors({"x": torch.zeros(5, 3, 2, 4)})
    (out,) = reshard([Layout.from_tensors({"x": x})], [plain], [{"x": x}])
    assert np.array_equal(out["x"].reshape(5, 3, 2, 4).numpy(), x.numpy())


def test_a_scalar_and_an_empty_tensor() -> None:
    """A tensor without dimensions is one element; one without elements needs no holder."""
    tensors = {"s": torch.tensor(3.5), "e": torch.zeros(0, 4)}
    layout = Layout.from_tensors(tensors)
    (out,) = reshard([layout], [layout], [tensors])
    assert {name: t.tolist() for name, t in out.items()} == {"s": [3.5], "e": []}
    assert [p for p in layout.pieces() if p.tensor == "e"] == []
    assert layout.pieces() == (Piece("s", Box((), ()), "s", 0, ()),)


def test_sides_without_any_tensor_have_nothing_to_do() -> None:
    """A rank that owns nothing is a rank: the plan is empty, and proven; so is that of tensors without elements."""
    nothing, none = Layout.from_tensors({}), Layout.from_tensors({"none": torch.zeros(0, 3)})
    assert reshard([nothing], [nothing], [{}]) == [{}]
    (got,) = reshard([none], [none], [{}])
    assert {name: flat.numel() for name, flat in got.items()} == {"none": 0}
