"""Export and import of device memory against a fake driver: what is described, what is mapped, what is let go."""

import os

import pytest
from fake_driver import SEGMENT, FakeCard, FakeDriver

from refitd.errors import DeviceError, ProtocolError
from refitd.hook.gpu.driver import Driver
from refitd.hook.gpu.export import Extent, export, probe
from refitd.mover.cuda.imports import Imports


@pytest.fixture
def card():
    return FakeCard()


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("kind", "path", "reason"),
    [
        ("ipc", "ipc", "a block of cudaMalloc, by IPC handle"),
        ("vmm", "vmm", "virtual memory, by descriptor"),
        ("private", "none", "virtual memory made without a shareable handle (CUDA_ERROR_NOT_SUPPORTED)"),
        ("pool", "none", "neither an IPC handle (CUDA_ERROR_INVALID_VALUE) nor virtual memory"),
    ],
)
def test_a_probe_says_how_and_why(card, kind, path, reason):
    """And leaves no handle and no descriptor behind."""
    driver, before = FakeDriver(card), _descriptors()
    assert probe(driver, card.allocate(SEGMENT, kind) + 16) == (path, reason)
    assert (driver.live, _descriptors()) == ({}, before)


def test_storages_of_one_block_share_it(card):
    """Each has its offset; the block's handle is in the message once."""
    base = card.allocate(1000)
    made = export(FakeDriver(card), {"a": Extent(base, 100), "b": Extent(base + 300, 700)})
    assert made.message == {
        "blocks": [{"kind": "ipc", "id": str(base), "handle": base.to_bytes(64, "little").hex(), "nbytes": 1000}],
        "storages": [
            {"name": "a", "block": 0, "offset": 0, "nbytes": 100},
            {"name": "b", "block": 0, "offset": 300, "nbytes": 700},
        ],
    }
    assert (made.fds, made.refused) == ([], {})


def test_segments_are_sent_once_each_and_mapped_in_order(card):
    """Two storages over three segments: what they share is described once; the importer may only read."""
    base = card.allocate(3 * SEGMENT, "vmm")
    extents = {"a": Extent(base + 64, SEGMENT), "b": Extent(base + SEGMENT + 100, SEGMENT + 50)}
    owner, mover = FakeDriver(card), FakeDriver(card)
    made = export(owner, extents)
    ids = "".join(f" {base + i * SEGMENT}" for i in range(3))
    assert made.message["blocks"] == [{"kind": "vmm", "id": ids, "fd": 0, "segments": [SEGMENT] * 3}]
    assert [storage["offset"] for storage in made.message["storages"]] == [64, SEGMENT + 100]
    assert owner.live == {}
    imports = Imports(mover)
    start = 1 << 50
    assert imports.open("t", made.message, made.fds) == {"a": start + 64, "b": start + SEGMENT + 100}
    made.close()
    mapped = [call[1:] for call in mover.calls if call[0] == "map"]
    assert mapped == [(start + i * SEGMENT, SEGMENT, base + i * SEGMENT) for i in range(3)]
    assert ("allow", start, 3 * SEGMENT, False) in mover.calls
    assert {kind for kind, _ in mover.live} == {"reserved", "mapped"}
    imports.close("t")
    assert (mover.live, len(imports)) == ({}, 0)


def test_memory_that_nobody_can_map_is_refused_by_name(card):
    """The rest is described all the same."""
    good, bad = card.allocate(100), card.allocate(SEGMENT, "private")
    made = export(FakeDriver(card), {"good": Extent(good, 100), "bad": Extent(bad, 100)})
    assert [storage["name"] for storage in made.message["storages"]] == ["good"]
    assert made.refused == {"bad": "virtual memory made without a shareable handle (CUDA_ERROR_NOT_SUPPORTED)"}


def test_a_block_of_two_owners_is_opened_once_and_closed_with_the_last(card):
    """The work that may touch it ends first."""
    base = card.allocate(100)
    message = export(FakeDriver(card), {"a": Extent(base, 100)}).message
    driver = FakeDriver(card)
    imports = Imports(driver)
    assert imports.open("one", message) == imports.open("two", message) == {"a": base | 1 << 48}
    imports.close("one")
    assert ("ipc", base) in driver.live
    driver.calls.clear()
    imports.close("two")
    assert driver.calls == [("synchronize",), ("close",)]
    assert driver.live == {}
    imports.close("two")
    assert len(imports) == 0


def test_opening_again_replaces_what_the_owner_had(card):
    """Moved memory leaves no mapping of its old place."""
    driver = FakeDriver(card)
    imports = Imports(driver)
    for _ in range(3):
        base = card.allocate(100)
        imports.open("t", export(FakeDriver(card), {"a": Extent(base, 100)}).message)
        assert list(driver.live) == [("ipc", base)]
    imports.close_all()
    assert driver.live == {}


@pytest.mark.parametrize("call", ["reserve", "map", "allow"])
def test_an_import_that_fails_leaves_nothing(card, call):
    """The driver's word is in the error."""
    ipc, vmm = card.allocate(100), card.allocate(2 * SEGMENT, "vmm")
    made = export(FakeDriver(card), {"a": Extent(ipc, 100), "b": Extent(vmm, 2 * SEGMENT)})
    driver = FakeDriver(card)
    driver.fail_at = call
    imports = Imports(driver)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY") as error:
        imports.open("t", made.message, made.fds)
    made.close()
    assert error.value.call == call
    assert (driver.live, len(imports)) == ({}, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"blocks": [{"kind": "ipc", "handle": "zz" * 64, "nbytes": 100}]}, "block"),
        ({"blocks": [{"kind": "vmm", "fd": 0, "segments": [100]}]}, "block"),
        ({"blocks": [{"kind": "vmm", "fd": 0, "segments": []}]}, "block"),
        ({"storages": [{"name": "a", "block": 1, "offset": 0, "nbytes": 4}]}, "storage a block"),
        ({"storages": [{"name": "a", "block": 0, "offset": 97, "nbytes": 4}]}, "storage a"),
        ({"storages": [{"name": "a", "block": 0, "offset": -1, "nbytes": 4}]}, "storage a"),
    ],
)
def test_messages_that_make_no_sense_are_refused(card, change, field):
    """Before the driver is asked for anything."""
    message = export(FakeDriver(card), {"a": Extent(card.allocate(100), 100)}).message
    driver = FakeDriver(card)
    with pytest.raises(ProtocolError) as error:
        Imports(driver).open("t", {**message, **change})
    assert error.value.field == field
    assert driver.calls == []


def test_without_a_driver_the_error_says_so():
    """Neither an import error nor a crash: a typed error that names the call."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    with pytest.raises(DeviceError, match=r"cuda\.bindings|cuInit"):
        Driver(0)
