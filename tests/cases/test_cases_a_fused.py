"""Group A of the field cases: fused parameters."""

from __future__ import annotations

import numpy as np
import pytest
from case_values import filled, layouts_of, small, values_of

from refitd import reshard
from refitd.layout import Box, Layout, Piece
from refitd.layout.fronts.engine import Engine, engine, vllm
from refitd.layout.fronts.hf import FUSED, unfuse
from refitd.layout.fronts.megatron import Options, Parallel, megatron
from refitd.layout.fronts.places import Hosts
from refitd.layout.models import Heads, Row
from refitd.layout.models.nemotron import Mamba, mamba_rows
from refitd.layout.tp import dense

HOSTS = Hosts(8, 8)
PREFIX = "model.layers.0."


def test_a1_each_rank_has_gate_and_up_rows_of_a_fused_expert() -> None:
    """A1: [gate;up] of 12 rows as one tensor goes to two ranks as [0,1,2,100,101,102] and [3,4,5,103,104,105]."""
    name = "model.layers.0.mlp.experts"
    whole = Layout.from_pieces(
        {f"{name}.gate_up_proj": ((1, 12, 1), "int32")},
        {f"{name}.gate_up_proj": (12, "int32")},
        [dense(f"{name}.gate_up_proj", Box((0, 0, 0), (1, 12, 1)), f"{name}.gate_up_proj")],
    )
    model = small(
        Row("expert_gate", "mlp.experts.{}.gate_proj.weight", (6, 1), "rows", "int32", experts=1),
        Row("expert_up", "mlp.experts.{}.up_proj.weight", (6, 1), "rows", "int32", experts=1),
        experts=1,
    )
    engines = layouts_of(engine(model, vllm(2), 1, HOSTS))
    data = np.array([0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105], dtype=np.int32)
    source = unfuse(whole, FUSED)
    source.check()
    got = reshard([source], list(engines.values()), [{f"{name}.gate_up_proj": data}])
    assert [shard[f"{name}.routed_experts.w13_weight"].tolist() for shard in got] == [
        [0, 1, 2, 100, 101, 102],
        [3, 4, 5, 103, 104, 105],
    ]


QKV = small(
    Row("q", "self_attn.q_proj.weight", (8192, 1), "rows", "int32"),
    Row("k", "self_attn.k_proj.weight", (512, 1), "kv", "int32"),
    Row("v", "self_attn.v_proj.weight", (512, 1), "kv", "int32"),
    heads=Heads(64, 4, 128, 128),
)
Q, K, V = (f"{PREFIX}self_attn.{c}_proj.weight" for c in "qkv")


def rows(layout: Layout) -> list[tuple[int, str, int, int]]:
    """(row of the storage, tensor, first row, end row) in storage order."""
    return sorted((p.offset, p.tensor, p.box.lo[0], p.box.hi[0]) for p in layout.pieces())


def test_a3_megatron_cuts_the_interleaved_slab_evenly() -> None:
    """A3: with 8 ranks for 4 kv groups, even ranks hold 9 query heads, odd ones 7 and the group's k and v."""
    side = layouts_of(megatron(QKV, Parallel(tp=8), HOSTS))
    for group in range(4):
        even, odd = side[f"trainer/run/{2 * group}"], side[f"trainer/run/{2 * group + 1}"]
        assert even.storages == odd.storages == {"decoder.layers.0.self_attention.linear_qkv.weight": (1152, "int32")}
        first = 16 * group * 128
        assert rows(even) == [(0, Q, first, first + 9 * 128)]
        assert rows(odd) == [
            (0, Q, first + 9 * 128, first + 16 * 128),
            (896, K, 128 * group, 128 * group + 128),
            (1024, V, 128 * group, 128 * group + 128),
        ]


