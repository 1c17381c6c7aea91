"""Bad luck on order, in daemons and movers of the device scripts (by ``sitecustomize``), on a real card and on a fake.

Files in ``$REFITD_PLANTS``: ``illegal`` names the rank whose mover next runs a kernel on addresses where nothing is;
``hung`` the one whose next kernel does not end;
``no-peer`` is there while no card may reach another (``GPU-far`` is always another). ``$REFITD_PLANT_NCCL`` is the
version of NCCL that a daemon finds. ``$REFITD_PLANT_CONSTANTS``: ``module.NAME=VALUE`` below refitd, with commas.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path

NOWHERE = 1 << 40
CYCLES = 1 << 43  # of a card, at 2 GHz somewhat more than an hour
REFUSED = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"


def install():
    """In this process, before it uses any of it."""
    folder = Path(os.environ["REFITD_PLANTS"])
    _plant_kernel(folder)
    _plant_peer(folder)
    for module, name, value in constants():
        vars(importlib.import_module(module))[name] = value
    if version := os.environ.get("REFITD_PLANT_NCCL"):
        from refitd.daemon import wiring

        found = wiring.library_versions
        wiring.library_versions = lambda: {**found(), "nccl": version}


def _hang(device):
    """For an hour, on a card by a kernel for whose end the mover then waits; found soon, whichever thread waits."""
    from refitd.mover.transport import peer

    peer.LAUNCH_SECONDS = 1.0
    if device == "cpu":
        time.sleep(3600)
        return
    import torch

    torch.cuda._sleep(CYCLES)


def constants():
    """(module, name, value) of each that is to be another."""
    found = []
    for setting in filter(None, os.environ.get("REFITD_PLANT_CONSTANTS", "").split(",")):
        place, _is, value = setting.partition("=")
        module, _dot, name = place.rpartition(".")
        found.append((f"refitd.{module}", name, json.loads(value)))
    return found


def _plant_kernel(folder):
    from dataclasses import replace

    from refitd.mover.cuda import pull

    def run(round_, armed, made=pull._run):
        hung = folder / "hung"
        if hung.exists() and hung.read_text() == armed.own.key:
            hung.unlink()
            _hang(armed.own.device.name)
        told, own = folder / "illegal", armed.own
        if told.exists() and told.read_text() == own.key:
            told.unlink()
            armed = replace(armed, launches=((_illegal(round_, armed), None),))
        made(round_, armed)

    def _illegal(round_, armed):
        if armed.own.device.name == "cpu":
            return _FakeIllegal()
        named = pull.by_rank(round_.program)
        places = {ref.name: NOWHERE for ref in named.storages}
        return armed.own.device.prepare(pull.through(named, armed.lot.buckets, places, places))

    pull._run = run


class _FakeIllegal:
    """A processor would end the process without a word."""

    def run(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _plant_peer(folder):
    from refitd.errors import DeviceError
    from refitd.hook.gpu import driver, lend

    for kind in {driver.Driver, lend.Driver}:

        def enable_peer(self, device, made=kind.enable_peer):
            if (folder / "no-peer").exists():
                raise DeviceError("cuCtxEnablePeerAccess", REFUSED)
            if device != "GPU-far":
                made(self, device)

        kind.enable_peer = enable_peer
