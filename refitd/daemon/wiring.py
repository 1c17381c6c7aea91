"""Which transport a lane's network edges take, and why: by the records alone, so that every node chooses alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from refitd.daemon.devices import driver_version, library_versions, nccl_conflict
from refitd.epoch.records import Member, RankInfo
from refitd.epoch.view import View
from refitd.mover.nccl.library import usable

PEER, TCP, NCCL = "peer", "tcp", "nccl"


class Wiring(NamedTuple):
    """``transport`` is peer (there are no network edges), tcp or nccl; empty where what was asked for cannot be."""

    transport: str
    reason: str


@dataclass(frozen=True, slots=True)
class Versions:
    """What a node's movers would load; ``nccl`` is empty where it cannot be used. Fields of the member record."""

    torch: str
    nccl: str
    driver: str


def versions() -> Versions:
    """Of this node."""
    found = library_versions()
    bound = found["nccl4py"] and not usable(found["nccl"])
    return Versions(found["torch"], found["nccl"] if bound else "", driver_version())


def versions_of(member: Member) -> dict[str, str]:
    """As the member's record has them."""
    return asdict(Versions(member.torch, member.nccl, member.driver))


def wiring(view: View, keys: Iterable[str]) -> Wiring:
    """For a lane of which the ranks ``keys`` have edges to other hosts."""
    ends = _ends(view, set(keys))
    if not ends:
        return Wiring(PEER, "no edge leaves its host")
    wishes = {member.transport: member.node for member, _info in ends.values()}
    if TCP in wishes:
        return Wiring(TCP, f"{wishes[TCP]} wants tcp")
    why = _obstacle(ends)
    if not why:
        member = next(iter(ends.values()))[0]
        return Wiring(NCCL, f"NCCL {member.nccl} on all {len(ends)} ranks")
    if NCCL in wishes:
        return Wiring("", f"{wishes[NCCL]} wants nccl, but {why}")
    return Wiring(TCP, why)


def _ends(view: View, keys: set[str]) -> Mapping[str, tuple[Member, RankInfo]]:
    ranks = sorted(view.ranks(), key=lambda rank: rank[1].key)
    return {info.key: (stored.value, info) for stored, info in ranks if info.key in keys}


def _obstacle(ends: Mapping[str, tuple[Member, RankInfo]]) -> str:
    """Why NCCL cannot serve all of them; a mix of versions, which it would refuse, is named first."""
    found = {key: member.nccl for key, (member, _info) in ends.items()}
    if all(found.values()) and (conflict := nccl_conflict(found)):
        return conflict
    for key, (member, info) in ends.items():
        if not member.nccl:
            return f"{member.node} has no NCCL that can be used"
        if not info.device:
            return f"{key} is not on a GPU"
    return ""


def group_of(key: str, edges: Iterable[tuple[str, str]]) -> list[str]:
    """The ranks that ``key`` shares a communicator with, itself included: all that edges connect, in order."""
    pairs, found, left = list(edges), {key}, True
    while left:
        reached = {end for pair in pairs if found & set(pair) for end in pair}
        left = not reached <= found
        found |= reached
    return sorted(found)


def host_of(key: str, devices: Mapping[str, str]) -> str:
    """What NCCL is to take for the host of a rank; empty for the real one.

    NCCL refuses a communicator of which two ranks of a host are on one GPU (ncclInvalidUsage), so those that share one
    count as hosts of their own. Others do not: NCCL may then use its host's other GPUs on the way to the network.
    ``devices``: the GPU of each of the node's ranks, by key.
    """
    shared = any(device == devices.get(key) for other, device in devices.items() if other != key)
    return key if shared else ""
