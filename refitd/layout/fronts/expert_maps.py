"""Which experts a rank holds, and in which order: always given, as the engine says it. The usual maps by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from refitd.errors import InputError, LayoutError

ExpertMap = Sequence[Sequence[int]]
"""For each EP rank the routed experts in its slots, in order; redundant experts stand on several ranks."""


def linear(experts: int, ep: int) -> list[list[int]]:
    """Contiguous experts; the first ``experts % ep`` ranks have one more (vLLM 0.33; older ones differ)."""
    small, more = divmod(experts, ep)
    starts = [rank * small + min(rank, more) for rank in range(ep + 1)]
    return [list(range(starts[rank], starts[rank + 1])) for rank in range(ep)]


def round_robin(experts: int, ep: int) -> list[list[int]]:
    """Expert e on rank ``e % ep``."""
    return [list(range(rank, experts, ep)) for rank in range(ep)]


def physical(order: Sequence[int], ep: int) -> list[list[int]]:
    """From an EPLB table: the expert in each physical slot, slots cut evenly over ``ep`` ranks."""
    if len(order) % ep:
        raise InputError("physical experts", f"a number of slots that {ep} ranks divide", str(len(order)))
    share = len(order) // ep
    return [list(order[rank * share : (rank + 1) * share]) for rank in range(ep)]


def by_layer(given: ExpertMap | Sequence[ExpertMap]) -> list[ExpertMap]:
    """The maps of all layers: one, if one was given for all."""
    nested = any(isinstance(item, Sequence) for row in given for item in row)
    return cast("list[ExpertMap]", list(given)) if nested else [cast("ExpertMap", given)]


def check(layer: str, table: ExpertMap, experts: int, ep: int) -> None:
    """Raise LayoutError with everything that is wrong: a wrong number of ranks, experts unknown, missing, or twice."""
    bad = []
    if len(table) != ep:
        bad.append(InputError(f"expert map of {layer}", f"{ep} EP ranks", str(len(table))))
    for rank, row in enumerate(table):
        field = f"expert map of {layer}, EP rank {rank}"
        unknown = sorted({e for e in row if not 0 <= e < experts})
        twice = sorted({e for e in row if list(row).count(e) > 1})
        if unknown:
            bad.append(InputError(field, f"experts 0 to {experts - 1}", f"experts {unknown}"))
        if twice:
            bad.append(InputError(field, "each expert at most once on a rank", f"experts {twice} twice"))
    missing = sorted(set(range(experts)) - {e for row in table for e in row})
    if missing:
        bad.append(InputError(f"expert map of {layer}", "a slot for every expert", f"none for experts {missing}"))
    if bad:
        raise LayoutError(bad)
