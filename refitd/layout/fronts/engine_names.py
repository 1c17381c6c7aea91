"""Names of the parameters of vLLM and SGLang, by role. A role that is not here keeps its Hugging Face name."""

from __future__ import annotations

from refitd.layout.models import Kind, quant

FUSED = (
    ("q", "k", "v"), ("gate", "up"), ("shared_gate", "shared_up"), ("q_a", "kv_a"), ("expert_gate", "expert_up"),
)  # fmt: skip

# The last components of the name; the others are those of the kind's Hugging Face name.
_VLLM = {
    "q": "qkv_proj.weight",
    "gate": "gate_up_proj.weight",
    "shared_gate": "gate_up_proj.weight",
    "q_a": "fused_qkv_a_proj.weight",
    "expert_gate": "routed_experts.w13_weight",
    "expert_up": "routed_experts.w13_weight",
    "expert_down": "routed_experts.w2_weight",
}
_SGLANG = {
    **_VLLM,
    "q_a": "fused_qkv_a_proj_with_mqa.weight",
    "expert_gate": "w13_weight",
    "expert_up": "w13_weight",
    "expert_down": "w2_weight",
}
TABLES = {"vllm": _VLLM, "sglang": _SGLANG}


def template(flavour: str, kind: Kind, fused: bool) -> str:
    """The storage name of a kind, with a ``{}`` for the layer where it has one. ``fused``: it is the first of several.

    In the draft model of the DeepSeek class the parts of the decoder layer lie below ``mtp_block``.
    """
    suffix = quant.SUFFIX if kind.row.scale else ""
    own = TABLES[flavour].get(kind.role.removesuffix("_scale")) if fused or kind.row.experts else None
    name = kind.row.name
    if own:
        kept = name.replace("{}.", "").split(".")[:-2]
        name = ".".join([*kept, own + suffix])
    inner = kind.mtp and kind.prefix.startswith("model.layers.") and kind.role not in _DRAFT
    block = "mtp_block." if inner else ""
    return f"{kind.prefix}{block}{name}"


_DRAFT = frozenset({"embed", "head", "enorm", "hnorm", "eh_proj", "final_norm"})
