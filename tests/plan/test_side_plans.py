"""Plans between factored sides: routes, balance, relays, digests, the path by axes, and what they promise."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from side_helpers import side as side_of
from side_makers import TINY, moe, side

from refitd.errors import InputError, MismatchError, PlanError
from refitd.layout import Box, Layout
from refitd.layout.side import Side
from refitd.layout.tp import dense
from refitd.plan import Rank, Topology, content, lose, make_plan, plan_sides, share, sides, topology
from refitd.plan.axes import AxesPlan
from refitd.plan.side_plan import SidePlan

HOSTS = replace(TINY, node=4, domain=4, usable=4)
SHAPE = (64, 96)


def one(
    prefix: str, count: int, dim: int | None, ways: int, places: Topology = HOSTS, order: list[int] | None = None
) -> Side:
    return side(places, prefix, count, [(["w"], SHAPE, dim, range(count), ways)], order=order)


def general(source: Side, destination: Side, chosen: Topology = TINY) -> SidePlan:
    """The plan that the general way makes, also where the axes would do."""
    return SidePlan("general", chosen, 1 << 20, sides.make_core(source, destination, chosen, True, 1 << 20))


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_the_way_by_axes_counts_what_the_general_way_counts(dims: tuple[int, int]) -> None:
    """Loads, totals and programs of a tensor that is cut along one axis on each side are those of the general plan."""
    source, destination = (
        one("trainer/a", 8, dims[0], 8),
        one("engine/b", 12 if dims[1] else 4, dims[1], 12 if dims[1] else 4),
    )
    plan, other = plan_sides(source, destination, TINY), general(source, destination)
    assert isinstance(plan, AxesPlan)
    for name, mine, theirs in zip(plan.loads._fields, plan.loads, other.loads, strict=True):
        assert np.array_equal(mine, theirs), name
    assert plan.totals == other.totals
    assert plan.bounds == other.bounds
    key = destination.ranks[1]
    assert plan.program(key).moves.tolist() == other.program(key).moves.tolist()


def test_a_source_in_the_domain_is_read_there() -> None:
    """The needer itself comes first, then its node, then its domain; only the rest crosses the network."""
    places = [("t0", "n0", "d0"), ("t1", "n1", "d0"), ("t2", "n2", "d1")]
    source = replace(
        one("t", 3, None, 1),
        ranks=("t0", "t1", "t2"),
        nodes=tuple(n for _, n, _ in places),
        domains=tuple(d for *_, d in places),
    )
    targets = ("e0", "e1", "e2", "t2")
    destination = replace(
        one("e", 4, None, 1), ranks=targets, nodes=("n0", "n9", "n8", "n2"), domains=("d0", "d0", "d2", "d1")
    )
    plan = plan_sides(source, destination, TINY)
    size = 64 * 96 * 2
    wanted = {"peer_bytes": size, "fabric_bytes": size, "network_bytes": size, "local_bytes": size}
    assert {name: plan.totals[name] for name in wanted} == wanted
    assert {b.link for b in plan.program("e0").receives()} == {"peer"}
    assert {b.link for b in plan.program("e1").receives()} == {"fabric"}
    assert {(b.src, b.link) for b in plan.program("t2").receives()} == {("t2", "local")}


def test_what_a_domain_needs_enters_through_all_its_ranks() -> None:
    """Four holders and eight needers in two domains: every NIC carries an even share, then it spreads by peer reads."""
    plan = plan_sides(one("trainer/a", 4, None, 1), one("engine/b", 8, None, 1), TINY)
    size = 64 * 96 * 2
    assert plan.totals["network_bytes"] == plan.totals["network_bytes_min"] == 2 * size
    assert plan.totals["peer_bytes"] == 2 * 3 * size
    assert np.ptp(plan.loads.ingress[plan.loads.ingress > 0]) <= 2 * 96
    assert plan.loads.egress.max() <= 1.05 * plan.bounds.direct


def test_a_chain_carries_what_one_source_cannot_send_eight_times() -> None:
    """One source and eight domains: it sends little more than one copy, the domains pass the rest on, hop by hop."""
    names = [f"t{i}" for i in range(40)]
    source = side(HOSTS, "trainer/a", 1, [(names, SHAPE, None, [0], 1)])
    destination = side(HOSTS, "engine/b", 32, [(names, SHAPE, None, range(32), 1)])
    size = 40 * 64 * 96 * 2
    plan = plan_sides(source, destination, TINY)
    assert plan.totals["network_bytes"] == 8 * size
    assert plan.loads.egress[list(plan.ranks).index("trainer/a/00000")] <= 1.1 * size
    assert plan.depth > 1
    stages = {b.stage for rank in range(8, 12) for b in plan.program(f"engine/b/{rank:05d}").receives()}
    assert stages >= {0, 1, 2, 3, 4, 5}
    assert any("chains of up to" in reason for reason in plan.reasons)
    assert plan_sides(source, destination, TINY, relays=False).totals["relay_bytes"] == 0


def test_uneven_stages_are_balanced_by_relays() -> None:
    """Stages of unequal depth: without relays the busiest source sends more than the bound, with them it does not."""
    source, destination = moe(HOSTS)
    plain, plan = plan_sides(source, destination, TINY, relays=False), plan_sides(source, destination, TINY)
    assert plain.report["egress_max_over_bound"] > 1.1
    assert plan.report["egress_max_over_bound"] <= 1.05
    assert plan.report["ingress_max_over_bound"] <= 1.05
    assert plan.totals["network_bytes"] == plain.totals["network_bytes"] == plan.totals["network_bytes_min"]


def test_a_line_is_received_in_place_and_in_turn() -> None:
    """Moves of a message follow destination addresses in each phase, and each domain starts at its own part."""
    source, destination = moe(HOSTS, layers=60)
    plan = plan_sides(source, destination, TINY)
    firsts = set()
    for key in ("engine/b/00000", "engine/b/00004", "engine/b/00008", "engine/b/00012"):
        program = plan.program(key)
        bucket = next(b for b in program.receives() if b.src == "trainer/a/00012" and b.stage == 0)
        firsts.add(program.storages[int(program.moves_of(bucket)[0, 4])].name)
    assert len(firsts) == 4


def test_nothing_that_another_domain_has_is_lost_half_way() -> None:
    """Any source node may be lost at a half and later; at a tenth, what is lost is what no live rank has."""
    plan = plan_sides(*moe(HOSTS, layers=60), TINY)
    for first in range(0, 16, 4):
        lost = [f"trainer/a/{rank:05d}" for rank in range(first, first + 4)]
        for at in (0.5, 0.9):
            assert lose(plan, lost, at).totals["unrecoverable_bytes"] == 0
        early = lose(plan, lost, 0.1).totals
        assert 0 < early["unrecoverable_bytes"] < early["remaining_bytes"]
    assert lose(plan, [], 1.0).totals["remaining_bytes"] == 0


def test_bad_losses_are_refused() -> None:
    """Ranks that are not of the plan, parts out of range and remainders of remainders are typed errors."""
    plan = plan_sides(*moe(HOSTS), TINY)
    with pytest.raises(InputError, match="a rank of this plan"):
        lose(plan, ["engine/c/0"], 0.5)
    for at in (-0.1, 1.1):
        with pytest.raises(InputError, match="a part from 0 to 1"):
            lose(plan, [], at)
    with pytest.raises(InputError, match="a whole plan"):
        lose(lose(plan, [], 0.5), [], 0.5)


def test_sides_that_do_not_fit_are_refused() -> None:
    """A missing tensor, another shape and a region without holder are named."""
    source, destination = moe(HOSTS)
    fewer = replace(source, instances=source.instances[1:])
    with pytest.raises(MismatchError, match=r"layers\.0\.o: expected a source that has it, got none; engine/b/00000"):
        plan_sides(fewer, destination, TINY)
    with pytest.raises(
        MismatchError, match=r"shape \(64, 96\) as trainer/a/00000 reports, got shape \(64, 90\) on engine/b/00000"
    ):
        plan_sides(one("trainer/a", 1, None, 1), side(HOSTS, "engine/b", 1, [(["w"], (64, 90), None, [0], 1)]), TINY)
    half = one("trainer/a", 2, 0, 2)
    pattern = half.patterns[0]
    short = replace(
        pattern, slot=pattern.slot[:1], box=pattern.box[:1], offset=pattern.offset[:1], strides=pattern.strides[:1]
    )
    with pytest.raises(
        PlanError, match=r"tensor w: no source holds \[32, 0\] to \[64, 96\], which engine/b/00000 needs"
    ):
        plan_sides(replace(half, patterns=(short,)), one("engine/b", 1, None, 1), TINY)
    with pytest.raises(InputError, match="bucket_bytes"):
        plan_sides(source, destination, TINY, bucket_bytes=8)


def test_the_digest_does_not_depend_on_the_order_of_ranks() -> None:
    """Sides whose ranks were given in another order make the same plan; another placement or size makes another."""
    orders = [None, [3, 1, 0, 2], [2, 3, 1, 0]]
    digests = {
        plan_sides(one("trainer/a", 4, 0, 2, order=order), one("engine/b", 4, 1, 4, order=order), TINY).digest
        for order in orders
    }
    assert len(digests) == 1
    other = plan_sides(one("trainer/a", 4, 0, 2), one("engine/b", 4, 1, 4, replace(HOSTS, usable=2)), TINY).digest
    assert digests.isdisjoint({other})


def padded(keep: bool, known: bool) -> list[Rank]:
    """Two ranks with a shard of 8 rows each of a vocabulary of 8: the second has padding alone, or another storage."""
    whole = {"w": ((8, 4), "bfloat16")}
    first = Layout.from_pieces(whole, {"w": (32, "bfloat16")}, [dense("w", Box((0, 0), (8, 4)), "w")])
    storages = {"w" if known else "other": (32, "bfloat16")}
    second = Layout.from_pieces(whole, storages, [], keep=("oth*",) if keep else ())
    return [Rank(f"engine/r/{i}", "n", "d", layout) for i, layout in enumerate((first, second))]


def test_a_shard_of_padding_needs_nothing() -> None:
    """An engine rank whose shard is padding alone is planned by both ways and gets nothing. A storage that no rank
    fills is refused by both, naming storage and rank, unless it is kept."""
    source = [replace_key(padded(False, True)[0], "trainer/r/0", "m")]
    for keep, known in ((False, True), (True, False)):
        ranks = padded(keep, known)
        plan = plan_sides(side_of(source), side_of(ranks), TINY)
        assert plan.totals["network_bytes"] == make_plan(source, ranks).totals["network_bytes"] == 64
        assert plan.program("engine/r/1").receives() == ()
    for refused in (lambda: plan_sides(side_of(source), side_of(padded(False, False)), TINY),
                    lambda: make_plan(source, padded(False, False))):  # fmt: skip
        with pytest.raises(MismatchError, match=r"storage other of engine/r/1: expected a piece in it, or a keep"):
            refused()


def test_a_storage_that_one_rank_does_not_fill_is_refused_like_there() -> None:
    """A rank that has a storage which others fill, and does not know the tensor in it, is named by both ways."""
    source = [replace_key(padded(False, True)[0], "trainer/r/0", "m")]
    first, _ = padded(False, True)
    stranger = Layout.from_pieces({}, {"w": (32, "bfloat16")}, [])
    ranks = [first, Rank("engine/r/1", "n", "d", stranger)]
    for plan in (lambda: plan_sides(side_of(source), side_of(ranks), TINY), lambda: make_plan(source, ranks)):
        with pytest.raises(MismatchError, match=r"storage w of engine/r/1: expected a piece in it, or a keep"):
            plan()


def replace_key(rank: Rank, key: str, place: str) -> Rank:
    return Rank(key, place, place, rank.layout)


SCRIPT = """
from side_makers import TINY, moe
from refitd.plan import plan_sides
print(plan_sides(*moe(TINY), TINY).digest)
"""


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    """Three interpreters with different hash seeds compute one digest."""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, *sys.path])
    seen = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        ).stdout
        for seed in ("0", "1", "31337")
    }  # fmt: skip
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 32


def test_no_float_enters_the_digest() -> None:
    """The digest refuses arrays that are not integers, and what chooses shares has no float and no true division."""
    with pytest.raises(TypeError, match="float64 in a digest"):
        content._ints(None, np.zeros(1))
    from refitd.plan import axes, classes, cutting, flows, forms, laid, lines, ranksets, relays, spans
    from refitd.plan import lose as losing

    for module in (axes, classes, content, cutting, flows, forms, laid, lines, losing, ranksets, relays, share, spans):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), module.__name__
            assert not isinstance(getattr(node, "op", None), ast.Div), module.__name__
            assert (
                not (isinstance(node, ast.Name) and node.id == "float" and isinstance(node.ctx, ast.Load))
                or module is losing
            )


def test_shares_are_even_where_they_can_be() -> None:
    """Random sets that do not nest end within a hundredth of what is possible; no byte is lost; small shares are
    whole."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        from refitd.plan.ranksets import RankSets

        made = RankSets(24)
        numbers = [made.add(np.sort(rng.choice(24, rng.integers(1, 9), replace=False))) for _ in range(30)]
        table = made.table()
        demand = np.zeros(len(table.first) - 1, np.int64)
        np.add.at(demand, numbers, rng.integers(1, 10**9, len(numbers)))
        shares = share.pour(demand, table, 24, 1)
        assert np.add.reduceat(shares.share, table.first[:-1]).tolist() == demand.tolist()
        assert shares.load.sum() == demand.sum()
        assert shares.load.max() <= 1.05 * share.bound(demand, table, shares.load)
        whole = share.pour(demand, table, 24, 1 << 40)
        assert np.count_nonzero(whole.share) == np.count_nonzero(demand)


