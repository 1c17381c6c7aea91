"""FSDP1's flat buffers, held to the installed torch: what its ranks have, element by element."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdp1_worker
import numpy as np
import pytest

from refitd.errors import InputError, LayoutError
from refitd.layout import Box, Layout
from refitd.layout.fronts.flat import (
    FSDP1_WITHOUT_ORIG_PARAMS,
    Buffer,
    Rules,
    buckets,
    distributed_optimizer,
    flat_shards,
    fsdp1,
)
from refitd.layout.tp import dense

WORKER = Path(fsdp1_worker.__file__)
WORLD = 2
ITEMSIZE = {"fp32": 4, "bf16 mixed": 2, "fp64": 8, "fp64 in fp32": 4}  # of what forward and backward compute in
ELEMENTS = 3 + 1020 + 35 + 2 + 27


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, dict[str, Any]]]:
    """(rank of its group, what it has) for each setting, group size and rank: two processes on gloo, no GPU."""
    folder = tmp_path_factory.mktemp("fsdp1")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    outs = [folder / f"{rank}.json" for rank in range(WORLD)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(WORLD), str(folder / "store"), str(out)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=90)[0].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * WORLD, "\n".join(said)
    found = [(rank, case) for rank, out in enumerate(outs) for case in json.loads(out.read_text())]
    return [(rank if case["world"] == WORLD else 0, case) for rank, case in found]


def whole(case: dict[str, Any]) -> Layout:
    """The module of the worker, unsharded: a storage for each parameter."""
    shapes = {name: tuple(shape) for name, shape in case["shapes"]}
    return Layout.from_pieces(
        {name: (shape, case["dtype"]) for name, shape in shapes.items()},
        {name: (math.prod(shape), case["dtype"]) for name, shape in shapes.items()},
        [dense(name, Box((0,) * len(shape), shape), name) for name, shape in shapes.items()],
    )


def shard(case: dict[str, Any], rank: int, rules: Rules, numels: list[int] | None) -> Layout:
    """What the front end says that ``rank`` has."""
    order = [name for name, _ in case["shapes"]]
    return flat_shards(whole(case), {"unit": Buffer(order, rank, case["world"], rules, numels)})


def expected(layout: Layout, case: dict[str, Any]) -> np.ndarray:
    """The shard that a layout describes of parameters numbered from 1 on; NaN where it names nothing."""
    first, values = 1, {}
    for name, shape in case["shapes"]:
        values[name] = np.arange(first, first + math.prod(shape), dtype=np.float64).reshape(shape)
        first += math.prod(shape)
    stored = np.full(layout.storages["unit.0"][0], np.nan)
    for piece in layout.pieces():
        part = values[piece.tensor][tuple(slice(a, b) for a, b in zip(piece.box.lo, piece.box.hi, strict=True))]
        for index in np.ndindex(part.shape):
            at = piece.offset + sum(i * stride for i, stride in zip(index, piece.strides, strict=True))
            assert np.isnan(stored[at])
            stored[at] = part[index]
    return stored


@pytest.mark.timeout(120)
def test_every_element_is_where_torch_has_it(held: list[tuple[int, dict[str, Any]]]) -> None:
    """Worlds of 1 and 2, both settings, fp32, bf16 mixed precision, fp64, fp64 computed in fp32: all 1087 elements."""
    assert len(held) == len(ITEMSIZE) * 2 * 2 * WORLD  # settings, group sizes, processes
    named: dict[tuple[str, bool, int], int] = {}
    for rank, case in held:
        rules = fsdp1(ITEMSIZE[case["setting"]], case["use_orig_params"])
        layout = shard(case, rank, rules, case["numels"])
        layout.check()
        want, got = expected(layout, case), np.array(case["values"])
        real = ~np.isnan(want)
        assert layout.storages == {"unit.0": (len(got), case["dtype"])}
        assert got[real].tolist() == want[real].tolist()
        # What no piece names is what torch filled in: 42 for alignment and the end, or zeros as the shard was cut.
        assert set(got[~real].tolist()) <= {42.0 if case["use_orig_params"] else 0.0}
        key = case["setting"], case["use_orig_params"], case["world"]
        named[key] = named.get(key, 0) + int(real.sum())
    # With a group of one each of the two processes has everything.
    assert named == {key[:3]: ELEMENTS * (WORLD if key[2] == 1 else 1) for key in named}
    assert len(named) == len(ITEMSIZE) * 2 * 2


@pytest.mark.timeout(120)
def test_the_wrong_setting_is_refused_where_torch_is_asked(held: list[tuple[int, dict[str, Any]]]) -> None:
    """``numels`` contradict the other setting, and another item size that aligns otherwise, at the first padding."""
    for rank, case in held:
        size, orig = ITEMSIZE[case["setting"]], case["use_orig_params"]
        with pytest.raises(LayoutError, match="numels of unit: part 1: expected "):
            shard(case, rank, fsdp1(size, not orig), case["numels"])
        if orig and size < 8:
            with pytest.raises(LayoutError, match="numels of unit: part "):
                shard(case, rank, fsdp1(size // 2, orig), case["numels"])
    rank, case = next((r, c) for r, c in held if c["setting"] == "fp32" and c["use_orig_params"] and c["world"] == 1)
    with pytest.raises(LayoutError) as caught:
        shard(case, rank, FSDP1_WITHOUT_ORIG_PARAMS, case["numels"])
    assert str(caught.value) == (
        "numels of unit: part 1: expected 1020 elements by Rules(reverse=False, align=1, pad=1, bucket=0), got 1"
    )
    with pytest.raises(LayoutError, match=r"numels of unit: part 8: expected the end, got 7$"):
        shard(case, rank, fsdp1(4, True), [*case["numels"], 7])
    with pytest.raises(LayoutError, match=r"numels of unit: part 7: expected 27 elements by Rules\(.*\), got the end$"):
        shard(case, rank, fsdp1(4, True), case["numels"][:-1])


def test_padding_comes_before_a_parameter() -> None:
    """3 and 1020 floats: 1023 in a row, or b at 4 of 1024; a share of two is 512 elements of either."""
    sizes = {"a": 3, "b": 1020}
    assert buckets(sizes, 1, fsdp1(4, False)) == [(0, 1023, {"a": 0, "b": 3})]
    assert buckets(sizes, 1, fsdp1(4, True)) == [(0, 1024, {"a": 0, "b": 4})]
    assert buckets(sizes, 2, fsdp1(4, False))[0].share(1, 2) == buckets(sizes, 2, fsdp1(4, True))[0].share(1, 2)
    assert buckets({"a": 3, "b": 1}, 4, fsdp1(4, True)) == [(0, 8, {"a": 0, "b": 4})]


@pytest.mark.parametrize(("itemsize", "align"), [(1, 16), (2, 8), (4, 4), (8, 2)])
def test_sixteen_bytes_are_so_many_elements(itemsize: int, align: int) -> None:
    """Of the compute dtype; without original parameters the size plays no part."""
    assert fsdp1(itemsize, True) == Rules(reverse=False, align=align, pad=1, bucket=0)
    assert fsdp1(itemsize, False) == FSDP1_WITHOUT_ORIG_PARAMS == Rules(reverse=False, align=1, pad=1)


@pytest.mark.parametrize(
    ("itemsize", "use_orig_params", "message"),
    [
        (3, True, "itemsize: expected 1, 2, 4 or 8 bytes, the size of a floating-point dtype, got 3"),
        (16, False, "itemsize: expected 1, 2, 4 or 8 bytes, the size of a floating-point dtype, got 16"),
        (0, True, "itemsize: expected 1, 2, 4 or 8 bytes, the size of a floating-point dtype, got 0"),
        (True, 4, "itemsize: expected an int, got True"),
        (4, 1, "use_orig_params: expected a bool, got 1"),
        (4, None, "use_orig_params: expected a bool, got None"),
    ],
)
def test_settings_that_torch_does_not_have_are_refused(itemsize: Any, use_orig_params: Any, message: str) -> None:
    """Item sizes of no dtype, and arguments that were swapped or are not known."""
    with pytest.raises(InputError) as caught:
        fsdp1(itemsize, use_orig_params)
    assert str(caught.value) == message


def test_numels_may_leave_out_only_the_last_padding() -> None:
    """Buckets of Megatron's optimizer: every padding counts but that at the very end; an empty buffer has no parts."""
    model = Layout.from_pieces(
        {n: ((size,), "int8") for n, size in (("a", 10), ("b", 70))}, {"a": (10, "int8"), "b": (70, "int8")},
        [dense("a", Box((0,), (10,)), "a"), dense("b", Box((0,), (70,)), "b")],
    )  # fmt: skip
    rules = distributed_optimizer(2, bucket=1)  # a bucket each: b, then a
    layouts = [
        flat_shards(model, {"flat": Buffer(["a", "b"], 0, 2, rules, numels)})
        for numels in (None, [70, 58, 10, 118], [70, 58, 10])
    ]
    assert layouts[0] == layouts[1] == layouts[2]
    with pytest.raises(LayoutError, match=r"numels of flat: part 1: expected 58 elements by .*, got 10$"):
        flat_shards(model, {"flat": Buffer(["a", "b"], 0, 2, rules, [70, 10, 118])})
    assert flat_shards(model, {"none": Buffer([], 0, 2, rules, [])}) == model
    with pytest.raises(LayoutError, match="numels of none: part 0: expected the end, got 5"):
        flat_shards(model, {"none": Buffer([], 0, 2, rules, [5])})
