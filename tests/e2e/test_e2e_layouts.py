"""Geometry that cannot be: refused where it is registered, or told to both sides where they contradict each other."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from e2e_refit import SECONDS, WHOLE, new_job, pair, still_good, weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.distributed.fake_pg import FakeStore

from refitd import Layout, LayoutError, connect_engine, connect_trainer
from refitd.layout import Box
from refitd.layout.box import Piece
from refitd.testing import LocalDaemon, split_layout, wait_until

SHAPE = (4, 6)


def refused(daemon: LocalDaemon, layout: Layout) -> list[str]:
    """The fields of what a daemon finds wrong with a layout, on either side."""
    job, found = new_job(), []
    for connect, group in ((connect_trainer, "run"), (connect_engine, "r0")):
        with connect(job, group, 0, 1, daemon.socket) as client:
            with pytest.raises(LayoutError) as caught:
                client.register(layout)
            fields = [violation.field for violation in caught.value.violations]
            key = f"{'trainer' if connect is connect_trainer else 'engine'}/{group}/0"
            assert all(field.endswith(f" of {key}") for field in fields)
            found.append([field.removesuffix(f" of {key}") for field in fields])
    assert found[0] == found[1]
    return found[0]


def test_overlapping_pieces_are_refused(daemon: LocalDaemon) -> None:
    """Two pieces of one storage share elements."""
    pieces = [
        Piece("w", Box((0, 0), (2, 6)), "w", 0, (6, 1)),
        Piece("w", Box((2, 0), (4, 6)), "w", 6, (6, 1)),
    ]
    fields = refused(daemon, Layout.from_pieces({"w": (SHAPE, "float32")}, {"w": (24, "float32")}, pieces))
    assert len(fields) == 1
    assert "w" in fields[0]
    still_good(daemon)


def test_a_piece_that_leaves_its_storage_is_refused(daemon: LocalDaemon) -> None:
    """The last row lies behind the end."""
    pieces = [Piece("w", Box((0, 0), SHAPE), "w", 0, (6, 1))]
    fields = refused(daemon, Layout.from_pieces({"w": (SHAPE, "float32")}, {"w": (23, "float32")}, pieces))
    assert len(fields) == 1
    assert "w" in fields[0]
    still_good(daemon)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", torch.arange(2))
    dist.destroy_process_group()


def test_a_partial_tensor_never_gets_to_a_daemon(daemon: LocalDaemon, mesh: DeviceMesh) -> None:
    """A DTensor that waits for its reduction is refused by name before anything is sent."""
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
    with pytest.raises(LayoutError) as caught:
        Layout.from_tensors({"w": partial})
    assert [violation.field for violation in caught.value.violations] == ["tensor w: placement"]
    still_good(daemon)


CONTRADICTIONS = {
    "missing on the source": (
        {**WHOLE},
        {**WHOLE, "x": ((2,), "float32")},
        "tensor x: expected a source that has it, got none",
    ),
    "another shape": (
        {**WHOLE},
        {"w": ((6, 4), "float32")},
        "tensor w: expected shape (4, 6) as trainer/run0/0 reports, got shape (6, 4)",
    ),
    "a cast that loses": (
        {"w": (SHAPE, "float16")},
        {"w": (SHAPE, "bfloat16")},
        "tensor w: expected a dtype that float16 of trainer/run0/0 may be cast to, got bfloat16",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_sides_that_contradict_each_other_are_told_to_people(daemon: LocalDaemon, case: str) -> None:
    """The report names replica and tensor at once, and so does the status; nothing is handed to the engine."""
    source, destination, says = CONTRADICTIONS[case]
    job = new_job()
    with pair(daemon, split_layout(source, 0, 1), split_layout(destination, 0, 1), job) as (trainer, engine):
        began = time.monotonic()
        dtype = source["w"][1]
        offer = trainer.publish(1, {"w": weights(0).astype(dtype)})
        assert offer.released(timeout=SECONDS) == "RELEASED"  # a copy was published
        report = offer.committed(timeout=SECONDS)
        seconds = time.monotonic() - began
        assert report.committed == []
        assert says in report.missing["r0"]
        assert report.closed == "every whole replica has ended"
        assert seconds < SECONDS / 2
        shown = daemon.status()["jobs"][job]
        assert [(lane["replica"], lane["stage"]) for lane in shown["lanes"]] == [("r0", "failed")]
        assert says in shown["replicas"][0]["why"]
        assert engine.pending() is None
        assert not engine.dirty
    still_good(daemon)


def test_a_tensor_that_only_the_source_has_is_no_error(daemon: LocalDaemon) -> None:
    """An engine takes the part of the model that it serves."""
    source = {**WHOLE, "optimizer": ((3,), "float32")}
    memory = np.zeros(SHAPE, np.float32)
    with pair(daemon, split_layout(source, 0, 1), split_layout(WHOLE, 0, 1)) as (trainer, engine):
        offer = trainer.publish(1, {"w": weights(5), "optimizer": np.zeros(3, np.float32)})
        ticket = engine.pending(wait=SECONDS)
        assert ticket is not None
        engine.receive(ticket, {"w": memory}, timeout=SECONDS)
        assert offer.committed(timeout=SECONDS).committed == ["r0"]
    assert np.array_equal(memory, weights(5))


def test_a_destination_storage_that_nothing_fills_is_told_to_people(daemon: LocalDaemon) -> None:
    """A storage of the engine without a piece needs a keep pattern; the status says which one."""
    whole = split_layout(WHOLE, 0, 1)
    layout = Layout.from_pieces(whole.tensors, {**whole.storages, "cache": (8, "float32")}, whole.pieces())
    job = new_job()
    with pair(daemon, whole, layout, job) as (trainer, _engine):
        offer = trainer.publish(1, {"w": weights(0)})
        assert "storage cache of engine/r0/0" in offer.committed(timeout=SECONDS).missing["r0"]
        why = wait_until(lambda: daemon.status()["jobs"][job]["replicas"][0]["why"], "a reason")
        assert "a keep pattern that names it" in why
    still_good(daemon)
