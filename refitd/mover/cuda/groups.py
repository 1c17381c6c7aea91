"""Which buckets share a launch, and names that tell the storages of its ranks apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from refitd.plan.program import Bucket, Program


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


def rank_name(rank: str, name: str) -> str:
    """A storage's name among those of all ranks."""
    return f"{rank}/{name}"


def by_rank(program: Program) -> Program:
    """``program`` with `rank_name` for every storage, so that one launch may read from several ranks."""
    return replace(program, storages=[ref._replace(name=rank_name(ref.rank, ref.name)) for ref in program.storages])
