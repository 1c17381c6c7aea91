"""Group E of the field cases: expert maps, and lists of experts gathered over too few ranks."""

from __future__ import annotations

import pytest
from case_values import filled, layouts_of, small, values_of

from refitd import reshard
from refitd.errors import InputError, LayoutError, MismatchError
from refitd.layout import check_match
from refitd.layout.fronts import expert_maps
from refitd.layout.fronts.engine import Engine, engine, sglang, vllm
from refitd.layout.fronts.megatron import Options, Parallel, megatron
from refitd.layout.fronts.places import Hosts
from refitd.layout.models import Catalogue, Row
from refitd.layout.side import Side, SideBuilder
from refitd.layout.side_check import check

HOSTS = Hosts(8, 8)


def experts(count: int, layers: int = 1) -> Catalogue:
    return small(
        Row("router", "mlp.gate.weight", (count, 2), dtype="int32"),
        Row("expert_gate", "mlp.experts.{}.gate_proj.weight", (4, 2), "rows", "int32", experts=count),
        Row("expert_up", "mlp.experts.{}.up_proj.weight", (4, 2), "rows", "int32", experts=count),
        Row("expert_down", "mlp.experts.{}.down_proj.weight", (2, 4), "columns", "int32", experts=count),
        experts=count,
        layers=layers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("count", "kind", "expected"),
    [
        (8, expert_maps.linear, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, expert_maps.round_robin, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (10, expert_maps.linear, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (10, expert_maps.round_robin, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
    ],
)
def test_e1_experts_lie_where_the_map_says(count: int, kind: type, expected: list[list[int]]) -> None:
    """E1: linear and round-robin maps, with a remainder; the value of expert e (its router row) arrives in e's slot."""
    table = kind(count, 4)
    assert table == expected
    model = experts(count)
    trainer = layouts_of(megatron(model, Parallel(dp=2, ep=2, etp=1), HOSTS))
    engines = layouts_of(engine(model, vllm(4, experts=table), 1, HOSTS))
    values = values_of(trainer.values())
    for e in range(count):
        for part in ("gate", "up", "down"):
            values[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"][...] = e
    got = reshard(list(trainer.values()), list(engines.values()), [filled(s, values) for s in trainer.values()])
    for rank, shard in enumerate(got):
        for name, size in (("w13_weight", 16), ("w2_weight", 8)):
            stored = shard[f"model.layers.0.mlp.experts.routed_experts.{name}"].reshape(-1, size)
            assert stored[:, 0].tolist() == stored[:, -1].tolist() == expected[rank]


def test_redundant_experts_and_a_map_for_each_layer() -> None:
    """EPLB: 4 experts in 6 slots, another order in each layer; every copy is filled, and with expert TP 2 it is cut."""
    model = experts(4, layers=2)
    orders = [[0, 1, 2, 3, 3, 0], [3, 2, 1, 0, 1, 2]]
    maps = [expert_maps.physical(order, 3) for order in orders]
    shape = Engine(6, 6, 6, 6, 1, 2, maps)
    trainer = layouts_of(megatron(model, Parallel(), HOSTS))
    side = engine(model, shape, 2, HOSTS)
    check(side, model.names)
    engines = layouts_of(side)
    values = values_of(trainer.values())
    for layout in engines.values():
        for piece in layout.pieces():
            assert piece.box.shape in ((4, 2), (2, 2), (2, 2))
    got = reshard(list(trainer.values()), list(engines.values()), [filled(s, values) for s in trainer.values()])
    for layer, order in enumerate(orders):
        for place, shard in enumerate(got):
            ep, etp = divmod(place % 6, 2)
            stored = shard[f"model.layers.{layer}.mlp.experts.routed_experts.w13_weight"].reshape(2, 4, 2)
            for slot in range(2):
                name = f"model.layers.{layer}.mlp.experts.{order[2 * ep + slot]}"
                gate, up = (values[f"{name}.{part}_proj.weight"] for part in ("gate", "up"))
                assert stored[slot, :2].tolist() == gate[2 * etp : 2 * etp + 2].tolist()
                assert stored[slot, 2:].tolist() == up[2 * etp : 2 * etp + 2].tolist()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1], [2, 2]], "EP rank 1: expected each expert at most once on a rank, got experts [2] twice"),
        ([[0, 1], [2, 4]], "EP rank 1: expected experts 0 to 3, got experts [4]"),
        ([[0, 1], [2]], "expert map of every layer: expected a slot for every expert, got none for experts [3]"),
        ([[0, 1, 2, 3]], "expert map of every layer: expected 2 EP ranks, got 1"),
    ],
)
def test_wrong_expert_maps_are_refused_with_the_experts(table: list[list[int]], message: str) -> None:
    """Experts twice on a rank, unknown, without a slot, or a map for another number of ranks."""
    with pytest.raises(LayoutError) as caught:
        engine(experts(4), vllm(2, experts=table), 1, HOSTS)
    assert message in str(caught.value)


