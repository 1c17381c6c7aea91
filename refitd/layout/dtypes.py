"""The dtypes that weights come in, under torch's names, and which casts a refit may do on the way."""

from __future__ import annotations

ITEMSIZE: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip

# Narrowing rounds to nearest even, as torch does. bfloat16 <-> float16 is refused: one overflows, the other drops bits.
CASTS: frozenset[tuple[str, str]] = frozenset(
    {
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float64", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
    }
)


def cast_allowed(source: str, destination: str) -> bool:
    """Whether bytes of dtype ``source`` may be delivered as ``destination``."""
    return source == destination or (source, destination) in CASTS
