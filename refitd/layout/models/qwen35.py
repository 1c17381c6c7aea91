"""Qwen3.8 (qwen3_5_moe): gated delta networks, gated attention in every fourth layer, routed experts everywhere."""

from __future__ import annotations

from typing import NamedTuple

from refitd.layout.models.catalogue import Block, Catalogue, Heads, Row, build
from refitd.layout.models.rows import ends, glu, gqa, layer_norms, norm, renamed


class Sizes(NamedTuple):
    """Sizes of a Qwen3.5-MoE model: ``period``: every so many layers attention is full."""

    layers: int = 92
    period: int = 4
    hidden: int = 8192
    q: int = 64
    kv: int = 4
    dim: int = 256
    qk_heads: int = 16
    v_heads: int = 128
    head: int = 128
    experts: int = 512
    inner: int = 2048
    vocab: int = 248320


def catalogue(name: str, s: Sizes, mtp: bool = False) -> Catalogue:
    """A model of these sizes; with ``mtp``, its prediction layer, which has no embedding of its own."""
    # A head of q_proj is the query and the output gate: Heads says so too, as frameworks order the two differently.
    full = renamed(gqa(s.hidden, s.q, s.kv, s.dim, True, q_rows=2 * s.dim), "self_attn.")
    layers = range(s.layers)
    prefix = "model.layers.{}."
    blocks = [
        Block("", (), ends(s.vocab, s.hidden)),
        Block(prefix, layers, [*layer_norms(s.hidden), *_moe(s)]),
        Block(prefix, [i for i in layers if i % s.period == s.period - 1], full),
        Block(prefix + "linear_attn.", [i for i in layers if i % s.period != s.period - 1], _delta(s)),
    ]
    if mtp:
        blocks.append(Block("mtp.", (), _mtp_ends(s), mtp=True))
        blocks.append(Block("mtp.layers.{}.", (0,), [*layer_norms(s.hidden), *full, *_moe(s)], mtp=True))
    return build(name, s.layers, s.vocab, blocks, Heads(s.q, s.kv, 2 * s.dim, s.dim, gate=True), s.experts)


def _delta(s: Sizes) -> list[Row]:
    qk, v = s.qk_heads * s.head, s.v_heads * s.head
    segments = (qk, qk, v)
    return [
        Row("d_qkv", "in_proj_qkv.weight", (sum(segments), s.hidden), "segments", segments=segments),
        Row("d_z", "in_proj_z.weight", (v, s.hidden), "rows"),
        Row("d_b", "in_proj_b.weight", (s.v_heads, s.hidden), "rows"),
        Row("d_a", "in_proj_a.weight", (s.v_heads, s.hidden), "rows"),
        Row("d_conv", "conv1d.weight", (sum(segments), 1, 4), "segments", segments=segments),
        Row("d_A_log", "A_log", (s.v_heads,), "rows", "float32"),
        Row("d_dt_bias", "dt_bias", (s.v_heads,), "rows", "float32"),
        norm("d_norm", "norm", s.head),
        Row("d_out", "out_proj.weight", (s.hidden, v), "columns"),
    ]


def _moe(s: Sizes) -> list[Row]:
    return [
        Row("router", "mlp.gate.weight", (s.experts, s.hidden)),
        *glu("expert_", s.hidden, s.inner, "mlp.experts.{}.", s.experts),
        *glu("shared_", s.hidden, s.inner, "mlp.shared_expert."),
        Row("shared_router", "mlp.shared_expert_gate.weight", (1, s.hidden)),
    ]


def _mtp_ends(s: Sizes) -> list[Row]:
    return [
        Row("eh_proj", "fc.weight", (s.hidden, 2 * s.hidden), "rows"),
        norm("enorm", "pre_fc_norm_embedding", s.hidden),
        norm("hnorm", "pre_fc_norm_hidden", s.hidden),
        norm("final_norm", "norm", s.hidden),
    ]
