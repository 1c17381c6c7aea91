"""Who sends what: entry once, fan-out, neighbours, remainder, balance, digests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from plan_helpers import bits, cast_whole, distinct, fill, ranks, simple

from refitd.errors import InputError, MismatchError
from refitd.layout import Box, Layout
from refitd.layout.tp import dense
from refitd.plan import Held, Plan, Rank, make_plan, reshard

W = distinct({"w": (16, 8)})
ALL = Box((0, 0), (16, 8))
KiB = 1024


def rows(lo: int, hi: int) -> Layout:
    return simple(W, {"w": [Box((lo, 0), (hi, 8))]})


def whole() -> Layout:
    return simple(W, {"w": [ALL]})


def links(plan: Plan) -> dict[str, int]:
    return {link: plan.totals[f"{link}_bytes"] for link in ("network", "peer", "local")}


def test_each_byte_enters_a_domain_once() -> None:
    """Three replicas in one node bring the tensor in once and spread it by peer reads in stage 1."""
    plan = make_plan(ranks("trainer/s", [rows(0, 8), rows(8, 16)], ["a", "b"]), ranks("engine/d", [whole()] * 3, "xxx"))
    assert links(plan) == {"network": 512, "peer": 1024, "local": 0}
    assert plan.totals["network_bytes_min"] == 512
    assert {(b.link, b.stage) for b in plan.buckets} == {("network", 0), ("peer", 1)}


def test_two_domains_each_bring_the_bytes_in() -> None:
    """The minimum counts the unique bytes of every domain."""
    plan = make_plan(ranks("trainer/s", [whole()], ["a"]), ranks("engine/d", [whole()] * 4, "xxyy"))
    assert links(plan) == {"network": 1024, "peer": 1024, "local": 0}
    assert plan.totals["network_bytes_min"] == 1024


def test_replicas_cut_differently_share_their_common_refinement() -> None:
    """A row-cut and a column-cut replica in one node need one copy of the union between them."""
    halves = [rows(0, 8), simple(W, {"w": [Box((0, 0), (16, 4))]})]
    plan = make_plan(ranks("trainer/s", [whole()], ["a"]), ranks("engine/d", halves, "xx"))
    assert plan.totals["network_bytes"] == plan.totals["network_bytes_min"] == (64 + 64 - 32) * 4
    assert plan.totals["peer_bytes"] == 32 * 4


def test_a_source_in_the_node_is_read_by_peer_in_stage_0() -> None:
    """What a source of the same node holds never crosses the network."""
    sources = ranks("trainer/s", [rows(0, 8), rows(8, 16)], ["x", "b"])
    plan = make_plan(sources, ranks("engine/d", [whole()] * 2, "xx"))
    assert links(plan) == {"network": 256, "peer": 512 + 256, "local": 0}
    near = [b for b in plan.buckets if b.src == "trainer/s/0"]
    assert {(b.link, b.stage) for b in near} == {("peer", 0)}
    assert plan.totals["network_bytes_min"] == 256


def test_a_neighbour_lane_is_read_instead_of_the_network() -> None:
    """A neighbour in the node serves stage 1; one elsewhere is not used."""
    sources, members = ranks("trainer/s", [whole()], ["a"]), ranks("engine/d", [whole()], "x")
    near = make_plan(sources, members, neighbours=ranks("engine/n", [rows(0, 12)], "x"))
    assert links(near) == {"network": 128, "peer": 384, "local": 0}
    assert [(b.src, b.stage) for b in near.buckets if b.link == "peer"] == [("engine/n/0", 1)]
    far = make_plan(sources, members, neighbours=ranks("engine/n", [rows(0, 12)], "y"))
    assert links(far) == {"network": 512, "peer": 0, "local": 0}


def test_a_mate_that_holds_a_region_serves_it() -> None:
    """In a remainder, what one member verified is passed on by peer reads and counts as held by the domain."""
    held = {"engine/d/0": Held({"w": [Box((0, 0), (4, 8))]})}
    plan = make_plan(ranks("trainer/s", [whole()], ["a"]), ranks("engine/d", [whole()] * 2, "xx"), held=held)
    assert links(plan) == {"network": 384, "peer": 128 + 384, "local": 0}
    assert plan.totals["network_bytes_min"] == 384


def test_other_dtypes_do_not_pass_on_bytes() -> None:
    """A bfloat16 rank never serves a float32 one: each dtype enters for itself."""
    members = [whole(), simple(W, {"w": [ALL]}, "bfloat16")]
    plan = make_plan(ranks("trainer/s", [whole()], ["a"]), ranks("engine/d", members, "xx"))
    assert links(plan) == {"network": 512 + 256, "peer": 0, "local": 0}


def test_all_holders_and_entries_share_the_load() -> None:
    """Four full holders and four needers on one node: each sends and brings in a quarter."""
    big = {"w": (1024, 256)}
    layout = simple(distinct(big), {"w": [Box((0, 0), (1024, 256))]})
    plan = make_plan(ranks("trainer/s", [layout] * 4, "abcd"), ranks("engine/d", [layout] * 4, "xxxx"))
    network = [b for b in plan.buckets if b.link == "network"]
    for end in ("src", "dst"):
        load: dict[str, int] = {}
        for bucket in network:
            load[getattr(bucket, end)] = load.get(getattr(bucket, end), 0) + bucket.nbytes
        assert sorted(load.values()) == [256 * KiB] * 4


def test_buckets_honour_their_limit_and_follow_destination_addresses() -> None:
    """No bucket is larger than asked, even where one row is; receives of an edge come in address order."""
    shape = {"w": (3, 1000)}
    layout = simple(distinct(shape), {"w": [Box((0, 0), (3, 1000))]})
    sources, members = ranks("trainer/s", [layout], ["a"]), ranks("engine/d", [layout], "x")
    plan = make_plan(sources, members, bucket_bytes=256)
    program = plan.program("engine/d/0")
    assert max(b.nbytes for b in program.buckets) <= 256
    assert sum(b.nbytes for b in program.buckets) == 12000
    addresses = [int(program.moves_of(b)[0, 5]) for b in program.receives()]
    assert addresses == sorted(addresses)


def test_small_moves_of_an_edge_share_a_bucket() -> None:
    """A hundred vectors between two ranks travel in one bucket; contiguous regions are one move each."""
    model = distinct({f"v{i:02d}": (4, 4) for i in range(100)})
    layout = simple(model, {name: [Box((0, 0), (4, 4))] for name in model})
    plan = make_plan(ranks("trainer/s", [layout], ["a"]), ranks("engine/d", [layout], "x"))
    assert [b.nbytes for b in plan.buckets] == [6400]
    assert plan.program("engine/d/0").moves[:, 8:].tolist() == [[1, 16]] * 100


def test_a_name_tied_at_the_source_enters_once_for_two_copies_at_the_destination() -> None:
    """An engine with its own copy of a tied head gets it by a local copy of what arrived for the embedding."""
    facts = {"embed": ((4, 2), "float32")}
    source = Layout.from_pieces(
        facts, {"e": (8, "float32")}, [dense("embed", Box((0, 0), (4, 2)), "e")], tied={"head": "embed"}
    )
    both = {**facts, "head": ((4, 2), "float32")}
    box = Box((0, 0), (4, 2))
    target = Layout.from_pieces(
        both, {"e": (8, "float32"), "h": (8, "float32")}, [dense("embed", box, "e"), dense("head", box, "h")]
    )
    plan = make_plan(ranks("trainer/s", [source], ["a"]), ranks("engine/d", [target], "x"))
    assert links(plan) == {"network": 32, "peer": 0, "local": 32}
    assert [(b.src, b.stage) for b in plan.buckets if b.link == "local"] == [("engine/d/0", 1)]
    values = distinct({"embed": (4, 2)})
    (out,) = reshard([source], [target], [fill(source, values)])
    assert bits(out["e"]) == bits(out["h"]) == bits(values["embed"])


def test_held_names_what_its_buckets_brought() -> None:
    """Buckets of another rank, or unknown ones, are refused; the own ones give their boxes."""
    plan = make_plan(ranks("trainer/s", [whole()], ["a"]), ranks("engine/d", [rows(0, 8), rows(8, 16)], "xy"))
    own = [b.id for b in plan.buckets if b.dst == "engine/d/0"]
    other = [b.id for b in plan.buckets if b.dst == "engine/d/1"]
    assert plan.held("engine/d/0", own).boxes == {"w": (Box((0, 0), (8, 8)),)}
    for wrong in (other, [99], [-1]):
        with pytest.raises(InputError, match="buckets that engine/d/0 receives"):
            plan.held("engine/d/0", wrong)
    with pytest.raises(InputError, match="a rank of this plan"):
        plan.program("engine/d/7")


def test_bad_inputs_are_named() -> None:
    """A key used twice, a bucket size that is no size, and sides that differ are typed errors."""
    one = ranks("trainer/s", [whole()], ["a"])
    with pytest.raises(InputError, match="each rank once, got trainer/s/0"):
        make_plan(one, one)
    with pytest.raises(InputError, match="bucket_bytes"):
        make_plan(one, ranks("engine/d", [whole()], "x"), bucket_bytes=4)
    with pytest.raises(MismatchError, match="tensor v: expected a source that has it"):
        make_plan(one, ranks("engine/d", [simple(distinct({"v": (2,)}), {"v": [Box((0,), (2,))]})], "x"))


def test_order_of_arguments_does_not_matter() -> None:
    """The digest is the same whatever order ranks are handed over in."""
    sources, members = ranks("trainer/s", [rows(0, 8), rows(8, 16)], "ab"), ranks("engine/d", [whole()] * 3, "xxy")
    assert make_plan(sources, members).digest == make_plan(sources[::-1], members[::-1]).digest


def test_the_digest_tells_plans_apart() -> None:
    """Another bucket size, member or node gives another digest."""
    sources, members = ranks("trainer/s", [whole()], "a"), ranks("engine/d", [whole()] * 2, "xy")
    plans = [
        make_plan(sources, members),
        make_plan(sources, members, bucket_bytes=64),
        make_plan(sources, members[:1]),
        make_plan(sources, [members[0], Rank("engine/d/1", "x", "x", whole())]),
    ]
    assert len({plan.digest for plan in plans}) == 4


SCRIPT = """
from refitd.layout import Box, Layout
from refitd.layout.tp import column_parallel, dense, row_parallel
from refitd.plan import Rank, make_plan
shapes = {f"t{i}": ((16, 8 + i), "float32") for i in range(5)}
def layout(cut, rank, world):
    boxes = {t: cut(shape, rank, world) for t, (shape, _) in shapes.items()}
    storages = {t: (box.volume, "float32") for t, box in boxes.items()}
    return Layout.from_pieces(shapes, storages, [dense(t, box, t) for t, box in boxes.items()])
def side(prefix, cut, nodes):
    return [Rank(f"{prefix}/{r}", node, node, layout(cut, r, len(nodes))) for r, node in enumerate(nodes)]
print(make_plan(side("trainer/s", column_parallel, "abcd"), side("engine/d", row_parallel, "xxyy")).digest)
"""


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    """Three interpreters with different hash seeds compute one digest."""
    seen = set()
    for seed in ("0", "1", "31337"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        seen.add(done.stdout)
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 32


def test_fp32_masters_arrive_as_bfloat16_bits() -> None:
    """A cast refit through two nodes is bit-equal to torch's cast."""
    whole_w = {"w": W["w"] * 1.000123}
    (out,) = reshard([rows(0, 8), rows(8, 16)], [simple(W, {"w": [ALL]}, "bfloat16")],
                     [fill(rows(0, 8), whole_w), fill(rows(8, 16), whole_w)])  # fmt: skip
    assert bits(out["w.0"]) == bits(cast_whole(whole_w, "bfloat16")["w"])
