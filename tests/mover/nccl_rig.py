"""Lanes whose network edges go by a fake NCCL: each rank with a library, and faults, of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mover_rig
import numpy as np
import torch  # noqa: F401  before lanes are built: it takes longer than they may
from mover_rig import JOB, LANE, PATIENCE, SECRET, Party, Rig, Sketch

from refitd.bench.fake_nccl import FakeNccl, Faults
from refitd.mover.board import LaneFacts
from refitd.mover.cuda.device import Device
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.lane import Lane
from refitd.mover.nccl.transport import Group
from refitd.mover.transport.tcp import Address
from refitd.plan.program import Program


class HostDriver:
    """A device whose memory is the host's."""

    def uuid(self) -> str:
        return "GPU-host"

    def activate(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class NcclParty(Party):
    """A rank with a library. ``ranks`` is the communicator, all of the sketch by default."""

    ranks: tuple[str, ...] = ()

    def __init__(self, rank: str, faults: Faults) -> None:
        super().__init__(rank)
        self.faults = faults
        self.device = Device(HostDriver(), "cpu")  # type: ignore[arg-type]
        self.library = FakeNccl(faults)

    def build(
        self, program: Program, token: int = 1, connect: Sequence[Address] = (), accept: Sequence[str] = (),
        timeout: float = PATIENCE, secret: str = SECRET,
    ) -> Lane:  # fmt: skip
        facts = LaneFacts(JOB, LANE, token, self.rank, secret, program.plan_digest)
        group = Group(self.ranks, lambda: (self.device, self.library))
        lane = Lane(facts, program, self.memories, self.messages.put, connect, accept, timeout, group=group)
        self.lane = lane
        lane.start()
        return lane


class NcclRig(Rig):
    """All ranks of a sketch; ``network`` ranks are on hosts of their own."""

    def __init__(self, sketch: Sketch, network: bool = True) -> None:
        self.faults: dict[str, Faults] = {}

        def make(rank: str) -> NcclParty:
            self.faults[rank] = Faults(network)
            return NcclParty(rank, self.faults[rank])

        original: Any = mover_rig.Party
        mover_rig.Party = make  # type: ignore[assignment,misc]
        try:
            super().__init__(sketch)
        finally:
            mover_rig.Party = original  # type: ignore[misc]
        NcclParty.ranks = tuple(self.parties)

    def to_devices(self) -> None:
        """Every rank's memory is on its (fake) device from here on, where it is."""
        for key, party in self.parties.items():
            lent, name = self.lent[key], f"/proc/self/fd/{self.lent[key].page.fd}"
            page = np.memmap(name, np.uint64, "r")
            places = {name: array.ctypes.data for name, array in lent.arrays.items()}
            sizes = {name: array.nbytes for name, array in lent.arrays.items()}
            device: Any = party.device  # type: ignore[attr-defined]
            party.memories[key] = DeviceMemory(key, device, places, sizes, (page, 0), True, lambda: None)

    def driver(self, rank: str) -> Any:
        lane: Any = self.parties[rank].lane
        return lane._net._driver

    def revoke_all(self) -> None:
        """At the same time, as daemons do."""
        threads = [threading.Thread(target=self._revoke(party)) for party in self.parties.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _revoke(self, party: Party) -> Callable[[], None]:
        def revoke() -> None:
            if party.lane is not None:
                party.lane.revoke()
                party.lane = None

        return revoke

    def close(self) -> None:
        for faults in self.faults.values():
            faults.hang.clear()
        self.revoke_all()
        super().close()
