"""Bandwidths as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.errors import InputError
from refitd.operate.rate import format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [("500MB/s", 500_000_000), ("2GiB/s", 2 << 30), ("none", None), ("NONE", None), ("1.5 GB/s", 1_500_000_000),
     ("1000000B", 1_000_000), ("4096KiB", 4 << 20), ("5000kB/s", 5_000_000), ("1000TB/s", 10**15),
     (" 0.0015GB/s ", 1_500_000),
     ("1000.0005KB/s", 1_000_000)],
)  # fmt: skip
def test_rates(text: str, rate: int | None) -> None:
    """Decimal and binary units, fractions; bytes are whole."""
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "500",
        "500Mb/s/s",
        "-1MB/s",
        "0MB/s",
        "999kB/s",
        "1001TB/s",
        "1e9B/s",
        "MB/s",
        "fast",
        "1 MBit/s",
        "500Mb/s",
        "\u0661MB/s",
    ],
)
def test_what_is_no_rate(text: str) -> None:
    """Named with what was expected: a unit is needed, and nothing below 1 MB/s or above 1000 TB/s is meant."""
    with pytest.raises(InputError) as caught:
        parse_rate(text)
    assert (caught.value.field, caught.value.got) == ("RATE", repr(text))


@given(st.integers(10**6, 10**15))
def test_shown_rates_are_near_what_they_show(rate: int) -> None:
    """Three decimals of the largest unit."""
    shown = parse_rate(format_rate(rate))
    assert shown is not None
    assert abs(shown - rate) <= rate / 1000


def test_shown_rates() -> None:
    """Without needless zeros."""
    rates = (None, 1_000_000, 1_500_000, 2 << 30, 10**15, 17)
    assert [format_rate(rate) for rate in rates] == ["none", "1MB/s", "1.5MB/s", "2.147GB/s", "1000TB/s", "17B/s"]
