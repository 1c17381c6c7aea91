"""Rows that several families share."""

from __future__ import annotations

from refitd.layout.models.catalogue import Row


def norm(role: str, name: str, size: int, dtype: str = "bfloat16") -> Row:
    """A vector that every rank has."""
    return Row(role, f"{name}.weight", (size,), dtype=dtype)


def gqa(hidden: int, q: int, kv: int, dim: int, norms: bool, q_rows: int | None = None) -> list[Row]:
    """Grouped attention: q, k, v, o and, with ``norms``, the norms of q and k. ``q_rows``: rows of q a head."""
    rows = [
        Row("q", "q_proj.weight", (q * (q_rows or dim), hidden), "rows"),
        Row("k", "k_proj.weight", (kv * dim, hidden), "kv"),
        Row("v", "v_proj.weight", (kv * dim, hidden), "kv"),
        Row("o", "o_proj.weight", (hidden, q * dim), "columns"),
    ]
    return rows + ([norm("q_norm", "q_norm", dim), norm("k_norm", "k_norm", dim)] if norms else [])


def glu(role: str, hidden: int, inner: int, name: str = "mlp.", experts: int = 0, first: str = "rows") -> list[Row]:
    """A gated feed-forward block: gate, up, down. ``role`` is put before their roles."""
    return [
        Row(f"{role}gate", f"{name}gate_proj.weight", (inner, hidden), first, experts=experts),
        Row(f"{role}up", f"{name}up_proj.weight", (inner, hidden), first, experts=experts),
        Row(f"{role}down", f"{name}down_proj.weight", (hidden, inner), "columns", experts=experts),
    ]


def renamed(rows: list[Row], prefix: str) -> list[Row]:
    """Rows with ``prefix`` before their names."""
    return [row._replace(name=prefix + row.name) for row in rows]


def ends(vocab: int, hidden: int, embed: str = "model.embed_tokens", norm_name: str = "model.norm") -> list[Row]:
    """Embedding, last norm and head."""
    return [
        Row("embed", f"{embed}.weight", (vocab, hidden), "vocab"),
        norm("final_norm", norm_name, hidden),
        Row("head", "lm_head.weight", (vocab, hidden), "vocab"),
    ]


def layer_norms(hidden: int) -> list[Row]:
    """The norms before attention and before the feed-forward block."""
    return [norm("norm1", "input_layernorm", hidden), norm("norm2", "post_attention_layernorm", hidden)]