def test_a3_engines_replicate_kv_heads_and_get_them_from_the_odd_rank() -> None:
    """A3: engine rank r holds [8 query heads; k of r//2; v of r//2]; rank 0 and 1 get what the case says."""
    sources = layouts_of(megatron(QKV, Parallel(tp=8), HOSTS))
    engines = layouts_of(engine(QKV, vllm(8), 1, HOSTS))
    for rank, layout in enumerate(engines.values()):
        kv = rank // 2 * 128
        assert rows(layout) == [
            (0, Q, 1024 * rank, 1024 * rank + 1024), (1024, K, kv, kv + 128), (1152, V, kv, kv + 128),
        ]  # fmt: skip
    values = values_of(sources.values())
    shards = [filled(layout, values) for layout in sources.values()]
    got = reshard(list(sources.values()), list(engines.values()), shards)
    m0, m1 = (shard["decoder.layers.0.self_attention.linear_qkv.weight"] for shard in shards[:2])
    v0, v1 = (shard[f"{PREFIX}self_attn.qkv_proj.weight"].numpy() for shard in got[:2])
    assert np.array_equal(v0, np.concatenate([m0[:1024], m1[896:1024], m1[1024:1152]]))
    assert np.array_equal(v1, np.concatenate([m0[1024:1152], m1[:896], m1[896:1024], m1[1024:1152]]))


@pytest.mark.parametrize("tp", [1, 2, 4, 16, 32])
def test_every_slab_row_is_the_row_that_interleaving_says(tp: int) -> None:
    """For any TP the slab equals the one made by concatenating groups of [query heads, k, v] and cutting it evenly."""
    q, k, v = (np.arange(n).reshape(4, -1) + base for n, base in ((8192, 0), (512, 10000), (512, 20000)))
    slab = np.concatenate([q, k, v], axis=1).reshape(tp, -1)
    side = layouts_of(megatron(QKV, Parallel(tp=tp), HOSTS))
    values = {Q: q.reshape(-1, 1), K: k.reshape(-1, 1), V: v.reshape(-1, 1)}
    for rank, layout in enumerate(side.values()):
        assert (
            filled(layout, values)["decoder.layers.0.self_attention.linear_qkv.weight"].tolist() == slab[rank].tolist()
        )


def held(layout: Layout, tensor: str) -> list[int]:
    """Rows of a tensor in storage order."""
    pieces: list[Piece] = sorted((p for p in layout.pieces() if p.tensor == tensor), key=lambda p: p.offset)
    return [row for p in pieces for row in range(p.box.lo[0], p.box.hi[0])]


def test_a5_every_segment_of_a_mamba_projection_is_cut_by_itself() -> None:
    """A5: 4 heads of 2, 2 groups of 2: in_proj, conv1d and the vectors on two ranks of both frameworks."""
    model = small(*mamba_rows(1, Mamba(heads=4, dim=2, groups=2, state=2)))
    for side in (megatron(model, Parallel(tp=2), HOSTS), engine(model, vllm(2), 1, HOSTS)):
        zero, one = layouts_of(side).values()
        name = f"{PREFIX}in_proj.weight"
        assert held(zero, name) == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 20, 21, 24, 25]
        assert held(one, name) == [4, 5, 6, 7, 12, 13, 14, 15, 18, 19, 22, 23, 26, 27]
        for conv in ("conv1d.weight", "conv1d.bias"):
            assert held(zero, PREFIX + conv) == [0, 1, 2, 3, 8, 9, 12, 13]
        for vector in ("A_log", "D", "dt_bias"):
            assert (held(zero, PREFIX + vector), held(one, PREFIX + vector)) == ([0, 1], [2, 3])
        assert held(one, f"{PREFIX}norm.weight") == [4, 5, 6, 7]


def test_a5_the_real_sizes() -> None:
    """A5: of Nemotron 3 Ultra's 35072 rows, rank 3 of 8 holds 4384, in the five ranges of the case."""
    model = small(*mamba_rows(1, Mamba(256, 64, 8, 128)))
    layout = engine(model, vllm(8), 1, HOSTS).layout("engine/r0/3")
    found = [(p.box.lo[0], p.box.hi[0]) for p in layout.pieces() if p.tensor == f"{PREFIX}in_proj.weight"]
    assert found == [(6144, 8192), (22528, 24576), (33152, 33280), (34176, 34304), (34912, 34944)]
    assert layout.storages[f"{PREFIX}in_proj.weight"] == (4384, "bfloat16")


