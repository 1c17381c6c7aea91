"""Groups B and C of the field cases: global sizes, and flat shards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from case_values import filled, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.errors import LayoutError
from refitd.layout import Box, Layout, Piece, side_from_layouts
from refitd.layout.fronts.flat import (
    FSDP1_WITHOUT_ORIG_PARAMS,
    Buffer,
    Rules,
    buckets,
    distributed_optimizer,
    flat_shard,
    flat_shards,
    run_boxes,
)
from refitd.layout.fronts.flat_side import flat_side
from refitd.layout.fronts.megatron import Parallel, megatron
from refitd.layout.fronts.places import Hosts, places, trainer_keys
from refitd.layout.models import catalogue
from refitd.layout.side_check import check
from refitd.layout.tp import dense

F = "int32"


def test_b3_ranks_with_different_globals_are_refused_by_name() -> None:
    """B3: local size times world gives 6 on rank 0 and 4 on rank 1; the side names the parameter and both."""
    wrong = {
        f"trainer/a/{rank}": Layout.from_pieces({"w": ((rows,), F)}, {"w": (n, F)}, [dense("w", Box((0,), (n,)), "w")])
        for rank, (rows, n) in enumerate([(6, 3), (4, 2)])
    }
    with pytest.raises(LayoutError) as caught:
        side_from_layouts(wrong, {key: (key, key) for key in wrong})
    assert str(caught.value) == (
        "tensor w: expected shape (6,) dtype int32 as trainer/a/0 reports, got shape (4,) dtype int32 from trainer/a/1"
    )


def test_c1_buffer_space_counts_the_padding() -> None:
    """C1: C starts at 16 in buffer space, not at 12; a read past the end of a bucket is an error."""
    first, second = buckets({"A": 5, "B": 7, "C": 6}, 2, Rules(reverse=False, align=1, pad=16, bucket=12))
    assert (first, second.lo, second.starts) == ((0, 16, {"A": 0, "B": 5}), 16, {"C": 16})
    assert second.starts["C"] + 6 == 22
    bad = Layout.from_pieces({"C": ((6,), F)}, {"flat": (16, F)}, [Piece("C", Box((0,), (6,)), "flat", 12, (1,))])
    with pytest.raises(LayoutError) as caught:
        bad.check("trainer/a/1")
    assert str(caught.value) == (
        "piece of C in flat: view of trainer/a/1: expected inside 16 elements, "
        "got offset 12, extents (6,), strides (1,)"
    )


def test_c3_order_and_alignment_of_the_distributed_optimizer() -> None:
    """C3: reverse registration order, starts at multiples of 64, end at 256; four ranks own what the case says."""
    sizes = {"P0": 10, "P1": 70, "P2": 3}
    (bucket,) = buckets(sizes, 4, distributed_optimizer(4))
    assert bucket == (0, 256, {"P2": 0, "P1": 64, "P0": 192})
    whole = Layout.from_pieces(
        {name: ((n,), F) for name, n in sizes.items()},
        {name: (n, F) for name, n in sizes.items()},
        [dense(name, Box((0,), (n,)), name) for name, n in sizes.items()],
    )
    owned = []
    for rank in range(4):
        layout = flat_shard(whole, list(sizes), rank, 4, distributed_optimizer(4))
        layout.check()
        assert layout.storages == {"flat.0": (64, F)}
        owned.append([(p.tensor, p.box.lo[0], p.box.hi[0], p.offset) for p in layout.pieces()])
    assert owned == [[("P2", 0, 3, 0)], [("P1", 0, 64, 0)], [("P1", 64, 70, 0)], [("P0", 0, 10, 0)]]


def test_the_high_bandwidth_option_pads_to_65536() -> None:
    """The bucket of one parameter of 10 ends at 65536, and at lcm(6, 128) without the option."""
    assert buckets({"P": 10}, 6, distributed_optimizer(6, high_bandwidth=True))[0].hi == 3 * 65536
    assert buckets({"P": 10}, 6, distributed_optimizer(6))[0].hi == 384


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(shapes, st.data())
def test_a_flat_run_is_these_elements_in_this_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The boxes of elements [a, b) hold exactly them, in order, and there are at most 2 D - 1."""
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    flat = np.arange(size).reshape(shape)
    found = []
    for box, at in run_boxes(shape, begin, end):
        part = flat[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))].ravel().tolist()
        assert part[0] == at
        found += part
    assert found == list(range(begin, end))
    assert len(run_boxes(shape, begin, end)) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 5), st.booleans(), st.sampled_from([0, 9]))
