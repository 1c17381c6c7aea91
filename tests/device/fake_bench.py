"""``refitd bench`` where CUDA tensors are made of the fake GPU's memory."""

import sys
from math import prod

import fake_gpu
import torch

from refitd.bench import clients, main, models, on_device
from refitd.bench.cards import card
from refitd.mover.device import bytes_at


def device_empty(shape, dtype):
    nbytes = prod(shape) * dtype.itemsize
    return bytes_at(fake_gpu.allocate(nbytes), nbytes, "cpu").view(dtype).reshape(shape)


class Copier(on_device.Copier):
    def move(self, step):
        return 2000.0


def use(number):
    fake_gpu.use(number)
    return torch.device("cpu")


models.LARGE = {"1GiB": (2, 64)}
clients.device_empty, clients._settle = device_empty, lambda device: None
on_device.Copier, on_device.facts = Copier, lambda: {"card": "none"}
card.BACKEND, card.use, card.settle, card.flush = "gloo", use, lambda *cards: None, lambda: None
card.lent = lambda numel, where: device_empty((numel,), torch.bfloat16)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
