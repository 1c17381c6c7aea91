"""NVLink's own counters, by NVML: what went over the links of each card, whoever sent it."""

from __future__ import annotations

import os
from typing import Any

ALL_LINKS = 0xFFFFFFFF
_UNIT = 1024  # the counters are in KiB


class Links:
    """Payload bytes of the first ``cards`` cards that this process may see. ``why``: why nothing is counted, or empty.

    NVML touches no CUDA: a process that forks may use it.
    """

    def __init__(self, cards: int, nvml: Any = None) -> None:
        self.why = ""
        self.between: list[tuple[int, int]] = []  # sent and received from `begin` to `end`, by card
        self._before: list[tuple[int, int]] = []
        self._handles: list[Any] = []
        try:
            self._nvml = nvml or _nvml()
            self._nvml.nvmlInit()
            self._handles = [self._handle(number) for number in range(cards)]
            self.read()
        except Exception as error:  # noqa: BLE001  NVML's errors, and no NVML at all, are a fact to be told
            self.why = f"{type(error).__name__}: {error}"

    def read(self) -> list[tuple[int, int]]:
        """(sent, received) bytes of each card since some time ago; nothing where NVML does not count."""
        return [] if self.why else [self._of(handle) for handle in self._handles]

    def facts(self) -> dict[str, Any]:
        """What the cards are, and the driver's version; nothing where there is no NVML."""
        if not self._handles:
            return {}
        names = [str(self._nvml.nvmlDeviceGetName(handle)) for handle in self._handles]
        return {"cards": names, "driver": str(self._nvml.nvmlSystemGetDriverVersion())}

    def begin(self) -> None:
        """From here on."""
        self._before = self.read()

    def end(self) -> None:
        """Up to here: `between`."""
        self.between = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self._before, self.read(), strict=True)]

    def _of(self, handle: Any) -> tuple[int, int]:
        wanted = [
            (self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
            (self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
        ]
        values = self._nvml.nvmlDeviceGetFieldValues(handle, wanted)
        for value in values:
            if value.nvmlReturn:
                raise OSError(f"NVML field {value.fieldId}: error {value.nvmlReturn}")
        sent, received = (int(value.value.ullVal) * _UNIT for value in values)
        return sent, received

    def _handle(self, number: int) -> Any:
        seen = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        name = seen[number] if seen else str(number)
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)


def count() -> int:
    """Cards that this process may see; 0 where there is no NVML."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None:
        return len([word for word in seen.split(",") if word])
    try:
        nvml = _nvml()
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetCount())
    except Exception:  # noqa: BLE001  no NVML, no driver: no cards
        return 0


def _nvml() -> Any:
    import pynvml

    return pynvml