def test_shards_of_fused_storages_put_together_are_the_buffer(
    parts: list[tuple[int, ...]], ranks: int, reverse: bool, bucket: int
) -> None:
    """Concatenated shares equal the buffer that lays every fused storage end to end with its padding."""
    names = [f"w{i}" for i in range(len(parts))]
    facts = {name: (shape, F) for name, shape in zip(names, parts, strict=True)}
    pieces, storages = [], {}
    for pair in zip(names[::2], names[1::2], strict=False):
        size = 0
        for name in pair:
            pieces.append(dense(name, Box((0,) * len(facts[name][0]), facts[name][0]), "+".join(pair), size))
            size += math.prod(facts[name][0])
        storages["+".join(pair)] = (size, F)
    if not storages:
        return
    model = Layout.from_pieces({n: facts[n] for p in storages for n in p.split("+")}, storages, pieces)
    values = values_of([model])
    whole = filled(model, values)
    rules = Rules(reverse, 4, 8, bucket)
    order = list(storages)
    shares = [filled(flat_shard(model, order, rank, ranks, rules), values, padding=-1) for rank in range(ranks)]
    for number, b in enumerate(buckets({name: storages[name][0] for name in order}, ranks, rules)):
        buffer = np.full(b.hi - b.lo, -1, dtype=np.int32)
        for name, start in b.starts.items():
            buffer[start - b.lo : start - b.lo + storages[name][0]] = whole[name]
        assert np.concatenate([share[f"flat.{number}"] for share in shares]).tolist() == buffer.tolist()


def test_fsdp1_cuts_tensors_anywhere() -> None:
    """A 3 x 4 and a vector of 5 over three ranks: 6 elements each, one of padding; the middle rank has four boxes."""
    model = Layout.from_pieces(
        {"w": ((3, 4), F), "b": ((5,), F)}, {"w": (12, F), "b": (5, F)},
        [dense("w", Box((0, 0), (3, 4)), "w"), dense("b", Box((0,), (5,)), "b")],
    )  # fmt: skip
    middle = flat_shard(model, ["w", "b"], 1, 3, FSDP1_WITHOUT_ORIG_PARAMS)
    assert [(p.tensor, p.box.lo, p.box.hi, p.offset) for p in middle.pieces()] == [
        ("w", (1, 2), (2, 4), 0),
        ("w", (2, 0), (3, 4), 2),
    ]
    last = flat_shard(model, ["w", "b"], 2, 3, FSDP1_WITHOUT_ORIG_PARAMS)
    assert ([(p.tensor, p.box.hi) for p in last.pieces()], last.storages) == ([("b", (5,))], {"flat.0": (6, F)})


def test_units_have_buffers_of_their_own_and_the_rest_stays() -> None:
    """FSDP1 with two units over two ranks, an fp32 buffer outside: each unit is padded by itself."""
    model = Layout.from_pieces(
        {"a": ((3,), F), "b": ((4,), F), "bias": ((2,), "float32")},
        {"a": (3, F), "b": (4, F), "bias": (2, "float32")},
        [dense("a", Box((0,), (3,)), "a"), dense("b", Box((0,), (4,)), "b"), dense("bias", Box((0,), (2,)), "bias")],
    )
    found = flat_shards(
        model,
        {"one": Buffer(["a"], 1, 2, FSDP1_WITHOUT_ORIG_PARAMS), "two": Buffer(["b"], 1, 2, FSDP1_WITHOUT_ORIG_PARAMS)},
    )
    assert found.storages == {"bias": (2, "float32"), "one.0": (2, F), "two.0": (2, F)}
    assert [(p.tensor, p.box.lo, p.box.hi, p.storage) for p in found.pieces()] == [
        ("a", (2,), (3,), "one.0"),
        ("b", (2,), (4,), "two.0"),
        ("bias", (0,), (2,), "bias"),
    ]
    with pytest.raises(LayoutError, match="order of two: expected each storage in one buffer, once, got a"):
        flat_shards(
            model,
            {
                "one": Buffer(["a"], 0, 2, FSDP1_WITHOUT_ORIG_PARAMS),
                "two": Buffer(["a"], 0, 2, FSDP1_WITHOUT_ORIG_PARAMS),
            },
        )


