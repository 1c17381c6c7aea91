"""Qwen3 for the check with a real engine: of transformers, or written out here with the same names and arithmetic."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

SIZES = {
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
    "card": {
        "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
EPS, THETA = 1e-6, 10000.0


def build(source, size, dtype, device):
    """Random weights. ``source``: "transformers", or "own" for the one of this file."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return (_of_transformers if source == "transformers" else Qwen3)(SIZES[size])
    finally:
        torch.set_default_dtype(before)


def _of_transformers(numbers):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    more = {"tie_word_embeddings": False, "attn_implementation": "sdpa", "rms_norm_eps": EPS}
    return Qwen3ForCausalLM(Qwen3Config(**numbers, **more))


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c["head_dim"]
        heads, shared = c["num_attention_heads"] * self.head_dim, c["num_key_value_heads"] * self.head_dim
        self.q_proj = nn.Linear(c["hidden_size"], heads, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], shared, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], shared, bias=False)
        self.o_proj = nn.Linear(heads, c["hidden_size"], bias=False)
        self.q_norm, self.k_norm = Norm(self.head_dim), Norm(self.head_dim)

    def forward(self, x, turns):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = (_turn(part, *turns) for part in (q, k))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape[:-1], -1))


def _turn(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Gated(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Gated(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c["hidden_size"]), Norm(c["hidden_size"])

    def forward(self, x, turns):
        x = x + self.self_attn(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c["head_dim"]
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"])

    def forward(self, ids):
        x = self.embed_tokens(ids)
        rates = THETA ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=x.device) / self.head_dim)
        angles = torch.arange(ids.shape[1], dtype=torch.float32, device=x.device)[:, None] * rates
        angles = torch.cat((angles, angles), -1)
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns)
        return self.norm(x)


class Qwen3(nn.Module):
    """Names of parameters and the way it is called are those of transformers' Qwen3ForCausalLM."""

    def __init__(self, c):
        super().__init__()
        self.model = Body(c)
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids)))
