"""One rank of a gloo group that shards a module with the installed torch's FSDP1 and writes down what it holds.

``python fsdp1_worker.py RANK WORLD STORE OUT``: for every setting and for the groups of one rank and of all, the
shard's values and the parts that torch says the buffer is made of, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

CPU = torch.device("cpu")
SETTINGS = {
    "fp32": (torch.float32, None),
    "bf16 mixed": (torch.float32, torch.bfloat16),
    "fp64": (torch.float64, None),
    "fp64 in fp32": (torch.float64, torch.float32),
}


class Inner(nn.Module):
    """A child whose parameters come after its parent's own ones, though it was registered before them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.empty(5, 7, dtype=dtype))
        self.d = nn.Parameter(torch.empty(2, dtype=dtype))
        self.e = nn.Parameter(torch.empty(3, 3, 3, dtype=dtype))


class Odd(nn.Module):
    """Parameters of 3, 1020, 35, 2 and 27 elements, numbered from 1 on through all of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = Inner(dtype)
        self.a = nn.Parameter(torch.empty(3, dtype=dtype))
        self.b = nn.Parameter(torch.empty(1020, dtype=dtype))
        first = 1
        for parameter in self.parameters():
            last = first + parameter.numel()
            parameter.data.copy_(torch.arange(first, last).reshape(parameter.shape))
            first = last


def held(setting: str, group: dist.ProcessGroup, use_orig_params: bool) -> dict[str, object]:
    """What this rank has of the module."""
    dtype, compute = SETTINGS[setting]
    module = Odd(dtype)
    shapes = [(name, list(parameter.shape)) for name, parameter in module.named_parameters()]
    mixed = MixedPrecision(param_dtype=compute) if compute else None
    unit = FullyShardedDataParallel(
        module, process_group=group, mixed_precision=mixed, use_orig_params=use_orig_params, device_id=CPU
    )
    flat = unit._handle.flat_param
    shard = flat.detach()
    return {
        "setting": setting, "use_orig_params": use_orig_params, "world": group.size(), "shapes": shapes,
        "dtype": str(shard.dtype).removeprefix("torch."), "numels": list(flat._numels_with_padding),
        "values": shard.flatten().tolist(),
    }  # fmt: skip


def main(rank: int, world: int, store: str, out: str) -> None:
    """Everything that the test asks of a rank."""
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    alone = [dist.new_group([r]) for r in range(world)][rank]
    groups = (alone, dist.group.WORLD)
    found = [held(s, group, orig) for group in groups for s in SETTINGS for orig in (False, True)]
    with open(out, "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    sys.stdout.flush()
    # gloo's threads may outlive Python's own end and abort it; there is nothing left to do here.
    os._exit(0)
