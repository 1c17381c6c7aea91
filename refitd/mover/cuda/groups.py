"""Which buckets share a launch, and names that tell the storages of its ranks apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from refitd.plan.program import Bucket, Program

Batch = list[list[Bucket]]


def groups(program: Program, buckets: Sequence[Bucket], nbytes: int) -> Iterator[list[Bucket]]:
    """Buckets of one pair of dtypes and at most ``nbytes`` together (one bucket may be larger), in order."""
    by_dtypes: dict[tuple[str, str], list[Bucket]] = {}
    for bucket in buckets:
        by_dtypes.setdefault(program.dtypes_of(bucket), []).append(bucket)
    for alike in by_dtypes.values():
        group: list[Bucket] = []
        filled = 0
        for bucket in alike:
            if group and filled + bucket.nbytes > nbytes:
                yield group
                group, filled = [], 0
            group.append(bucket)
            filled += bucket.nbytes
        yield group


def batches(grouped: Iterable[list[Bucket]], nbytes: int) -> list[Batch]:
    """Groups that are started together: of at most ``nbytes`` (one group may be larger), in order."""
    found: list[Batch] = []
    filled = 0
    for group in grouped:
        size = sum(bucket.nbytes for bucket in group)
        if not found or filled + size > nbytes:
            found.append([])
            filled = 0
        found[-1].append(group)
        filled += size
    return found


def rank_name(rank: str, name: str) -> str:
    """A storage's name among those of all ranks."""
    return f"{rank}/{name}"


def by_rank(program: Program) -> Program:
    """``program`` with `rank_name` for every storage, so that one launch may read from several ranks."""
    return replace(program, storages=[ref._replace(name=rank_name(ref.rank, ref.name)) for ref in program.storages])
