"""Bandwidths as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from refitd.errors import InputError
from refitd.hook.messages import RATE

_UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_RATE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]+)(?:/s)?")
_SHOWN = ((10**12, "TB/s"), (10**9, "GB/s"), (10**6, "MB/s"), (10**3, "kB/s"))
EXAMPLES = "a rate such as 500MB/s or 2GiB/s, from 1MB/s to 1000TB/s, or none"


def parse_rate(text: str) -> int | None:
    """Bytes per second of ``500MB/s``, ``1.5 GiB/s``, ``2GB``; None of ``none``.

    A small b would be bits, and is refused. Fractions of a byte are cut off. Raises InputError.
    """
    if text.strip().lower() == "none":
        return None
    match = _RATE.fullmatch(text.strip())
    rate = int(Fraction(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if not RATE.test(rate):
        raise InputError("RATE", EXAMPLES, repr(text))
    return rate


def format_rate(rate: int | None) -> str:
    """A rate in the largest unit that is not above it, with at most three decimals."""
    if rate is None:
        return "none"
    for unit, name in _SHOWN:
        if rate >= unit:
            return f"{rate / unit:.3f}".rstrip("0").rstrip(".") + name
    return f"{rate}B/s"
