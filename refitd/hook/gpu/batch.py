"""Many copies on a device as one batch, on a stream of its own: the switch to a shadow."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from refitd.errors import DeviceError

Pair = tuple[Any, Any]  # destination and source: dense uint8 tensors of one length
LARGE = 1 << 20  # bytes from which on a copy of its own is at the device's rate


class Batch:
    """Copies ``pairs`` as often as they are wanted, as long as their memory stays where it is.

    ``large``: bytes from which on a pair goes by the device's own copy; shorter ones share launches.
    """

    def __init__(self, pairs: Sequence[Pair], large: int = LARGE) -> None:
        pairs = [pair for pair in pairs if pair[0].numel()]
        self._single = [pair for pair in pairs if pair[0].numel() >= large]
        self._shared = list(_by_width(pair for pair in pairs if pair[0].numel() < large))
        self._device = next((pair[0].device for pair in pairs if pair[0].is_cuda), None)
        self._stream: Any = None if self._device is None else _torch().cuda.Stream(self._device)

    def run(self) -> None:
        """Copy, and return when all is done. What was begun on the device before, on any stream, is done first.

        Raises DeviceError.
        """
        if self._device is None:
            self._start()
            return
        cuda = _torch().cuda
        try:
            cuda.synchronize(self._device)  # a stream that still reads the old weights
            with cuda.stream(self._stream):
                self._start()
            self._stream.synchronize()
        except RuntimeError as error:
            raise DeviceError("copy on the device", str(error).splitlines()[0]) from error

    def _start(self) -> None:
        for target, source in self._single:
            target.copy_(source, non_blocking=True)
        for targets, sources in self._shared:
            _torch()._foreach_copy_(targets, sources)


def _by_width(pairs: Iterator[Pair]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Targets and sources of each group that can be copied in the same words: the widest that all addresses allow."""
    torch = _torch()
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    groups: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        mixed = pair[0].numel() | pair[0].data_ptr() | pair[1].data_ptr()
        groups[min(mixed & -mixed, 8)].append(pair)
    for width, found in groups.items():
        yield [pair[0].view(words[width]) for pair in found], [pair[1].view(words[width]) for pair in found]


def _torch() -> Any:
    return sys.modules["torch"]
