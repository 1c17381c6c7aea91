"""The node's GPUs: what is told about each, and what happens when they, or the driver, go away."""

import pytest
from fake_nvml import FakeNvml

from refitd.daemon.devices import DeviceEvent, Devices, library_versions, nccl_conflict, nearest_nics


@pytest.fixture
def sysfs(tmp_path):
    """A host with two bridges: a GPU and two RDMA ports on the first, one port on the second."""
    paths = {
        "0000:01:00.0": "pci0000:00/0000:00:01.0/0000:01:00.0",
        "0000:02:00.0": "pci0000:00/0000:00:01.0/0000:02:00.0",
        "0000:03:00.0": "pci0000:80/0000:80:01.0/0000:03:00.0",
    }
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for address, path in paths.items():
        (tmp_path / "devices" / path).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address).symlink_to(tmp_path / "devices" / path)
    _nics(tmp_path, "infiniband", {"mlx5_1": paths["0000:02:00.0"], "mlx5_0": paths["0000:02:00.0"],
                                   "mlx5_9": paths["0000:03:00.0"]})  # fmt: skip
    (tmp_path / "class/net/lo").mkdir(parents=True)
    return tmp_path


def _nics(sysfs, kind, nics):
    for name, path in nics.items():
        folder = sysfs / "class" / kind / name
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(sysfs / "devices" / path)


def test_a_card_is_described(sysfs):
    """Identity, links, the wider NVLink domain, the nearest NICs."""
    cluster = bytes(range(16))
    devices = Devices(FakeNvml({"fabric": (cluster, 7, 3)}), sysfs)
    assert devices.refresh() == [DeviceEvent("found", "GPU-0", "Fake H200")]
    device = devices.present["GPU-0"]
    assert (device.uuid, device.index, device.name, device.memory_bytes) == ("GPU-0", 0, "Fake H200", 1000)
    assert (device.compute_mode, device.sharable, device.nvlinks) == ("default", True, 18)
    assert device.fabric == cluster.hex() + "/7"
    assert device.nics == ("mlx5_0", "mlx5_1")
    assert devices.driver == "580.1"


@pytest.mark.parametrize("fabric", [None, (bytes(16), 0, 3), (bytes(range(16)), 7, 2)])
def test_only_a_complete_fabric_across_hosts_is_a_domain(sysfs, fabric):
    """Not where it is unsupported, inside one host, or still being set up."""
    devices = Devices(FakeNvml({"fabric": fabric}), sysfs)
    devices.refresh()
    assert devices.present["GPU-0"].fabric is None


def test_what_a_card_does_not_support_is_left_out(sysfs):
    """No compute mode, no NVLink."""
    devices = Devices(FakeNvml({"mode": None, "links": 0}, {"mode": 3}), sysfs)
    devices.refresh()
    assert (devices.present["GPU-0"].compute_mode, devices.present["GPU-0"].nvlinks) == ("default", 0)
    assert (devices.present["GPU-1"].compute_mode, devices.present["GPU-1"].sharable) == ("exclusive process", False)


def test_a_lost_card_is_an_event_and_the_others_go_on(sysfs):
    """It comes back as found, once."""
    nvml = FakeNvml({}, {})
    devices = Devices(nvml, sysfs)
    devices.refresh()
    assert devices.refresh() == []
    nvml.cards[0]["lost"] = True
    assert devices.refresh() == [DeviceEvent("lost", "GPU-0", "GPU is lost")]
    assert (list(devices.present), devices.free_bytes("GPU-0"), devices.free_bytes("GPU-1")) == (["GPU-1"], None, 600)
    assert devices.refresh() == []
    nvml.cards[0]["lost"] = False
    assert devices.refresh() == [DeviceEvent("found", "GPU-0", "Fake H200")]


def test_a_missing_driver_is_told_once_and_may_come_later(sysfs):
    """And one that goes away takes its cards along."""
    nvml = FakeNvml({})
    nvml.driver = False
    devices = Devices(nvml, sysfs)
    assert devices.refresh() == [DeviceEvent("no driver", "", "Driver Not Loaded")]
    assert (devices.refresh(), devices.present, devices.free_bytes("GPU-0")) == ([], {}, None)
    nvml.driver = True
    assert [event.kind for event in devices.refresh()] == ["found"]
    nvml.driver = False
    assert [event.kind for event in devices.refresh()] == ["lost", "no driver"]
    assert nvml.inits == 0
    nvml.driver = True
    assert [event.kind for event in devices.refresh()] == ["found"]
    devices.close()
    devices.close()
    assert nvml.inits == 0


def test_without_a_gpu_the_real_library_gives_an_event():
    """On a machine without a driver this is all that happens."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    devices = Devices()
    (event,) = devices.refresh()
    assert (event.kind, event.uuid) == ("no driver", "")
    assert devices.free_bytes("GPU-0") is None
    devices.close()


def test_network_interfaces_stand_in_for_rdma(tmp_path, sysfs):
    """Only hardware counts; a host without any has none."""
    for name in ("mlx5_0", "mlx5_1", "mlx5_9"):
        (sysfs / "class/infiniband" / name / "device").unlink()
    assert nearest_nics("00000000:01:00.0", sysfs) == ()
    _nics(sysfs, "net", {"eth0": "pci0000:80/0000:80:01.0/0000:03:00.0"})
    assert nearest_nics("00000000:01:00.0", sysfs) == ("eth0",)


def test_nccl_versions_must_be_one():
    """The reason names both, each with a rank that has it."""
    assert nccl_conflict({"a": "2.28.9", "b": "2.28.9"}) is None
    assert nccl_conflict({}) is None
    reason = nccl_conflict({"b": "2.29.7", "a": "2.28.9", "c": "2.28.9", "d": ""})
    assert reason == "NCCL versions differ: 2.28.9 on a, 2.29.7 on b, none on d"
    assert set(library_versions()) == {"torch", "nccl", "nccl4py"}
