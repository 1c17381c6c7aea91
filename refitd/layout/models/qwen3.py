"""Qwen3 dense and Qwen3-MoE."""

from __future__ import annotations

from refitd.layout.models.catalogue import Block, Catalogue, Heads, Row, build
from refitd.layout.models.rows import ends, glu, gqa, layer_norms, renamed

_PREFIX = "model.layers.{}."


def dense(name: str, layers: int, hidden: int, q: int, kv: int, dim: int, inner: int, vocab: int) -> Catalogue:
    """A dense Qwen3."""
    rows = [*layer_norms(hidden), *renamed(gqa(hidden, q, kv, dim, True), "self_attn."), *glu("", hidden, inner)]
    blocks = [Block("", (), ends(vocab, hidden)), Block(_PREFIX, range(layers), rows)]
    return build(name, layers, vocab, blocks, Heads(q, kv, dim, dim))


def moe(
    name: str, layers: int, hidden: int, q: int, kv: int, dim: int, experts: int, inner: int, vocab: int
) -> Catalogue:
    """A Qwen3 with routed experts in every layer and no shared one."""
    rows = [
        *layer_norms(hidden),
        *renamed(gqa(hidden, q, kv, dim, True), "self_attn."),
        Row("router", "mlp.gate.weight", (experts, hidden)),
        *glu("expert_", hidden, inner, "mlp.experts.{}.", experts),
    ]
    blocks = [Block("", (), ends(vocab, hidden)), Block(_PREFIX, range(layers), rows)]
    return build(name, layers, vocab, blocks, Heads(q, kv, dim, dim), experts)
