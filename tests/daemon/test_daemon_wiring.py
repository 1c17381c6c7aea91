"""Which transport a lane takes, with the words that logs and ``refitd status`` show."""

from __future__ import annotations

from refitd.daemon.wiring import Wiring, group_of, host_of, versions_of, wiring
from refitd.epoch.codec import encode
from refitd.epoch.records import Member, RankInfo
from refitd.epoch.view import View

T0, E0 = "trainer/run1/0", "engine/r0/0"


def view(**nodes: tuple[str, str, bool, str]) -> View:
    """Nodes with one rank each: key, NCCL, on a GPU, what it was told to take."""
    found = View()
    for number, (node, (key, nccl, device, transport)) in enumerate(nodes.items(), 1):
        side, group, rank = key.split("/")
        info = RankInfo(key, side, group, int(rank), 1, "i", "d", "in_place", 1, device=device)
        member = Member(node, node, "h:1", "i", "b", (1,), (info,), nccl=nccl, transport=transport)
        assert found.put(f"members/{node}", encode(member), number, number)
    return found


def test_nccl_where_every_rank_can_and_else_tcp_with_the_reason() -> None:
    """The first obstacle in the order of the ranks."""
    both = view(a=(T0, "2.28.9", True, "auto"), b=(E0, "2.28.9", True, "auto"))
    assert wiring(both, [T0, E0]) == Wiring("nccl", "NCCL 2.28.9 on all 2 ranks")
    assert wiring(both, []) == Wiring("peer", "no edge leaves its host")
    host = view(a=(T0, "2.28.9", False, "auto"), b=(E0, "2.28.9", True, "auto"))
    assert wiring(host, [T0, E0]) == Wiring("tcp", f"{T0} is not on a GPU")
    none = view(a=(T0, "2.28.9", True, "auto"), b=(E0, "", True, "auto"))
    assert wiring(none, [T0, E0]) == Wiring("tcp", "b has no NCCL that can be used")


def test_a_mix_that_nccl_would_refuse_is_refused_first_with_both_versions() -> None:
    """By tcp where nobody insists; insisted on, it is an error, and no byte moves."""
    mixed = view(a=(T0, "2.30.7", True, "auto"), b=(E0, "2.28.9", True, "auto"))
    why = f"NCCL versions differ: 2.28.9 on {E0}, 2.30.7 on {T0}"
    assert wiring(mixed, [T0, E0]) == Wiring("tcp", why)
    forced = view(a=(T0, "2.30.7", True, "nccl"), b=(E0, "2.28.9", True, "auto"))
    assert wiring(forced, [T0, E0]) == Wiring("", f"a wants nccl, but {why}")


def test_one_node_that_wants_tcp_is_enough() -> None:
    """Everybody reads it from the same records."""
    mixed = view(a=(T0, "2.28.9", True, "tcp"), b=(E0, "2.28.9", True, "nccl"))
    assert wiring(mixed, [T0, E0]) == Wiring("tcp", "a wants tcp")


def test_a_communicator_has_the_ranks_that_edges_connect() -> None:
    """Two pairs that do not meet have one each."""
    edges = [("s0", "m0"), ("s1", "m0"), ("s2", "m2")]
    assert group_of("s1", edges) == ["m0", "s0", "s1"]
    assert group_of("m2", edges) == ["m2", "s2"]


def test_versions_are_in_the_member_record() -> None:
    """As they are shown."""
    member = Member("n", "n", "h:1", "i", "b", (1,), (), torch="2.11.0", nccl="2.28.9", driver="580.1")
    assert versions_of(member) == {"torch": "2.11.0", "nccl": "2.28.9", "driver": "580.1"}


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_for_nccl() -> None:
    """Or it refuses their communicator; a rank alone on its GPU keeps the real host."""
    devices = {T0: "GPU-1", E0: "GPU-1", "engine/r1/0": "GPU-2"}
    assert [host_of(key, devices) for key in (*devices, "engine/r9/0")] == [T0, E0, "", ""]
