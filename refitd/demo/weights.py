"""Where the demo's weights come from: a safetensors file of a BERT encoder, or a seed."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refitd.errors import InputError

Weights = dict[str, Tensor]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
_HEADER_LIMIT = 100 << 20
_HEAD_DIM = 32


@dataclass(frozen=True)
class Spec:
    """Sizes of a BERT encoder."""

    vocab: int
    positions: int
    hidden: int
    intermediate: int
    layers: int
    heads: int


SMALL = Spec(vocab=1001, positions=64, hidden=64, intermediate=256, layers=2, heads=4)


def shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the encoder, by its Hugging Face name."""
    h, wide = spec.hidden, spec.intermediate
    out: dict[str, tuple[int, ...]] = {
        "embeddings.position_ids": (1, spec.positions),
        "embeddings.word_embeddings.weight": (spec.vocab, h),
        "embeddings.position_embeddings.weight": (spec.positions, h),
        "embeddings.token_type_embeddings.weight": (2, h),
        **_norm("embeddings.LayerNorm", h),
        **_linear("pooler.dense", h, h),
    }
    for layer in (f"encoder.layer.{i}" for i in range(spec.layers)):
        for part in ("query", "key", "value"):
            out |= _linear(f"{layer}.attention.self.{part}", h, h)
        out |= _linear(f"{layer}.attention.output.dense", h, h) | _norm(f"{layer}.attention.output.LayerNorm", h)
        out |= _linear(f"{layer}.intermediate.dense", wide, h)
        out |= _linear(f"{layer}.output.dense", h, wide) | _norm(f"{layer}.output.LayerNorm", h)
    return out


def _linear(name: str, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def make(spec: Spec, seed: int = 0) -> Weights:
    """An untrained encoder: float32 normal(0, 0.02), norms at one; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in shapes(spec).items():
        if name == "embeddings.position_ids":
            weights[name] = torch.arange(spec.positions).reshape(shape)
        elif name.endswith("LayerNorm.weight"):
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * 0.02
    return weights


def load(path: Path) -> tuple[Spec, Weights]:
    """The encoder in a safetensors file; floats become float32.

    Raises InputError where the file is not readable safetensors or not a BERT encoder (naming the first tensor that
    is missing or has another shape).
    """
    weights = {name: _master(value) for name, value in read_safetensors(path).items()}
    spec = _infer(path, weights)
    for name, shape in shapes(spec).items():
        if name == "embeddings.position_ids":
            weights.setdefault(name, torch.arange(spec.positions).reshape(shape))
        got = tuple(weights[name].shape) if name in weights else None
        if got != shape:
            raise InputError(f"{path.name}: {name}", f"shape {shape}", f"shape {got}" if got else "no such tensor")
    return spec, {name: weights[name] for name in shapes(spec)}


def _master(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _infer(path: Path, weights: Weights) -> Spec:
    def shape(name: str) -> list[int]:
        if name not in weights or weights[name].dim() != 2:
            raise InputError(f"{path.name}: {name}", "the weights of a BERT encoder", "no such matrix")
        return list(weights[name].shape)

    vocab, hidden = shape("embeddings.word_embeddings.weight")
    numbers = [int(m[1]) for name in weights if (m := re.match(r"encoder\.layer\.(\d+)\.", name))]
    heads = _config(path).get("num_attention_heads", max(hidden // _HEAD_DIM, 1))
    if type(heads) is not int or heads < 2 or heads % 2 or hidden % heads:
        raise InputError(f"{path.name}: attention heads", f"an even number that divides {hidden}", repr(heads))
    return Spec(
        vocab=vocab,
        hidden=hidden,
        positions=shape("embeddings.position_embeddings.weight")[0],
        intermediate=shape("encoder.layer.0.intermediate.dense.weight")[0],
        layers=max(numbers, default=0) + 1,
        heads=heads,
    )


def _config(path: Path) -> dict[str, Any]:
    config = path.with_name("config.json")
    parsed = json.loads(config.read_text()) if config.exists() else {}
    return parsed if isinstance(parsed, dict) else {}


def read_safetensors(path: Path) -> Weights:
    """Every tensor of a safetensors file, in memory of its own. Raises InputError."""
    try:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        if length > min(len(data) - 8, _HEADER_LIMIT):
            raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
        header = json.loads(data[8 : 8 + length])
        body = memoryview(data)[8 + length :]
        return {name: _tensor(entry, body) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InputError(str(path), "a safetensors file", f"{type(error).__name__}: {error}") from None


def _tensor(entry: dict[str, Any], body: memoryview) -> Tensor:
    dtype, (start, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError(f"offsets {start}:{end} in {len(body)} bytes of data")
    if start == end:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(body[start:end]), dtype=dtype).reshape(entry["shape"]).clone()
