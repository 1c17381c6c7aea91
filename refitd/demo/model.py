"""A BERT encoder in plain functional torch, and the training that changes it: the same numbers in every process."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from refitd.demo.text import MASK, PAD
from refitd.demo.weights import Spec, Weights

_NORM_EPS = 1e-12
_LEARNING_RATE = 5e-4
_MASKED_SHARE = 0.3


def settle() -> None:
    """Make torch repeat itself: one thread, deterministic algorithms. Call once in each process."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)


def encode(weights: Weights, spec: Spec, ids: Tensor, mask: Tensor) -> Tensor:
    """Hidden states [batch, tokens, hidden] of token ids [batch, tokens] under an attention mask of zeros and ones."""
    positions = weights["embeddings.position_ids"][0, : ids.shape[1]]
    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][positions]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = _norm(weights, "embeddings.LayerNorm", x)
    bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
    for layer in (f"encoder.layer.{i}" for i in range(spec.layers)):
        attended = _linear(weights, f"{layer}.attention.output.dense", _attend(weights, layer, spec.heads, x, bias))
        x = _norm(weights, f"{layer}.attention.output.LayerNorm", x + attended)
        wide = functional.gelu(_linear(weights, f"{layer}.intermediate.dense", x))
        x = _norm(weights, f"{layer}.output.LayerNorm", x + _linear(weights, f"{layer}.output.dense", wide))
    return x


def _attend(weights: Weights, layer: str, heads: int, x: Tensor, bias: Tensor) -> Tensor:
    def split(part: str) -> Tensor:
        rows = _linear(weights, f"{layer}.attention.self.{part}", x)
        return rows.reshape(*rows.shape[:2], heads, -1).transpose(1, 2)

    query, key, value = split("query"), split("key"), split("value")
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], _NORM_EPS)


def embed(weights: Weights, spec: Spec, ids: Tensor, mask: Tensor) -> Tensor:
    """Sentence embeddings, float32 [batch, hidden] of unit length: the mean over tokens that are not padding.

    Weights of any float dtype are computed with in float32.
    """
    full = {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}
    with torch.no_grad():
        hidden = encode(full, spec, ids, mask)
        share = mask[:, :, None].to(hidden.dtype)
        return functional.normalize((hidden * share).sum(1) / share.sum(1))


class Training:
    """A model in training on a fixed batch: predict masked tokens. Two with the same start are equal at every step."""

    def __init__(self, weights: Weights, spec: Spec, ids: Tensor) -> None:
        """Takes over ``weights`` (float32 and int64 buffers); ``ids`` is int64 [batch, tokens]."""
        self.weights, self.spec, self.step = weights, spec, 0
        self._ids, self._mask = ids, (ids != PAD).long()
        parameters = [w.requires_grad_() for w in weights.values() if w.is_floating_point()]
        self._optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, foreach=False)

    def advance(self, step: int) -> float:
        """Take optimizer steps until ``step`` of them were taken; the last one's loss (nan without one)."""
        loss = float("nan")
        while self.step < step:
            self.step += 1
            self._optimizer.zero_grad(set_to_none=True)
            value = self._loss(torch.Generator().manual_seed(self.step))
            value.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            loss = value.item()
        return loss

    def _loss(self, generator: torch.Generator) -> Tensor:
        """Cross entropy of the tokens that this step hides, over the tied word embeddings."""
        drawn = torch.rand(self._ids.shape, generator=generator) + (1 - self._mask)
        hidden_tokens = drawn < drawn.flatten().kthvalue(max(1, int(_MASKED_SHARE * self._mask.sum()))).values
        hidden_tokens |= drawn == drawn.min()
        states = encode(self.weights, self.spec, self._ids.masked_fill(hidden_tokens, MASK), self._mask)
        logits = states[hidden_tokens] @ self.weights["embeddings.word_embeddings.weight"].T
        return functional.cross_entropy(logits, self._ids[hidden_tokens])
