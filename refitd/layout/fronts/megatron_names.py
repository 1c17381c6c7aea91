"""Names of Megatron's parameters, by role. A role that is not here keeps its Hugging Face name below the layer."""

from __future__ import annotations

from refitd.layout.models import Catalogue, Kind

FUSED = (("gate", "up"), ("shared_gate", "shared_up"), ("expert_gate", "expert_up"))

_TOP = {
    "embed": "embedding.word_embeddings.weight",
    "final_norm": "decoder.final_layernorm.weight",
    "head": "output_layer.weight",
}
_LAYER = {
    "q": "self_attention.linear_qkv.weight",
    "k": "self_attention.linear_qkv.weight",
    "v": "self_attention.linear_qkv.weight",
    "o": "self_attention.linear_proj.weight",
    "q_norm": "self_attention.q_layernorm.weight",
    "k_norm": "self_attention.k_layernorm.weight",
    "q_a": "self_attention.linear_q_down_proj.weight",
    "kv_a": "self_attention.linear_kv_down_proj.weight",
    "q_a_norm": "self_attention.linear_q_up_proj.layer_norm_weight",
    "q_b": "self_attention.linear_q_up_proj.weight",
    "kv_a_norm": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "kv_b": "self_attention.linear_kv_up_proj.weight",
    "norm2": "pre_mlp_layernorm.weight",
    "gate": "mlp.linear_fc1.weight",
    "up": "mlp.linear_fc1.weight",
    "down": "mlp.linear_fc2.weight",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.expert_bias",
    "shared_gate": "mlp.shared_experts.linear_fc1.weight",
    "shared_up": "mlp.shared_experts.linear_fc1.weight",
    "shared_down": "mlp.shared_experts.linear_fc2.weight",
    "expert_gate": "mlp.experts.{fc1}",
    "expert_up": "mlp.experts.{fc1}",
    "expert_down": "mlp.experts.{fc2}",
}
_MTP = {
    "enorm": "enorm.weight",
    "hnorm": "hnorm.weight",
    "eh_proj": "eh_proj.weight",
    "final_norm": "final_layernorm.weight",
}


def names(catalogue: Catalogue, kind: Kind, local: list[int], prefixes: list[str]) -> list[str]:
    """Storage names of a kind, one a layer: ``local`` layer numbers, after ``prefixes`` (of the model chunk)."""
    if not kind.layers and not kind.mtp:
        return [prefixes[0] + _TOP.get(kind.role, kind.row.name)]
    if kind.mtp:
        return [f"mtp.layers.{layer}.{_mtp(kind)}" for layer in (local or [0])]
    moe = _moe_layers(catalogue)
    return [
        f"{prefix}decoder.layers.{layer}.{_suffix(catalogue, kind, number in moe)}"
        for prefix, layer, number in zip(prefixes, local, kind.layers, strict=True)
    ]


def expert(name: str, index: int, sequential: bool) -> str:
    """The name of local expert ``index``: grouped experts number the weights, sequential ones the modules."""
    head, _, fc = name.replace("}", "").rpartition("{")
    linear = f"linear_{fc}.weight"
    return f"{head}local_experts.{index}.{linear}" if sequential else f"{head}{linear}{index}"


def _moe_layers(catalogue: Catalogue) -> frozenset[int]:
    found = catalogue.by_role.get(("router", False))
    return frozenset(found.layers if found else ())


def _suffix(catalogue: Catalogue, kind: Kind, moe: bool) -> str:
    if kind.role == "norm1" and catalogue.heads:
        return "self_attention.linear_qkv.layer_norm_weight"
    if kind.role == "norm2" and not moe:
        return "mlp.linear_fc1.layer_norm_weight"
    return _LAYER.get(kind.role, kind.row.name)


def _mtp(kind: Kind) -> str:
    return _MTP.get(kind.role) or "mtp_model_layer." + _LAYER.get(kind.role, kind.row.name)