def test_the_optimizer_of_a_tensor_parallel_trainer_shards_fused_parameters() -> None:
    """Megatron TP2 x DP2 on the tiny model: the shards of all ranks hold every element of every tensor exactly once."""
    whole = megatron(catalogue("tiny"), Parallel(tp=2, dp=2, etp=1), Hosts(4, 4))
    sharded = {}
    for rank, key in enumerate(whole.ranks):
        layout = whole.layout(key)
        dtypes = sorted({dtype for _, dtype in layout.storages.values()})
        buffers = {
            dtype: Buffer(
                [n for n, s in layout.storages.items() if s[1] == dtype], rank // 2, 2, distributed_optimizer(2)
            )
            for dtype in dtypes
        }
        sharded[key] = flat_shards(layout, buffers)
        sharded[key].check(key)
    side = side_from_layouts(sharded, {key: (key, key) for key in sharded})
    check(side, catalogue("tiny").names)
    assert {key: side.layout(key) for key in side.ranks} == sharded
    copies = {key: sum(p.box.volume for p in layout.pieces()) for key, layout in sharded.items()}
    assert copies["trainer/run/0"] + copies["trainer/run/2"] == sum(
        p.box.volume for p in whole.layout("trainer/run/0").pieces()
    )


def test_what_cannot_be_flat_is_refused() -> None:
    """Unknown storages, mixed dtypes and strided pieces are LayoutErrors that name them."""
    model = Layout.from_pieces(
        {"w": ((2, 2), F), "h": ((1,), "int16")}, {"w": (4, F), "h": (1, "int16")},
        [Piece("w", Box((0, 0), (2, 2)), "w", 0, (1, 2)), dense("h", Box((0,), (1,)), "h")],
    )  # fmt: skip
    with pytest.raises(
        LayoutError, match="order of flat: expected storages of the layout, got v; order of flat: expected"
    ):
        flat_shard(model, ["w", "h", "v"], 0, 2, FSDP1_WITHOUT_ORIG_PARAMS)
    with pytest.raises(LayoutError, match=r"piece of w in w: expected dense strides \(2, 1\), got \(1, 2\)"):
        flat_shard(model, ["w"], 0, 2, FSDP1_WITHOUT_ORIG_PARAMS)


@pytest.mark.parametrize("rules", [FSDP1_WITHOUT_ORIG_PARAMS, distributed_optimizer(4)])
def test_a_flat_side_equals_the_shards_of_its_layout(rules: Rules) -> None:
    """The vectorised side of a whole model gives the layouts that `flat_shard` cuts from a rank with everything."""
    model = catalogue("tiny")
    side = flat_side(model, places(trainer_keys(4), "trainer", Hosts(2, 2)), rules)
    check(side, model.names)
    facts = {n: (k.row.shape, k.row.dtype) for k in model.kinds for n in model.names.take(k.ids.ravel())}
    for dtype in ("bfloat16", "float32"):
        own = {name: fact for name, fact in facts.items() if fact[1] == dtype}
        storages = {name: (math.prod(shape), dtype) for name, (shape, _) in own.items()}
        pieces = [dense(name, Box((0,) * len(shape), shape), name) for name, (shape, _) in own.items()]
        whole = Layout.from_pieces(own, storages, pieces)
        for rank in range(4):
            expected = flat_shard(whole, list(own), rank, 4, rules)
            found = side.layout(f"trainer/run/{rank}")
            held = {(p.tensor, p.box, p.offset) for p in found.pieces() if p.storage == f"flat.{dtype}"}
            assert held == {(p.tensor, p.box, p.offset) for p in expected.pieces()}
            assert found.storages[f"flat.{dtype}"] == expected.storages["flat.0"]
