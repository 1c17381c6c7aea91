"""Groups I and J of the field cases: LoRA adapters, and strided memory."""

from __future__ import annotations

import pytest
import torch
from case_values import filled, layouts_of, small, values_of

from refitd import reshard
from refitd.errors import InputError, MismatchError
from refitd.layout import Box, Layout, Piece
from refitd.layout.fronts.engine import engine, vllm
from refitd.layout.fronts.megatron import Parallel, megatron
from refitd.layout.fronts.places import Hosts
from refitd.layout.models import Row
from refitd.layout.models.lora import check_adapters, with_lora

HOSTS = Hosts(8, 8)
BASE = small(Row("o", "o.weight", (4, 4), "rows", "float32"), Row("down", "d.weight", (4, 4), "columns", "float32"))


def test_i1_adapters_are_delivered_and_cut_as_their_weights() -> None:
    """I1: A [2, 4] and B [4, 2] of a weight cut by rows: A whole, B by rows; by columns: A is cut."""
    model = with_lora(BASE, ["o", "down"], 2)
    sources = layouts_of(megatron(model, Parallel(), HOSTS))
    engines = layouts_of(engine(model, vllm(2), 1, HOSTS))
    check_adapters(sources, engines)
    boxes = {p.tensor.removeprefix("model.layers.0."): p.box for p in engines["engine/r0/1"].pieces()}
    assert boxes == {
        "o.weight": Box((2, 0), (4, 4)), "o.lora_A.weight": Box((0, 0), (2, 4)), "o.lora_B.weight": Box((2, 0), (4, 2)),
        "d.weight": Box((0, 2), (4, 4)), "d.lora_A.weight": Box((0, 2), (2, 4)), "d.lora_B.weight": Box((0, 0), (4, 2)),
    }  # fmt: skip
    values = values_of(sources.values())
    got = reshard(list(sources.values()), list(engines.values()), [filled(s, values) for s in sources.values()])
    for layout, shard in zip(engines.values(), got, strict=True):
        assert {n: a.tolist() for n, a in filled(layout, values).items()} == {n: t.tolist() for n, t in shard.items()}


def test_i1_an_update_that_declares_lora_and_moves_no_adapter_is_refused() -> None:
    """I1: no adapter at the source, at the destination, or only kept ones: refused with both counts."""
    adapted, plain = (layouts_of(megatron(model, Parallel(), HOSTS)) for model in (with_lora(BASE, ["o"], 2), BASE))
    engines, bare = (layouts_of(engine(model, vllm(1), 1, HOSTS)) for model in (with_lora(BASE, ["o"], 2), BASE))
    whole = engines["engine/r0/0"]
    kept = Layout.from_pieces(whole.tensors, whole.storages, whole.pieces(), keep=["*lora*"])
    for sources, destinations, counts in (
        (plain, engines, "0 at the sources, 2 at the destinations"),
        (adapted, bare, "2 at the sources, 0 at the destinations"),
        (adapted, {"engine/r0/0": kept}, "2 at the sources, 0 at the destinations"),
    ):
        with pytest.raises(MismatchError) as caught:
            check_adapters(sources, destinations)
        assert str(caught.value) == f"LoRA update: expected at least one adapter tensor that moves, got none ({counts})"


def test_i1_an_adapter_that_nobody_takes_is_named() -> None:
    """Of two adapted weights the engine knows one: the other adapter's tensors are named."""
    sources = layouts_of(megatron(with_lora(BASE, ["o", "down"], 2), Parallel(), HOSTS))
    engines = layouts_of(engine(with_lora(BASE, ["o"], 2), vllm(1), 1, HOSTS))
    with pytest.raises(
        MismatchError, match=r"adapter model.layers.0.d.lora_A.weight: expected a destination that takes"
    ):
        check_adapters(sources, engines)


def test_a_role_that_the_model_lacks_is_refused() -> None:
    """LoRA on a role that the catalogue does not have."""
    with pytest.raises(InputError, match="role of small: expected one of"):
        with_lora(BASE, ["nothing"], 2)


def test_j1_strided_sources_send_their_elements() -> None:
    """J1: x[::2] of [0,1,2,3] arrives as [0, 2]; the transpose of a 2 x 2 arrives as [[0, 2], [1, 3]]."""
    x = torch.arange(4.0)
    tensors = {"half": x[::2], "turned": x.view(2, 2).t()}
    target = Layout.from_tensors({"half": torch.zeros(2), "turned": torch.zeros(2, 2)})
    (got,) = reshard([Layout.from_tensors(tensors)], [target], [tensors])
    assert got["half"].tolist() == [0, 2]
    assert got["turned"].reshape(2, 2).tolist() == [[0, 2], [1, 3]]


def test_j1_a_strided_destination_is_written_between_its_strides_only() -> None:
    """J1: of a storage of 5 only elements 1 and 4 are written."""
    source = Layout.from_tensors({"w": torch.tensor([7.0, 8.0])})
    target = Layout.from_pieces(
        {"w": ((2,), "float32")}, {"s": (5, "float32")}, [Piece("w", Box((0,), (2,)), "s", 1, (3,))]
    )
    (got,) = reshard([source], [target], [{"w": torch.tensor([7.0, 8.0])}])
    assert got["s"].tolist() == [0, 7, 0, 0, 8]
