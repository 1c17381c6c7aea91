"""Who sends what to whom: plans, programs, proofs, and how a bucket is packed. Pure."""

from refitd.plan.base import Plan
from refitd.plan.covered import covered
from refitd.plan.execute import array_dtype, copy, flat_array, pack, unpack
from refitd.plan.held import Held
from refitd.plan.lose import lose
from refitd.plan.planner import BUCKET_BYTES, make_plan
from refitd.plan.program import FABRIC, LOCAL, MOVE_COLUMNS, NETWORK, PEER, Bucket, Program, StorageRef
from refitd.plan.reshard import reshard
from refitd.plan.side_plan import SidePlan
from refitd.plan.sides import SIDE_BUCKET_BYTES, plan_sides
from refitd.plan.tables import Rank
from refitd.plan.topology import TOPOLOGIES, Topology, topology

__all__ = [
    "BUCKET_BYTES",
    "FABRIC",
    "LOCAL",
    "MOVE_COLUMNS",
    "NETWORK",
    "PEER",
    "SIDE_BUCKET_BYTES",
    "TOPOLOGIES",
    "Bucket",
    "Held",
    "Plan",
    "Program",
    "Rank",
    "SidePlan",
    "StorageRef",
    "Topology",
    "array_dtype",
    "copy",
    "covered",
    "flat_array",
    "lose",
    "make_plan",
    "pack",
    "plan_sides",
    "reshard",
    "topology",
    "unpack",
]
