"""The same with FSDP2: torchrun --nproc-per-node 2 train_fsdp2.py [steps]. Every rank publishes its own shards."""

import os
import sys

import torch
import torch.distributed as dist
import toy
from torch.distributed.fsdp import fully_shard

import refitd

dist.init_process_group("gloo")  # on GPUs: nccl
rank, world = dist.get_rank(), dist.get_world_size()
network = toy.model()
for layer in (network[0], network[2], network):
    fully_shard(layer, mesh=dist.init_device_mesh("cpu", (world,)))  # on GPUs: cuda
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
weights = network.state_dict(keep_vars=True)  # DTensors: nothing is gathered

# One id for all ranks of this launch; a new launch (from a checkpoint, say) is a new run.
run = os.environ["TORCHELASTIC_RUN_ID"] + "-" + os.environ["MASTER_PORT"]
trainer = refitd.connect_trainer(job="quickstart", run=run, rank=rank, world_size=world)
trainer.register(refitd.Layout.from_module(network))  # DTensors say which part of each tensor this rank has


def publish(step: int) -> list[str]:
    """Offer this rank's shards; the replicas that have them all, as rank 0 was told."""
    offer = trainer.publish(step, weights)
    offer.released(timeout=30)
    told = [offer.committed(timeout=60).committed]
    dist.broadcast_object_list(told)  # also where refitd has no report: ranks that branch must agree
    return told[0]


while not publish(0):
    dist.barrier()
for step in range(1, int(sys.argv[1]) + 1 if len(sys.argv) > 1 else 6):
    optimizer.zero_grad()
    toy.loss(network).backward()
    optimizer.step()
    replicas = publish(step)
    total = toy.checksum(weight.full_tensor() for weight in weights.values())  # for show only: this gathers
    if rank == 0:
        print(f"step {step} is with {replicas}, checksum {total!r}", flush=True)
trainer.close()
dist.destroy_process_group()
toy.leave()  # not with nccl
