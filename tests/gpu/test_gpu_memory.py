"""Device memory lent from one process to another: by IPC handle, by descriptor, and what stays when an owner dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from refitd.daemon.devices import Devices
from refitd.hook.gpu.driver import Driver
from refitd.mover.cuda.imports import Imports
from refitd.mover.device import bytes_at

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
ALLOCATORS = {"ipc": "", "vmm": "expandable_segments:True"}
SIZE = 40_000_000  # int32: more than one segment of 20 MiB


class Owner:
    """The other process."""

    def __init__(self, allocator=""):
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        if allocator:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = environment["PYTORCH_ALLOC_CONF"] = allocator
        command = [sys.executable, str(HERE / "owner.py"), str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.fds = []

    def ask(self, kind, **fields):
        self.sock.send(json.dumps({"kind": kind, **fields}).encode())
        data, self.fds, _flags, _address = socket.recv_fds(self.sock, 1 << 20, 253)
        if not data:
            raise EOFError(f"the owner died: {self.process.wait()}")
        return json.loads(data)

    def close_fds(self):
        for fd in self.fds:
            os.close(fd)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.sock.close()


@pytest.fixture
def owner(request):
    one = Owner(getattr(request, "param", ""))
    yield one
    one.close()


@pytest.fixture
def imports():
    torch.zeros(1, device="cuda")
    made = Imports(Driver(0))
    yield made
    made.close_all()


def _open(imports, owner, writable=False):
    message, refused = owner.ask("export")
    assert refused == {}
    places = imports.open("owner", message, owner.fds, writable)
    owner.close_fds()
    return message, places


def _values(address, numel=SIZE):
    return bytes_at(address, numel * 4, "cuda").view(torch.int32)


@pytest.mark.parametrize(("path", "owner"), ALLOCATORS.items(), indirect=["owner"], ids=ALLOCATORS)
def test_memory_is_read_where_it_is(path, owner, imports):
    """Offsets inside blocks are kept, two storages share one mapping, and changes are seen without a new export."""
    owner.ask("make", name="a", numel=SIZE, before=1234, first=7)
    owner.ask("make", name="b", numel=1000, before=3, first=50)
    owner.ask("make", name="c", numel=1000, before=5, first=90)
    assert owner.ask("probe")[0] == path
    message, places = _open(imports, owner)
    assert {block["kind"] for block in message["blocks"]} == {path}
    assert len(message["blocks"]) <= 2
    assert torch.equal(_values(places["a"]), torch.arange(SIZE, device="cuda", dtype=torch.int32) + 7)
    for name, first in (("b", 50), ("c", 90)):
        assert _values(places[name], 1000).tolist() == list(range(first, first + 1000))
    owner.ask("add", value=3)
    assert _values(places["b"], 1000).tolist() == list(range(53, 1053))


@pytest.mark.parametrize(("path", "owner"), ALLOCATORS.items(), indirect=["owner"], ids=ALLOCATORS)
def test_memory_that_is_lent_for_writing_can_be_written(path, owner, imports):
    """What the importer writes is what the owner has."""
    owner.ask("make", name="a", numel=SIZE, before=0, first=0)
    _message, places = _open(imports, owner, writable=True)
    _values(places["a"]).fill_(2)
    torch.cuda.synchronize()
    assert owner.ask("sum") == {"a": 2 * SIZE}


@pytest.mark.parametrize("owner", ["backend:cudaMallocAsync"], indirect=True)
def test_memory_that_cannot_be_shared_is_refused_with_its_reason(owner):
    """Nothing is described that nobody could open: it needs staging."""
    owner.ask("make", name="a", numel=SIZE, before=0, first=0)
    path, reason = owner.ask("probe")
    assert (path, "neither an IPC handle" in reason) == ("none", True)
    message, refused = owner.ask("export")
    assert (message, refused) == ({"blocks": [], "storages": []}, {"a": reason})


@pytest.mark.parametrize(("path", "owner"), ALLOCATORS.items(), indirect=["owner"], ids=ALLOCATORS)
def test_a_dead_owners_memory_is_free_once_its_import_is_closed(path, owner, imports):
    """Within a second of its death, although it was mapped: 2 GiB come back."""
    wanted = 2 << 30
    owner.ask("make", name="a", numel=wanted // 4, before=0, first=0)
    _message, places = _open(imports, owner)
    assert _values(places["a"], 4).tolist() == [0, 1, 2, 3]
    before = torch.cuda.mem_get_info()[0]
    pidfd = os.pidfd_open(owner.process.pid)
    killed = time.monotonic()
    os.kill(owner.process.pid, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)
    imports.close("owner")
    while torch.cuda.mem_get_info()[0] < before + wanted and time.monotonic() < killed + 5:
        time.sleep(0.005)
    took = time.monotonic() - killed
    print(f"{path}: free again {took * 1e3:.0f} ms after SIGKILL")
    assert torch.cuda.mem_get_info()[0] >= before + wanted
    assert took < 1.0
    assert len(imports) == 0


@pytest.mark.parametrize(("path", "owner"), ALLOCATORS.items(), indirect=["owner"], ids=ALLOCATORS)
def test_exporting_again_and_again_leaves_nothing_behind(path, owner, imports):
    """100 times released, moved and exported anew: memory and descriptors at baseline, never an old address' values."""
    free, descriptors = None, None
    for turn in range(100):
        owner.ask("make", name="a", numel=SIZE // (1 + turn % 3), before=turn, first=turn)
        _message, places = _open(imports, owner)
        assert _values(places["a"], 3).tolist() == [turn, turn + 1, turn + 2]
        torch.cuda.synchronize()
        imports.close("owner")
        assert owner.ask("drop") == 0
        if turn == 5:
            free, descriptors = torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))
    assert len(imports) == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert abs(torch.cuda.mem_get_info()[0] - free) < 16 << 20


def test_nvml_and_cuda_name_the_same_card():
    """The UUID joins the two; memory and compute mode answer. NVML also sees cards that are hidden from CUDA."""
    devices = Devices()
    assert {event.kind for event in devices.refresh()} == {"found"}
    assert len(devices.present) >= torch.cuda.device_count()
    driver = Driver(0)
    device = devices.present[driver.uuid()]
    print(device, devices.driver)
    assert device.name == torch.cuda.get_device_name(0)
    assert device.sharable
    free = devices.free_bytes(device.uuid)
    assert free is not None
    assert 0 < free <= device.memory_bytes
    assert devices.refresh() == []
    devices.close()
