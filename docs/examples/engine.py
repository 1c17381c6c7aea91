"""An engine: python engine.py [replica [last step]], or torchrun --nproc-per-node 2 engine.py … for tensor parallelism.

Holds the model as bfloat16, the first layer cut by rows and the second by columns, and "serves" its checksum.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import toy

import refitd
from refitd.hook.messages import Ticket
from refitd.layout import tp

replica, last = (sys.argv[1:] + ["r0", "1000000000"][len(sys.argv) - 1 :])[:2]
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")

# The geometry, in the trainer's names and global shapes. Storages are the engine's own.
up, down = (toy.INNER, toy.WIDTH), (toy.WIDTH, toy.INNER)
boxes = {"0.weight": tp.column_parallel(up, rank, world), "2.weight": tp.row_parallel(down, rank, world)}
layout = refitd.Layout.from_pieces(
    tensors={"0.weight": (up, "bfloat16"), "2.weight": (down, "bfloat16")},
    storages={name: (box.volume, "bfloat16") for name, box in boxes.items()},
    pieces=[tp.dense(name, box, name) for name, box in boxes.items()],
)
# shared_empty: memory that a mover writes in place. Any other tensor works too, at the price of a copy.
weights = {name: refitd.shared_empty(box.shape, torch.bfloat16) for name, box in boxes.items()}

engine = refitd.connect_engine(job="quickstart", replica=replica, rank=rank, world_size=world)
engine.register(layout, mode="in_place")


def to_all(value: object) -> object:
    """What rank 0 has, on every rank: an engine's own control plane does this."""
    box = [value]
    if world > 1:
        dist.broadcast_object_list(box)
    return box[0]


def serve() -> float:
    """A step of the engine."""
    total = torch.tensor([toy.checksum(weights.values())], dtype=torch.float64)
    if world > 1:
        dist.all_reduce(total)
    return float(total)


step = -1
while step < int(last):
    pending = engine.pending()  # every rank, between two steps: it stays in touch; the replica's lead may get a ticket
    ticket = to_all(pending.to_json() if pending else None)
    if ticket:
        try:
            engine.receive(Ticket.from_json(ticket), weights)  # every rank, paused; returns when all is committed
        except refitd.ReceiveFailed as error:
            print(f"{replica} rank {rank} stays out of service: {error}", flush=True)  # and is asked again
    if not engine.dirty and engine.step is not None and engine.step != step:
        step, total = engine.step, serve()
        if rank == 0:
            print(f"{replica} serves step {step}, checksum {total!r}", flush=True)
    time.sleep(0.02)
engine.close()
if world > 1:
    toy.leave()  # not with nccl
