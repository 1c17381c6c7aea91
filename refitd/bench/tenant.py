"""A process beside a contest that looks at its GPU, fills it, or keeps it busy, as another tenant would."""

from __future__ import annotations

import time

import torch

from refitd.hook.gpu.driver import Driver

GRAIN = 2 << 20  # bytes: what the driver gives out at least
SIZE = 8192  # rows and columns of the matrices
BATCH = 10  # products between two looks at the clock: some 16 ms on an H200


class Tenant:
    """Made in a process of its own; every method is asked for by its name (see `Process`)."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._matrices: tuple[torch.Tensor, ...] = ()

    def free(self, _step: int = 0) -> float:
        """Bytes that nobody uses."""
        return float(torch.cuda.mem_get_info()[0])

    def used(self, pid: int) -> float:
        """Bytes that a process uses, by NVML; 0 where it does not say (in a container it may not know our pids)."""
        import pynvml

        try:
            pynvml.nvmlInit()
            found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(Driver(0).uuid()))
        except pynvml.NVMLError:
            return 0.0
        return float(sum(one.usedGpuMemory or 0 for one in found if one.pid == pid))

    def fill(self, leave: int) -> float:
        """Take memory until at most ``leave`` MiB are free; bytes that are left."""
        from cuda.bindings import driver

        piece = 64 << 30
        while piece >= GRAIN:
            room = int(self.free()) - (leave << 20)
            status, address = driver.cuMemAlloc(piece) if room >= piece else (None, 0)
            if status is not None and status.value == 0:
                self._held.append(int(address))
            else:
                piece //= 2
        return self.free()

    def drop(self, _step: int = 0) -> None:
        """Give back what was taken."""
        from cuda.bindings import driver

        while self._held:
            driver.cuMemFree(self._held.pop())

    def products(self, milliseconds: int) -> float:
        """TFLOP/s of bf16 matrix products, one after the other, for so long."""
        if not self._matrices:
            self._matrices = tuple(torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        a, b, out = self._matrices
        done, began = 0, time.monotonic()
        while time.monotonic() < began + milliseconds / 1e3:
            for _ in range(BATCH):
                torch.mm(a, b, out=out)
            torch.cuda.synchronize()
            done += BATCH
        return done * 2 * SIZE**3 / (time.monotonic() - began) / 1e12

    def close(self) -> None:
        """Memory goes with the process."""
