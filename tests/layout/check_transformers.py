"""A development check: catalogues against the real classes of transformers, built on the meta device. No pytest needed.

    pip install --target DIR transformers==5.24.0
    PYTHONPATH=DIR:. python tests/layout/check_transformers.py [model …]

Compares every name and shape. transformers keeps experts fused and leaves multi-token prediction out; dtypes are not
compared (they come from a checkpoint). It has no class for Kimi K3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from refitd.layout.models import catalogue
from refitd.layout.models.nemotron import ULTRA_PATTERN

Shape = tuple[int, ...]


def qwen3_32b() -> Any:
    """The configuration of Qwen3-32B."""
    return transformers.Qwen3Config(
        num_hidden_layers=64, hidden_size=5120, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        intermediate_size=25600, vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip


def qwen3_235b() -> Any:
    """The configuration of Qwen3-235B-A22B."""
    return transformers.Qwen3MoeConfig(
        num_hidden_layers=94, hidden_size=4096, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        intermediate_size=12288, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
        tie_word_embeddings=False, mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip


def deepseek_v3() -> Any:
    """The configuration of DeepSeek-V3: the defaults of its class."""
    return transformers.DeepseekV3Config(tie_word_embeddings=False)


def nemotron_ultra() -> Any:
    """The configuration of Nemotron 3 Ultra."""
    names = _block_names()
    return transformers.NemotronHConfig(
        layers_block_type=[names[letter] for letter in ULTRA_PATTERN], hidden_size=8192, num_attention_heads=64,
        num_key_value_heads=2, head_dim=128, ssm_state_size=128, mamba_num_heads=256, mamba_head_dim=64, n_groups=8,
        n_routed_experts=512, moe_intermediate_size=5120, moe_latent_size=2048, n_shared_experts=1,
        moe_shared_expert_intermediate_size=10240, num_experts_per_tok=22, vocab_size=131072,
    )  # fmt: skip


def _block_names() -> dict[str, str]:
    """Letters to what this release of transformers calls the blocks."""
    return {"M": "mamba", "E": "moe", "*": "attention"}


def qwen38() -> Any:
    """The configuration of Qwen3.8-2.4T-A95B."""
    return transformers.Qwen3_5MoeTextConfig(
        num_hidden_layers=92, hidden_size=8192, num_attention_heads=64, num_key_value_heads=4, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=128, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=2048,
        shared_expert_intermediate_size=2048, vocab_size=248320, tie_word_embeddings=False,
    )  # fmt: skip


CONFIGS: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "qwen3-32b": (qwen3_32b, {}),
    "qwen3-235b": (qwen3_235b, {}),
    "deepseek-v3": (deepseek_v3, {}),
    "nemotron-ultra": (nemotron_ultra, {"model.": "backbone."}),
    "qwen3.8-2.4t": (qwen38, {}),
}


def checkpoint(state: dict[str, torch.Tensor], prefixes: dict[str, str]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes as a checkpoint has them: experts one by one."""
    for name, tensor in state.items():
        for old, new in prefixes.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        shape = tuple(tensor.shape)
        head, _, last = name.rpartition(".")
        if last == "gate_up_proj" and tensor.dim() == 3:
            for expert in range(shape[0]):
                for part in ("gate_proj", "up_proj"):
                    yield f"{head}.{expert}.{part}.weight", (shape[1] // 2, shape[2])
        elif last in ("up_proj", "down_proj") and tensor.dim() == 3:
            for expert in range(shape[0]):
                yield f"{head}.{expert}.{last}.weight", shape[1:]
        else:
            yield name, shape


def compare(model: str) -> list[str]:
    """Every difference between the catalogue and the class."""
    make, prefixes = CONFIGS[model]
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(make())
    theirs = dict(checkpoint(built.state_dict(), prefixes))
    own = catalogue(model)
    ours = {name: k.row.shape for k in own.kinds for name in own.names.take(k.ids.ravel())}
    lines = [f"{name}: only in transformers, {theirs[name]}" for name in sorted(theirs.keys() - ours.keys())]
    lines += [f"{name}: only in the catalogue, {ours[name]}" for name in sorted(ours.keys() - theirs.keys())]
    both = sorted(ours.keys() & theirs.keys())
    return lines + [
        f"{n}: {ours[n]} in the catalogue, {theirs[n]} in transformers" for n in both if ours[n] != theirs[n]
    ]


def main(models: list[str]) -> int:
    """0 when every model agrees."""
    bad = 0
    for model in models or list(CONFIGS):
        lines = compare(model)
        bad += bool(lines)
        print(f"{model}: {catalogue(model).tensors} tensors, {len(lines)} differences")
        print(*lines[:20], sep="\n", end="\n" if lines else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