def test_glu_blocks_interleave_gate_and_up() -> None:
    """Megatron's interleave of 2 stores, on each ETP rank, two rows of gate, two of up, and so on."""
    model = small(
        Row("expert_gate", "mlp.experts.{}.gate_proj.weight", (8, 1), "rows", "int32", experts=2),
        Row("expert_up", "mlp.experts.{}.up_proj.weight", (8, 1), "rows", "int32", experts=2),
        experts=2,
    )
    side = layouts_of(megatron(model, Parallel(tp=2, etp=2, dp=2, ep=2), HOSTS, Options(glu_interleave=2)))
    gate, up = (f"{PREFIX}mlp.experts.1.{part}_proj.weight" for part in ("gate", "up"))
    values = values_of(side.values())
    values[gate][:, 0], values[up][:, 0] = range(8), range(100, 108)
    found = filled(side["trainer/run/3"], values)
    assert found["decoder.layers.0.mlp.experts.linear_fc1.weight0"].tolist() == [4, 5, 104, 105, 6, 7, 106, 107]


def test_transposed_and_swapped_expert_storage() -> None:
    """[E, K, N] storage and up-before-gate hold the values that NumPy's own transpose and concatenation give."""
    model = small(
        Row("expert_gate", "mlp.experts.{}.gate_proj.weight", (4, 3), "rows", "int32", experts=2),
        Row("expert_up", "mlp.experts.{}.up_proj.weight", (4, 3), "rows", "int32", experts=2),
        Row("expert_down", "mlp.experts.{}.down_proj.weight", (3, 4), "columns", "int32", experts=2),
        experts=2,
    )
    shape = Engine(2, 1, 1, 1, 1, 2, flavour="sglang", transposed=True, up_first=True)
    layout = layouts_of(engine(model, shape, 1, HOSTS))["engine/r0/1"]
    values = values_of([layout])
    parts = [[values[f"{PREFIX}mlp.experts.{e}.{p}_proj.weight"] for p in ("up", "gate", "down")] for e in range(2)]
    w13 = np.stack([np.concatenate([up[2:], gate[2:]]).T for up, gate, _ in parts])
    w2 = np.stack([down[:, 2:].T for _, _, down in parts])
    found = filled(layout, values)
    assert found[f"{PREFIX}mlp.experts.w13_weight"].tolist() == w13.ravel().tolist()
    assert found[f"{PREFIX}mlp.experts.w2_weight"].tolist() == w2.ravel().tolist()


def test_padded_expert_shares() -> None:
    """Shares of 3 rows padded to 4: up begins at row 4 of w13, rows of w2 are 4 apart, padding is named by no piece."""
    model = small(
        Row("expert_gate", "mlp.experts.{}.gate_proj.weight", (6, 2), "rows", "int32", experts=1),
        Row("expert_up", "mlp.experts.{}.up_proj.weight", (6, 2), "rows", "int32", experts=1),
        Row("expert_down", "mlp.experts.{}.down_proj.weight", (2, 6), "columns", "int32", experts=1),
        experts=1,
    )
    layout = layouts_of(engine(model, Engine(2, 1, 1, 1, 1, 2, expert_multiple=4), 1, HOSTS))["engine/r0/1"]
    values = values_of([layout])
    gate, up, down = (values[f"{PREFIX}mlp.experts.0.{part}_proj.weight"] for part in ("gate", "up", "down"))
    pad = np.full((1, 2), 0x7F)
    found = filled(layout, values)
    w13 = np.concatenate([gate[3:], pad, up[3:], pad])
    w2 = np.concatenate([down[:, 3:], pad.T], axis=1)
    assert found[f"{PREFIX}mlp.experts.routed_experts.w13_weight"].tolist() == w13.ravel().tolist()
    assert found[f"{PREFIX}mlp.experts.routed_experts.w2_weight"].tolist() == w2.ravel().tolist()
