"""Something like the module ``pynvml``, with cards that come, go and fall off the bus."""

# ruff: noqa: N802  the names are NVML's

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    def __init__(self, value, text):
        super().__init__(text)
        self.value = value


class FakeNvml:
    """``cards`` are dictionaries; ``driver`` False stands for a driver that is not loaded."""

    NVMLError = NVMLError
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND = 2, 3, 13
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, *cards):
        self.cards = [
            {"uuid": f"GPU-{i}", "name": "Fake H200", "pci": f"00000000:{i + 1:02X}:00.0", "total": 1000, "free": 600,
             "mode": 0, "links": 18, "fabric": None, "lost": False, **card}
            for i, card in enumerate(cards)
        ]  # fmt: skip
        self.driver, self.inits = True, 0

    def nvmlInit(self):
        if not self.driver:
            raise NVMLError(9, "Driver Not Loaded")
        self.inits += 1

    def nvmlShutdown(self):
        self.inits -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetCount(self):
        if not self.driver:
            raise NVMLError(9, "Driver Not Loaded")
        return len(self.cards)

    def _card(self, card):
        if card["lost"]:
            raise NVMLError(15, "GPU is lost")
        return card

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._card(self.cards[index])

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.nvmlDeviceGetCount()
        for card in self.cards:
            if card["uuid"] == uuid:
                return self._card(card)
        raise NVMLError(6, "Not Found")

    def nvmlDeviceGetPciInfo(self, card):
        return SimpleNamespace(busId=self._card(card)["pci"].encode())

    def nvmlDeviceGetUUID(self, card):
        return self._card(card)["uuid"]

    def nvmlDeviceGetName(self, card):
        return self._card(card)["name"]

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(total=self._card(card)["total"], free=card["free"])

    def nvmlDeviceGetComputeMode(self, card):
        if card["mode"] is None:
            raise NVMLError(3, "Not Supported")
        return card["mode"]

    def nvmlDeviceGetNvLinkState(self, card, link):
        if not card["links"]:
            raise NVMLError(3, "Not Supported")
        return int(link < card["links"])

    def c_nvmlGpuFabricInfoV_t(self):
        return SimpleNamespace(clusterUuid=bytes(16), cliqueId=0, state=0, status=0)

    def byref(self, value):
        return value

    def nvmlDeviceGetGpuFabricInfoV(self, card, info):
        if card["fabric"] is None:
            raise NVMLError(3, "Not Supported")
        info.clusterUuid, info.cliqueId, info.state = card["fabric"]
        return 0
