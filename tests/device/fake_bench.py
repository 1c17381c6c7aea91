"""``refitd bench`` where CUDA tensors are made of the fake GPU's memory."""

import contextlib
import sys
import time
from math import prod

import fake_gpu
import torch

from refitd.bench import clients, main, models, mover, on_device, pause, tenant
from refitd.bench.cards import card
from refitd.mover.device import bytes_at


def device_empty(shape, dtype):
    nbytes = prod(shape) * dtype.itemsize
    return bytes_at(fake_gpu.allocate(nbytes), nbytes, "cpu").view(dtype).reshape(shape)


class Copier(on_device.Copier):
    def move(self, step):
        return 2000.0


def use(number):
    fake_gpu.use(card.real(number))
    return torch.device("cpu")


class Tenant(tenant.Tenant):
    """Full when it says so; multiplies on the processor; a mover takes a little of it."""

    SIZE = 1 << 40

    def free(self, _step=0):
        return float(self.SIZE - fake_gpu.used())

    def used(self, _pid):
        return 0.0

    def fill(self, leave):
        if not leave:
            fake_gpu.full().touch()
        return 0.0

    def drop(self, _step=0):
        fake_gpu.full().unlink(missing_ok=True)

    def products(self, milliseconds):
        done, began = 0, time.monotonic()
        while time.monotonic() < began + milliseconds / 1e3:
            time.sleep(0.001)
            done += 1
        return done / 1e3


models.LARGE = {"1GiB": (2, 64)}
pause.COPY_BYTES, pause.LAYERS = {"cuda": 1 << 20}, {"cuda": 0}
clients.device_empty, clients._settle, clients._streams = device_empty, lambda device: None, lambda device: ()
tenant.Tenant, mover.WINDOW_MS, mover.WINDOWS, mover.REFITS = Tenant, 20, 2, 2
on_device.Copier, on_device.facts = Copier, lambda: {"card": "none"}
card.BACKEND, card.use, card.settle, card.flush = "gloo", use, lambda *cards: None, lambda: None
card.aside = lambda *cards: contextlib.nullcontext()
card.lent = lambda numel, where: device_empty((numel,), torch.bfloat16)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