def test_as_many_maps_as_layers() -> None:
    """Two maps for three layers are refused; one map for all may begin with an empty rank."""
    table = expert_maps.linear(4, 2)
    with pytest.raises(LayoutError, match="expert maps: expected one for all layers, or one for each of 3, got 2"):
        engine(experts(4, layers=3), vllm(2, experts=[table, table]), 1, HOSTS)
    side = engine(experts(4), vllm(2, experts=[[], [3, 2, 1, 0]]), 1, HOSTS)
    name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert [side.layout(key).storages[name][0] for key in side.ranks] == [0, 64]


def test_an_expert_map_is_never_made_up() -> None:
    """SGLang with EP needs the engine's map; without EP there is none."""
    with pytest.raises(InputError, match="experts: expected the engine's map for EP 2"):
        sglang(4, ep=2)
    assert sglang(4, ep=2, experts=[[0], [1]]).expert_tp == 2


def only(side: Side, keep: set[int]) -> Side:
    """The side without the instances of all experts that are not in ``keep``."""
    builder = SideBuilder(list(zip(side.ranks, side.nodes, side.domains, strict=True)), side.tensors)
    names = side.tensors
    for row in side.instances.tolist():
        name = names[row[0]]
        if ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) in keep:
            group = builder.group(side.groups[row[2]])
            pattern = side.storage_patterns[int(side.storage_pattern[row[3]])]
            own = builder.group(side.groups[int(side.storage_group[row[3]])])
            storage = builder.storage([side.storages[row[3]]], own, pattern)
            builder.add([name], side.patterns[row[1]], group, storage, row[4])
    return builder.build()


def test_e3_a_catalogue_gathered_over_too_few_ranks_is_refused() -> None:
    """E3: 2 layers of 4 experts over EP2 PP2; with experts 0 and 1 only, experts 2 and 3 are named as missing."""
    model = experts(4, layers=2)
    side = megatron(model, Parallel(pp=2, dp=2, ep=2, etp=1), HOSTS)
    check(side, model.names)
    fused = {(side.storages[row[3]], side.groups[row[2]]) for row in side.instances.tolist()
             if ".experts." in side.tensors[row[0]]}  # fmt: skip
    assert len(fused) == 16
    half = only(side, {0, 1})
    with pytest.raises(LayoutError) as caught:
        check(half, model.names)
    lost = sorted({v.field.split(".experts.")[1].split(".")[0] for v in caught.value.violations})
    assert (lost, len(caught.value.violations)) == (["2", "3"], 12)
    wanting = layouts_of(engine(model, vllm(1), 1, HOSTS))
    with pytest.raises(MismatchError) as refused:
        check_match(layouts_of(half), wanting)
    assert "tensor model.layers.0.mlp.experts.2.down_proj.weight: expected a source that has it, got none" in str(
        refused.value
    )


def test_the_rank_grids_of_megatron() -> None:
    """TP2 PP2 EP4 ETP1 on 8 ranks: (tp, dp) and ep of ranks 0 to 3 as documented, and the same at the second stage."""
    sizes = Parallel(tp=2, pp=2, dp=2, ep=4, etp=1)
    assert [sizes.dense_rank(tp, dp=dp) for dp in (0, 1) for tp in (0, 1)] == [0, 1, 2, 3]
    assert [sizes.expert_rank(0, ep) for ep in range(4)] == [0, 1, 2, 3]
    assert [sizes.expert_rank(0, ep, pp=1) for ep in range(4)] == [4, 5, 6, 7]
    assert (sizes.world, sizes.edp, Parallel(tp=2, dp=2).expert_tp) == (8, 1, 2)


def test_sequential_experts_and_expert_tp() -> None:
    """SequentialMLP names the module; ETP 2 with EDP 2 cuts gate and up of the shard, on ranks 0 and 4 alike."""
    model = experts(4)
    side = layouts_of(megatron(model, Parallel(tp=2, dp=4, ep=2, etp=2), HOSTS, Options(sequential=True)))
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    layout = side["trainer/run/2"]
    assert layout.storages[name] == (8, "int32")
    assert [(p.tensor, p.box.lo, p.box.hi, p.offset) for p in layout.pieces() if p.storage == name] == [
        ("model.layers.0.mlp.experts.3.gate_proj.weight", (0, 0), (2, 2), 0),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (0, 0), (2, 2), 4),
    ]
    assert side["trainer/run/0"] == side["trainer/run/4"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Parallel(tp=2, ep=2, dp=1), "experts that divide the 2 ranks of a stage, got ETP 2 x EP 2"),
        (Parallel(dp=3, ep=3, etp=1), "EP that divides 4 experts, got EP 3"),
        (Parallel(pp=3, etp=1), "stage_layers: expected given, as 3 stages do not divide the layers, got 1"),
        (Parallel(pp=2, etp=1, stage_layers=(1, 1)), "expected 2 stages with 1 layers in all, got 2 with 2"),
        (Parallel(tp=3, etp=3), "gate_proj.weight: expected a size that 3 ranks divide, got 4"),
        (
            Parallel(tp=0, pp=-1),
            "parallel sizes: tp: expected at least 1, got 0; parallel sizes: pp: expected at least 1",
        ),
    ],
)
def test_parallel_sizes_that_do_not_fit_are_refused(sizes: Parallel, message: str) -> None:
    """Sizes that contradict each other or the model say which and by how much."""
    with pytest.raises(LayoutError) as caught:
        megatron(experts(4), sizes, HOSTS)
    assert message in str(caught.value)
