"""DeepSeek-V3 and models of its class (Kimi K2)."""

from __future__ import annotations

from typing import NamedTuple

from refitd.layout.models.catalogue import Block, Catalogue, Row, build
from refitd.layout.models.rows import ends, glu, layer_norms, norm, renamed


class Sizes(NamedTuple):
    """Sizes of a DeepSeek-V3-like model."""

    layers: int = 61
    dense: int = 3
    hidden: int = 7168
    heads: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v_dim: int = 128
    dense_inner: int = 18432
    experts: int = 256
    inner: int = 2048
    vocab: int = 129280


def mla(hidden: int, heads: int, q_lora: int, kv_lora: int, nope: int, rope: int, v_dim: int) -> list[Row]:
    """Multi-head latent attention."""
    return [
        Row("q_a", "q_a_proj.weight", (q_lora, hidden)),
        norm("q_a_norm", "q_a_layernorm", q_lora),
        Row("q_b", "q_b_proj.weight", (heads * (nope + rope), q_lora), "rows"),
        Row("kv_a", "kv_a_proj_with_mqa.weight", (kv_lora + rope, hidden)),
        norm("kv_a_norm", "kv_a_layernorm", kv_lora),
        Row("kv_b", "kv_b_proj.weight", (heads * (nope + v_dim), kv_lora), "rows"),
        Row("o", "o_proj.weight", (hidden, heads * v_dim), "columns"),
    ]


def catalogue(name: str, sizes: Sizes, mtp: bool = False) -> Catalogue:
    """A model of these sizes; with ``mtp``, its layer of multi-token prediction and the copies stored with it."""
    s = sizes
    attention = mla(s.hidden, s.heads, s.q_lora, s.kv_lora, s.nope, s.rope, s.v_dim)
    every = [*layer_norms(s.hidden), *renamed(attention, "self_attn.")]
    moe = [
        Row("router", "mlp.gate.weight", (s.experts, s.hidden)),
        Row("router_bias", "mlp.gate.e_score_correction_bias", (s.experts,), dtype="float32", buffer=True),
        *glu("expert_", s.hidden, s.inner, "mlp.experts.{}.", s.experts),
        *glu("shared_", s.hidden, s.inner, "mlp.shared_experts."),
    ]
    prefix = "model.layers.{}."
    blocks = [
        Block("", (), ends(s.vocab, s.hidden)),
        Block(prefix, range(s.layers), every),
        Block(prefix, range(s.dense), glu("", s.hidden, s.dense_inner)),
        Block(prefix, range(s.dense, s.layers), moe),
    ]
    if mtp:
        blocks.append(Block(prefix, (s.layers,), [*_mtp(s), *every, *moe], mtp=True))
    return build(name, s.layers, s.vocab, blocks, experts=s.experts)


def _mtp(s: Sizes) -> list[Row]:
    return [
        Row("embed", "embed_tokens.weight", (s.vocab, s.hidden), "vocab"),
        norm("enorm", "enorm", s.hidden),
        norm("hnorm", "hnorm", s.hidden),
        Row("eh_proj", "eh_proj.weight", (s.hidden, 2 * s.hidden), "rows"),
        norm("final_norm", "shared_head.norm", s.hidden),
        Row("head", "shared_head.head.weight", (s.vocab, s.hidden), "vocab"),
    ]
