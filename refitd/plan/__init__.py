"""Who sends what to whom: plans, programs, proofs, and how a bucket is packed. Pure."""

from refitd.plan.execute import array_dtype, copy, flat_array, pack, unpack
from refitd.plan.held import Held
from refitd.plan.planner import BUCKET_BYTES, Plan, make_plan
from refitd.plan.program import LOCAL, MOVE_COLUMNS, NETWORK, PEER, Bucket, Program, StorageRef
from refitd.plan.reshard import reshard
from refitd.plan.tables import Rank

__all__ = [
    "BUCKET_BYTES",
    "LOCAL",
    "MOVE_COLUMNS",
    "NETWORK",
    "PEER",
    "Bucket",
    "Held",
    "Plan",
    "Program",
    "Rank",
    "StorageRef",
    "array_dtype",
    "copy",
    "flat_array",
    "make_plan",
    "pack",
    "reshard",
    "unpack",
]
