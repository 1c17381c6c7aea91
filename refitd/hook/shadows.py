"""The memory of ``host_shadow`` and ``device_shadow``: lent with ``register``, copied into the live weights later."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from refitd.errors import DeviceError, InputError
from refitd.hook.blocks import Block, Storages, blocks_of
from refitd.hook.gpu.batch import Batch
from refitd.hook.memory import SharedArena, Staging
from refitd.hook.shadow import shadow_offsets

log = logging.getLogger("refitd.hook")
Lent = tuple[Mapping[str, Any], Sequence[int]]


class HostShadow:
    """An arena in host memory; the other end finds the storages in it by `shadow_offsets`."""

    def __init__(self, storages: Storages) -> None:
        self._places, total = shadow_offsets(storages)
        self._arena = SharedArena(total)

    @contextlib.contextmanager
    def lend(self) -> Iterator[Lent]:
        yield {}, [self._arena.fd]

    def load(self, blocks: Mapping[str, Block]) -> None:
        """Copy into ``blocks``, by storage name."""
        for name, block in blocks.items():
            offset, nbytes = self._places[name]
            block.load(self._arena.bytes[offset : offset + nbytes])

    def drop(self) -> None:
        """Host memory is not in anybody's way."""


class DeviceShadow:
    """One block of the GPU that the process works on; of host memory where it has none, or cannot share it."""

    def __init__(self, storages: Storages, budget: int | None) -> None:
        """``budget``: the most bytes that it may take. Raises InputError, DeviceError where there is no memory left."""
        places, total = shadow_offsets(storages)
        if budget is None or budget < total:
            raise InputError("budget", f"at least {total} bytes of device memory", str(budget))
        self._storages, self._places, self._staging = storages, places, Staging()
        self._batch: tuple[object, Batch] | None = None
        self._flat: Any = device_empty(total)
        self._on_device = True
        if self._flat is None or not self._is_shared():
            log.warning("the shadow is in host memory: there is no GPU memory here that a mover could write")
            self._flat, self._on_device = SharedArena(total).empty((total,), "uint8"), False

    def _is_shared(self) -> bool:
        export = self._staging.export(self._blocks())
        export.close()
        return export.device is not None

    def _tensors(self) -> dict[str, Any]:
        return {name: self._flat[start : start + nbytes] for name, (start, nbytes) in self._places.items()}

    def _blocks(self) -> dict[str, Block]:
        return blocks_of(self._tensors(), {name: (nbytes, "uint8") for name, (_start, nbytes) in self._places.items()})

    @contextlib.contextmanager
    def lend(self) -> Iterator[Lent]:
        """Its blocks and their descriptors; nothing once it was dropped."""
        if self._flat is None:
            yield {}, ()
            return
        with self._staging.registered(self._blocks()) as lent:
            yield lent

    def load(self, blocks: Mapping[str, Block]) -> None:
        """Copy into ``blocks``, by storage name, as one batch. Raises DeviceError."""
        where = tuple((name, _address(block)) for name, block in blocks.items())
        if self._batch is None or self._batch[0] != where:
            sources = self._tensors()
            self._batch = where, Batch([(_tensor(block), sources[name]) for name, block in blocks.items()])
        self._batch[1].run()

    def drop(self) -> None:
        """Free the GPU's memory; no mover has it mapped any more."""
        if self._on_device:
            self._batch = self._flat = None


def device_empty(nbytes: int) -> Any:
    """uint8 on torch's current CUDA device; None where this process has no CUDA. Raises InputError, DeviceError."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise InputError("mode", "host_shadow or in_place where torch is not loaded", "device_shadow")
    if not torch.cuda.is_available():
        return None
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        raise DeviceError(f"allocate a shadow of {nbytes} bytes", str(error).splitlines()[0]) from error


def _address(block: Block) -> int:
    return block.address if isinstance(block.held, np.ndarray) else int(block.held.data_ptr())


def _tensor(block: Block) -> Any:
    return sys.modules["torch"].as_tensor(block.flat)
