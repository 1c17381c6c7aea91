"""Catalogues of model families: every tensor under its Hugging Face name. Sizes: the published ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from refitd.errors import InputError
from refitd.layout.models import deepseek, kimi, nemotron, qwen3, qwen35
from refitd.layout.models.catalogue import Block, Catalogue, Heads, Kind, Row, build

__all__ = ["MODELS", "Block", "Catalogue", "Heads", "Kind", "Row", "build", "catalogue"]

_K2 = deepseek.Sizes(dense=1, heads=64, experts=384, vocab=163840)
_TINY = deepseek.Sizes(
    layers=4, dense=1, hidden=64, heads=4, q_lora=24, kv_lora=16, nope=8, rope=4, v_dim=8, dense_inner=96, experts=8,
    inner=32, vocab=320,
)  # fmt: skip
# Sixteen times as wide, so that bandwidth and not latency decides; its dense layer is as large as one of experts.
_WIDE = deepseek.Sizes(
    layers=4, dense=1, hidden=1024, heads=64, q_lora=384, kv_lora=256, nope=8, rope=4, v_dim=8, dense_inner=4608,
    experts=8, inner=512, vocab=5120,
)  # fmt: skip

# Models without multi-token prediction have one catalogue.
MODELS: dict[str, Callable[[bool], Catalogue]] = {
    "qwen3-32b": lambda _: qwen3.dense("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
    "qwen3-235b": lambda _: qwen3.moe("qwen3-235b", 94, 4096, 64, 4, 128, 128, 1536, 151936),
    "deepseek-v3": lambda mtp: deepseek.catalogue("deepseek-v3", deepseek.Sizes(), mtp),
    "kimi-k2": lambda _: deepseek.catalogue("kimi-k2", _K2),
    "nemotron-ultra": lambda mtp: nemotron.catalogue("nemotron-ultra", nemotron.Sizes(), mtp),
    "qwen3.8-2.4t": lambda mtp: qwen35.catalogue("qwen3.8-2.4t", qwen35.Sizes(), mtp),
    "kimi-k3": lambda _: kimi.catalogue("kimi-k3", kimi.Sizes()),
    "tiny": lambda mtp: deepseek.catalogue("tiny", _TINY, mtp),
    "tiny-wide": lambda mtp: deepseek.catalogue("tiny-wide", _WIDE, mtp),
}


@cache
def catalogue(model: str, mtp: bool = False) -> Catalogue:
    """The catalogue of a model, with or without its tensors of multi-token prediction. Raises InputError if unknown."""
    made = MODELS.get(model)
    if made is None:
        raise InputError("model", f"one of {', '.join(MODELS)}", model)
    return made(mtp)
