"""Megatron's linear_qkv, with and without an output gate, against a slab that NumPy fuses as Megatron splits it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from refitd.errors import LayoutError
from refitd.layout import Layout
from refitd.layout.fronts.cuts import Runs, interleaved
from refitd.layout.fronts.engine import engine, vllm
from refitd.layout.fronts.megatron import Parallel, megatron
from refitd.layout.fronts.places import Hosts
from refitd.layout.models import Block, Catalogue, Heads, Row, build, catalogue, qwen3, qwen35

HOSTS = Hosts(16, 16)
HIDDEN, Q, KV, DIM = 16, 8, 4, 4
DIVIDE = "x heads: expected at least one, kv heads that divide query heads"


@cache
def gated() -> Catalogue:
    """A small Qwen3.8: layer 3 and the MTP layer have gated attention, two query heads a group."""
    sizes = qwen35.Sizes(
        layers=4, hidden=HIDDEN, q=Q, kv=KV, dim=DIM, qk_heads=16, v_heads=16, head=1, experts=2, inner=16, vocab=64
    )
    return qwen35.catalogue("small", sizes, mtp=True)


@cache
def plain() -> Catalogue:
    """The same attention without a gate."""
    return qwen3.dense("small", 4, HIDDEN, Q, KV, DIM, 16, 64)


def values(rows: int, first: int) -> np.ndarray:
    """A [rows, HIDDEN] tensor in which every element is another number."""
    return np.arange(first, first + rows * HIDDEN).reshape(rows, HIDDEN)


def projections(gate: bool) -> dict[str, np.ndarray]:
    """q, k and v as Hugging Face has them: with a gate, each head of q is DIM rows of query, then DIM of gate."""
    q_rows = Q * DIM * (2 if gate else 1)
    return {"q": values(q_rows, 0), "k": values(KV * DIM, 10_000), "v": values(KV * DIM, 20_000)}


def slab(hf: dict[str, np.ndarray], gate: bool) -> np.ndarray:
    """All of linear_qkv: for each group the parts that get_query_key_value_tensors splits it into, in its order."""
    each = Q // KV
    q = hf["q"].reshape(Q, -1, HIDDEN)
    k, v = (hf[part].reshape(KV, DIM, HIDDEN) for part in "kv")
    rows = []
    for group in range(KV):
        heads = q[group * each : (group + 1) * each]
        query, out_gate = heads[:, :DIM], heads[:, DIM:]
        rows += [query.reshape(-1, HIDDEN), *([out_gate.reshape(-1, HIDDEN)] if gate else []), k[group], v[group]]
    return np.concatenate(rows)


def stored(layout: Layout, storage: str, hf: dict[str, np.ndarray]) -> np.ndarray:
    """What the pieces of a rank say that a storage holds; every element is named once."""
    found = np.full(layout.storages[storage][0], -1)
    for piece in layout.pieces():
        if piece.storage == storage:
            part = hf[piece.tensor.split("_proj")[0][-1]]
            part = part[tuple(slice(a, b) for a, b in zip(piece.box.lo, piece.box.hi, strict=True))]
            steps = np.add.outer(*(np.arange(n) * s for n, s in zip(part.shape, piece.strides, strict=True)))
            assert (found[steps + piece.offset] == -1).all()
            found[steps + piece.offset] = part
    return found


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("model", "gate", "storage"),
    [
        (gated, True, "decoder.layers.3.self_attention.linear_qkv.weight"),
        (gated, True, "mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.weight"),
        (plain, False, "decoder.layers.3.self_attention.linear_qkv.weight"),
    ],
)
def test_linear_qkv_is_the_slab_that_megatron_splits(model: object, gate: bool, storage: str, tp: int) -> None:
    """Every element on every rank, also through groups (TP 8) and through heads (TP 16 has 6 rows of 96)."""
    hf = projections(gate)
    shares = slab(hf, gate).reshape(tp, -1)
    side = megatron(model(), Parallel(tp=tp, etp=1), HOSTS)
    for rank in range(tp):
        layout = side.layout(f"trainer/run/{rank}")
        layout.check()
        assert stored(layout, storage, hf).tolist() == shares[rank].tolist()


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_engines_keep_the_order_of_the_checkpoint(tp: int) -> None:
    """vLLM's qkv_proj has [query; gate] head by head, as q_proj does, then k, then v (kv heads replicated at TP 8)."""
    hf = projections(True)
    side = engine(gated(), vllm(tp), 1, HOSTS)
    for rank in range(tp):
        kv = rank * KV // tp * DIM, max(KV // tp, 1) * DIM
        share = [hf["q"].reshape(tp, -1, HIDDEN)[rank], *(hf[part][kv[0] : sum(kv)] for part in "kv")]
        found = stored(side.layout(f"engine/r0/{rank}"), "model.layers.3.self_attn.qkv_proj.weight", hf)
        assert found.tolist() == np.concatenate(share).ravel().tolist()


