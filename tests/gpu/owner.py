"""A process that owns device memory and lends it: commands and answers as JSON over a socket, descriptors beside them.

usage: owner.py SOCKET-FD (inherited)
"""

from __future__ import annotations

import json
import socket
import sys

import torch

from refitd.hook.gpu.driver import Driver
from refitd.hook.gpu.export import Extent, export, probe

sock = socket.socket(fileno=int(sys.argv[1]))
driver = None
tensors: dict[str, torch.Tensor] = {}


def answer(value, fds=()):
    socket.send_fds(sock, [json.dumps(value).encode()], list(fds))


while data := sock.recv(1 << 20):
    command = json.loads(data)
    kind = command.pop("kind")
    if kind == "make":
        made = torch.zeros(command["before"] + command["numel"], dtype=torch.int32, device="cuda")
        tensors[command["name"]] = made[command["before"] :]
        tensors[command["name"]].copy_(
            torch.arange(command["numel"], device="cuda", dtype=torch.int32) + command["first"]
        )
        torch.cuda.synchronize()
        driver = driver or Driver(0)
        answer(tensors[command["name"]].data_ptr())
    elif kind == "drop":
        tensors.clear()
        torch.cuda.empty_cache()
        answer(torch.cuda.memory_reserved())
    elif kind == "probe":
        answer(list(probe(driver, next(iter(tensors.values())).data_ptr())))
    elif kind == "export":
        made = export(driver, {n: Extent(t.data_ptr(), t.nbytes) for n, t in tensors.items()})
        answer([made.message, made.refused], made.fds)
        made.close()
    elif kind == "add":
        for tensor in tensors.values():
            tensor.add_(command["value"])
        torch.cuda.synchronize()
        answer(None)
    elif kind == "sum":
        answer({name: int(tensor.sum(dtype=torch.int64)) for name, tensor in tensors.items()})
