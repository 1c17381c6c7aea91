"""Bytes between domains, in an order that people find their way in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from refitd.layout.box import Ints


class Traffic(NamedTuple):
    """Domains that send and domains that receive, with ``nbytes`` (senders, receivers)."""

    senders: list[str]
    receivers: list[str]
    nbytes: Ints


def traffic(domains: Sequence[str], matrix: Ints) -> Traffic:
    """Without those that send or receive nothing. Numbers in names count as such; senders that also receive come
    last."""
    order = sorted(range(len(domains)), key=lambda i: _natural(domains[i]))
    into, out = matrix.sum(axis=0), matrix.sum(axis=1)
    rows = sorted((i for i in order if out[i]), key=lambda i: bool(into[i]))
    columns = [j for j in order if into[j]]
    return Traffic([domains[i] for i in rows], [domains[j] for j in columns], matrix[rows][:, columns])


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