def triples(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.lo.tolist(), runs.hi.tolist(), runs.at.tolist(), strict=True))


def test_a_group_has_all_queries_before_all_gates() -> None:
    """Two heads a group: rows 8 to 15 of the slab are the second head's query, not the first one's gate."""
    runs = interleaved("x", Heads(4, 2, 16, 8, gate=True), 1)
    assert triples(runs["q"]) == [
        (0, 8, 0), (8, 16, 16), (16, 24, 8), (24, 32, 24),
        (32, 40, 48), (40, 48, 64), (48, 56, 56), (56, 64, 72),
    ]  # fmt: skip
    assert triples(runs["k"]) == [(0, 8, 32), (8, 16, 80)]
    assert triples(runs["v"]) == [(0, 8, 40), (8, 16, 88)]


def test_without_a_gate_a_group_s_queries_stay_one_run() -> None:
    """Gates cost runs; models that have none keep two of them here."""
    runs = interleaved("x", Heads(4, 2, 8, 8), 1)
    assert triples(runs["q"]) == [(0, 16, 0), (16, 32, 32)]
    assert triples(runs["k"]) == [(0, 8, 16), (8, 16, 48)]


def test_only_qwen38_of_the_catalogues_has_a_gate() -> None:
    """Its q_proj has 2 x 256 rows a head."""
    assert catalogue("qwen3.8-2.4t").heads == Heads(64, 4, 512, 256, gate=True)
    for name in ("qwen3-32b", "qwen3-235b", "nemotron-ultra"):
        heads = catalogue(name).heads
        assert heads is not None
        assert not heads.gate


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (Heads(4, 2, 16, 8), "x heads: expected 8 rows of q a head, as k has 8 and gate is False, got 16"),
        (Heads(4, 2, 8, 8, gate=True), "x heads: expected 16 rows of q a head, as k has 8 and gate is True, got 8"),
        (Heads(4, 3, 8, 8), f"{DIVIDE}, got 4 query and 3 kv heads"),
        (Heads(0, 2, 8, 8), f"{DIVIDE}, got 0 query and 2 kv heads"),
    ],
)
def test_heads_that_megatron_cannot_have_are_refused(heads: Heads, message: str) -> None:
    """A gate that is not declared, or declared and not there, would lie in the wrong rows."""
    with pytest.raises(LayoutError) as caught:
        interleaved("x", heads, 1)
    assert str(caught.value) == message


def test_a_storage_has_its_share_of_the_slab_where_q_k_and_v_are_uneven() -> None:
    """24 rows over 4 ranks: 6 each, though 6 rows of k do not divide."""
    rows = [
        Row("q", "q_proj.weight", (12, HIDDEN), "rows"),
        Row("k", "k_proj.weight", (6, HIDDEN), "kv"),
        Row("v", "v_proj.weight", (6, HIDDEN), "kv"),
    ]
    model = build("odd", 1, 8, [Block("model.layers.{}.", (0,), rows)], Heads(4, 2, 3, 3))
    side = megatron(model, Parallel(tp=4), HOSTS)
    for rank in range(4):
        layout = side.layout(f"trainer/run/{rank}")
        layout.check()
        assert layout.storages == {"decoder.layers.0.self_attention.linear_qkv.weight": (6 * HIDDEN, "bfloat16")}
