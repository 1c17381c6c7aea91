"""What two sides have to do with each other, before anything is shared out: classes, lines, flows, and their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.layout.side import Side
from refitd.plan.canon import Ranks, number_ranks
from refitd.plan.classes import Classes, classify
from refitd.plan.cutting import Cutting
from refitd.plan.flows import Flows, make_flows
from refitd.plan.lines import Lines, make_lines
from refitd.plan.proof_lines import prove_content
from refitd.plan.ranksets import RankSets
from refitd.plan.version import PLANNER_VERSION


class Content(NamedTuple):
    """The part of a plan that every replan of the same sides shares. ``digest``: of the two sides and their ranks."""

    ranks: Ranks
    sets: RankSets
    classes: Classes
    lines: Lines
    flows: Flows
    digest: bytes


def make_content(source: Side, destination: Side) -> Content:
    """Raises MismatchError where the sides differ, PlanError where a needed region has no holder."""
    ranks = number_ranks(source, destination)
    sets = RankSets(len(ranks.keys))
    classes = classify(source, destination, ranks, sets)
    lines = make_lines(classes)
    flows = make_flows(lines, ranks, sets)
    prove_content(classes, lines, sets.table())
    return Content(ranks, sets, classes, lines, flows, side_digest(source, destination, ranks))


def side_digest(source: Side, destination: Side, ranks: Ranks) -> bytes:
    """Over names and integers: the same for every order of ranks, hash seed and processor."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"planner {PLANNER_VERSION}".encode())
    for names in (ranks.keys, ranks.nodes, ranks.domains):
        _text(digest, names)
    _ints(digest, ranks.node, ranks.domain)
    for side, numbers in ((source, ranks.source), (destination, ranks.destination)):
        keeps = [str(side.keeps[at]) for at in np.argsort(numbers).tolist()] if side.keeps else []
        _text(digest, [*map(str, side.tensors.templates), *keeps, *side.keep])
        _text(digest, side.storages)
        _text(digest, [f"{alias}={name}" for alias, name in sorted(side.tied.items())])
        for pattern in side.patterns:
            _text(digest, [str(pattern.shape), pattern.dtype, str(pattern.slots)])
            _ints(digest, pattern.boxes, pattern.slot, pattern.box, pattern.offset, pattern.strides)
        for storage in side.storage_patterns:
            _text(digest, [storage.dtype])
            _ints(digest, storage.numel)
        _ints(digest, *(numbers[np.array(group, np.int64)] for group in side.groups))
        _ints(digest, side.tensors.codes, side.storage_pattern, side.storage_group, side.instances)
    return digest.digest()


def plan_digest(content: Content, cutting: Cutting, part: Ints, extra: tuple[int, ...]) -> str:
    """Digest of a plan: its content, lines and cuts, from which all else follows. ``part``: what of each line goes by
    relay; ``extra``: what else the plan was made for."""
    table, lines, singles = content.sets.table(), content.lines, len(content.ranks.keys)
    digest = hashlib.blake2b(content.digest, digest_size=16)
    _ints(digest, np.array(extra, np.int64), table.first[singles:], table.member[table.first[singles] :])
    _ints(digest, lines.holders, lines.needers, lines.dtypes, lines.first, part)
    _ints(digest, *(s.share for s in (cutting.egress, cutting.ingress, cutting.relayed, cutting.spread)))
    return digest.hexdigest()


def _text(digest: Any, texts: Sequence[str]) -> None:
    """Texts, and how many: none has a zero byte, so no two lists are alike."""
    digest.update("\0".join(texts).encode())
    digest.update(f"\0{len(texts)}\0".encode())


def _ints(digest: Any, *columns: Any) -> None:
    """Refuses anything but integers: a float may differ between processors."""
    for column in columns:
        if column.dtype.kind != "i":
            raise TypeError(f"{column.dtype} in a digest")
        digest.update(str(column.shape).encode())
        digest.update(np.ascontiguousarray(column, "<i8"))
