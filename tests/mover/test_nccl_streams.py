"""Streams of lanes whose network edges go by NCCL: one lane's serve the next, or each turn would cost device memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mover_rig import column_cut
from nccl_rig import HostDriver, NcclRig

from refitd.errors import DeviceError
from refitd.mover.cuda.device import Device
from refitd.mover.nccl import staging, streams
from refitd.mover.nccl.staging import Staging

CARD = "cuda:0"


class Stream:
    """Of a device that may be at work on it, or broken."""

    def __init__(self, device: str) -> None:
        self.device, self.idle, self.broken = device, True, False

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.idle


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(streams, "_free", {})


def _staging() -> Staging:
    return Staging(Device(HostDriver(), CARD))  # type: ignore[arg-type]


def _of(one: Staging) -> list[Any]:
    return [one._packing.stream, one._unpacking.stream, one._reading.stream]


def test_a_lane_packs_and_unpacks_on_the_streams_of_the_one_before() -> None:
    """Each for what it did there, since that is what torch keeps memory for; a lane beside it has its own."""
    first, beside = _staging(), _staging()
    was = _of(first)
    assert len({*was, *_of(beside)}) == 6
    first.close()
    first.close()
    turned = _staging()
    assert _of(turned) == was
    assert not {*_of(_staging())} & {*was, *_of(beside)}


def test_a_stream_at_work_waits_for_its_turn() -> None:
    """A lane that follows would wait behind it."""
    first = _staging()
    packing, unpacking, reading = _of(first)
    packing.idle = False
    first.close()
    second = _of(_staging())
    assert second[1:] == [unpacking, reading]
    assert second[0] is not packing
    packing.idle = True
    assert _staging()._packing.stream is packing


def test_streams_of_another_device_or_use_are_not_taken() -> None:
    one = streams.take(CARD, "pack")
    streams.give(CARD, "pack", one)
    assert streams.take("cuda:1", "pack").device == "cuda:1"
    assert streams.take(CARD, "nccl") is not one
    assert streams.take(CARD, "pack") is one


def test_a_broken_device_is_told_where_a_stream_is_taken() -> None:
    first = _staging()
    first._packing.stream.broken = True
    first.close()
    with pytest.raises(DeviceError, match=r"make a stream.*illegal memory access"):
        _staging()


@pytest.fixture
def rig() -> Iterator[NcclRig]:
    made = NcclRig(column_cut(32, 16))
    made.fill()
    yield made
    made.close()


def test_lanes_that_end_give_their_streams_back(rig: NcclRig, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    closed: list[str] = []

    class Side(staging._Side):
        def __init__(self, device: Device, use: str) -> None:
            super().__init__(device, use)
            begun.append(use)

        def close(self) -> None:
            super().close()
            closed.append(self._use)

    monkeypatch.setattr(staging, "_Side", Side)
    rig.build()
    rig.built()
    assert sorted(begun) == sorted(["pack", "unpack", "read"] * len(rig.parties))
    assert not closed
    rig.revoke_all()
    assert sorted(closed) == sorted(begun)
