"""Start what Triton has compiled, and wait for it, by one call of CUDA's driver each.

Triton's own launcher asks the driver about every pointer, and torch's events look up device and stream: some ten
microseconds each, and several times that in a thread that has slept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

Start = Callable[[int], None]  # on a stream, by its handle
_WARP = 32


def start_of(compiled: Any, grid: int, arguments: Sequence[Any]) -> Start:
    """Starts ``compiled``, a kernel of Triton's, again as it was called before.

    ``arguments``: of the kernel, tensors and constants; of the tensors, which stay where they are, their addresses
    are taken now. A grid of nothing starts nothing.
    """
    if not grid:
        return _nothing
    if not _is_plain(compiled):
        return lambda stream: compiled[grid, 1, 1](*arguments, stream=stream)
    return _Direct(compiled, grid, [one.data_ptr() for one in arguments if hasattr(one, "data_ptr")])


def current_stream(ordinal: int) -> int:
    """Torch's current stream of that device, as the driver knows it."""
    import torch

    return int(torch._C._cuda_getCurrentRawStream(ordinal))  # what Triton asks; the rest of torch builds an object


class Event:
    """What was started on a stream before `record`; one for all of a launch's runs."""

    def __init__(self) -> None:
        import torch

        event: Any = torch.cuda.Event
        self._event = event()
        self._event.record()  # it has no handle before
        self._handle = ctypes.c_void_p(self._event.cuda_event)

    def record(self, stream: int) -> None:
        """Raises RuntimeError, as torch does, with the driver's word."""
        _check(_cuda().cuEventRecord(self._handle, stream), "cuEventRecord")

    def wait(self) -> None:
        """Until all of it is done. Raises RuntimeError where it failed."""
        _check(_cuda().cuEventSynchronize(self._handle), "cuEventSynchronize")


class _Direct:
    """A kernel's function with its arguments in place."""

    def __init__(self, compiled: Any, grid: int, addresses: Sequence[int]) -> None:
        """Triton's kernels take their pointers in order, and then two more, for scratch that ours do not have."""
        values = [ctypes.c_uint64(address) for address in (*addresses, 0, 0)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._kept = compiled, values, pointers
        block, shared = _WARP * compiled.metadata.num_warps, compiled.metadata.shared
        self._before = [ctypes.c_void_p(compiled.function), *map(ctypes.c_uint, (grid, 1, 1, block, 1, 1, shared))]
        self._after = pointers

    def __call__(self, stream: int) -> None:
        _check(_cuda().cuLaunchKernel(*self._before, stream, self._after, None), "cuLaunchKernel")


def _nothing(_stream: int) -> None:
    """A launch of no tiles."""


def _is_plain(compiled: Any) -> bool:
    """Whether it is started by function, grid and pointers alone."""
    said = compiled.metadata
    special = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    return getattr(said, "num_ctas", 1) == 1 and not any(getattr(said, name, 0) for name in special)


@cache
def _cuda() -> Any:
    """The driver, which torch has loaded already."""
    library = ctypes.CDLL("libcuda.so.1")
    handle, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [handle, *[number] * 7, handle, handle, handle]
    library.cuEventRecord.argtypes = [handle, handle]
    library.cuEventSynchronize.argtypes = [handle]
    return library


def _check(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or b'unknown error').decode()} ({call}, {status})")