def test_topologies_are_read_from_text() -> None:
    """TOML and JSON give one topology; each wrong field is named; ranks fill the usable part of a domain."""
    link = "{ bandwidth = 50_000_000_000, latency = 30_000 }"
    toml = f'name = "x"\nnetwork = {link}\nfabric = {link}\npeer = {link}\nnode = 4\ndomain = 72\nusable = 64\nnics = 2'
    found = Topology.from_text(toml)
    assert (found.usable, found.nics, found.network.bandwidth, found.entry_bandwidth) == (64, 2, 50 * 10**9, 10**11)
    assert found.place(130, "p")[127:130] == [("pd0001n15", "pd0001"), ("pd0002n00", "pd0002"), ("pd0002n00", "pd0002")]
    assert Topology.from_text(toml.replace("usable = 64\n", "")).usable == 72
    for wrong, field in (
        ("node = 0", "node"),
        ("usable = 80", "usable"),
        ("more = 1", "no fields but"),
        ('network = "fast"', "network"),
    ):
        name = wrong.split(" ")[0]
        lines = [line for line in toml.split("\n") if not line.startswith(name + " ")]
        with pytest.raises(InputError, match=field):
            Topology.from_text("\n".join([*lines, wrong]))
    with pytest.raises(InputError, match="TOML or JSON"):
        Topology.from_text("{")
    with pytest.raises(InputError, match="one of gb200-nvl72, h100-nvl8, h200-1host"):
        topology("dgx")
