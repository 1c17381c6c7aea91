"""How the doctor comes by its facts: a fake NVML and a made-up /sys, real children, real sockets, a real daemon."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_nvml import FakeNvml

from refitd.cli import main
from refitd.config import load
from refitd.errors import DeviceError, PermissionDenied
from refitd.hook.wire import Connection
from refitd.operate.doctor import gather, share
from refitd.operate.doctor.contact import reach
from refitd.operate.doctor.facts import ANSWERS, FORBIDDEN, NO_DAEMON, SILENT, Daemon, Sharing, StoreFacts
from refitd.store import spawn_etcd
from refitd.testing import LocalDaemon

NAMES = [
    "driver", "compute mode", "NVLink", "NCCL", "IPC between processes", "IPC across containers", "chosen path", "etcd",
    "clock", "limits: memlock", "limits: nofile", "limits: /dev/shm", "socket", "shared memory", "bandwidth: network",
    "bandwidth: peer",
]  # fmt: skip


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two GPUs and an audio function of NVIDIA, another maker's card, an RDMA port that is up and one that is down."""
    for address, vendor, kind in (
        ("01", "0x10de", "0x030200"), ("02", "0x10de", "0x030000"), ("03", "0x10de", "0x040300"),
        ("04", "0x1002", "0x030000"),
    ):  # fmt: skip
        write(tmp_path / f"bus/pci/devices/0000:{address}:00.0/vendor", f"{vendor}\n")
        write(tmp_path / f"bus/pci/devices/0000:{address}:00.0/class", f"{kind}\n")
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        write(tmp_path / f"class/infiniband/{name}/ports/1/state", f"{state}\n")
        write(tmp_path / f"class/infiniband/{name}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    return tmp_path


def test_gpus_are_looked_at_and_tried(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards on the bus and in NVML; each is tried once, where there is torch to try it with."""
    versions = {"torch": "2.13.0", "nccl": "2.29.2"}
    monkeypatch.setattr(gather, "library_versions", lambda: versions)
    nvml, tried = FakeNvml({}, {"mode": 3, "links": 0}), dict[str, str]()

    def ipc(uuid: str) -> str:
        tried[uuid] = "no" if uuid == "GPU-1" else ""
        return tried[uuid]

    found = gather.look_at_gpus(ipc, nvml, sysfs)
    assert (found.cards, found.driver, found.trouble, found.versions) == (2, "580.1", "", versions)
    assert [(card.index, card.compute_mode, card.nvlinks) for card in found.present] == [
        (0, "default", 18), (1, "exclusive process", 0),
    ]  # fmt: skip
    assert found.ipc == tried == {"GPU-0": "", "GPU-1": "no"}
    assert nvml.inits == 0
    versions["torch"] = ""
    assert gather.look_at_gpus(ipc, nvml, sysfs).ipc == {}


def test_a_driver_that_is_not_loaded_is_a_fact(sysfs: Path) -> None:
    """Nothing is raised, and nothing is tried."""
    nvml = FakeNvml({})
    nvml.driver = False
    found = gather.look_at_gpus(lambda uuid: pytest.fail(uuid), nvml, sysfs)
    assert (found.cards, found.driver, found.present, found.ipc) == (2, "", (), {})
    assert "Driver Not Loaded" in found.trouble


def test_nics(sysfs: Path, tmp_path: Path) -> None:
    """RDMA ports that are up; without any, hardware interfaces that are up, at 0 where they do not say how fast."""
    assert gather.read_nics(sysfs) == {"mlx5_0/1": 50e9}
    plain = tmp_path / "plain"
    for name, state, speed in (
        ("eth0", "up", "25000"),
        ("eth1", "down", "25000"),
        ("eth2", "up", "-1"),
        ("lo", "", ""),
    ):
        write(plain / f"class/net/{name}/operstate", state)
        write(plain / f"class/net/{name}/speed", speed)
        if name != "lo":
            (plain / f"class/net/{name}/device").mkdir()
    assert gather.read_nics(plain) == {"eth0": 3.125e9, "eth2": 0.0}
    assert gather.read_nics(tmp_path / "none") == {}


def test_limits_are_the_daemons_where_it_runs(tmp_path: Path) -> None:
    """Its soft limits out of /proc; our own where it may not be looked at, or is not there."""
    text = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            1024                 524288               files     \n"
        "Max locked memory         unlimited            unlimited            bytes     \n"
    )
    write(tmp_path / "70/limits", text)
    found = gather.read_limits(Daemon("/x", ANSWERS, pid=70), tmp_path)
    assert (found.whose, found.nofile, found.memlock) == ("the daemon", 1024, None)
    for pid in (0, 71):
        assert gather.read_limits(Daemon("/x", ANSWERS, pid=pid), tmp_path).whose == "this process"
    ours = gather.parse_limits(Path("/proc/self/limits").read_text())
    own = gather.read_limits(Daemon("/x"))
    assert (own.nofile, own.memlock) == (ours["open files"], ours["locked memory"])


def test_the_clock_is_read_without_rights() -> None:
    """The kernel answers adjtimex; its bound is a time."""
    found = gather.read_clock()
    assert found.synchronised in (True, False)
    assert found.error >= 0


def test_an_etcd_that_is_away_is_a_fact(tmp_path: Path) -> None:
    """Its error's class and words; a password that cannot be read, too; other stores are not asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environ = {"HOME": "/", "REFITD_STORE__REQUEST_TIMEOUT": "0.3"}
    found = gather.probe_store(load(environ=environ, overrides={"store.url": f"etcd://127.0.0.1:{port}"}))
    assert (found.url, found.kind) == (f"etcd://127.0.0.1:{port}", "StoreUnavailable")
    secret = {"store.url": "etcd://127.0.0.1:1", "store.user": "a", "store.password_file": str(tmp_path / "none")}
    assert gather.probe_store(load(environ=environ, overrides=secret)).kind == "ConfigError"
    assert gather.probe_store(load(environ=environ)) == StoreFacts("memory://")


def test_an_etcd_that_answers_is_timed() -> None:
    """A real one; also for a user who may not read the key that is asked for."""
    etcd = spawn_etcd(prefer="distro")
    try:
        found = gather.probe_store(load(environ={"HOME": "/"}, overrides={"store.url": etcd.url}))
    finally:
        etcd.stop()
    assert (found.url, found.kind, found.detail) == (etcd.url, "", "")
    assert 0 < found.seconds < 60

    def denied(key: str) -> None:
        raise PermissionDenied(key)

    gather._read_from(cast("Any", SimpleNamespace(get=denied)))


def test_a_child_reads_our_memory() -> None:
    """A real process, a real descriptor; the rate is one."""
    found = share.share_host()
    assert found.trouble == ""
    assert found.rate > 1e6


def test_a_child_that_cannot_be_started_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python there; and a child that ends without a word."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert share.share_host() == Sharing(
        "FileNotFoundError: [Errno 2] No such file or directory: '/nonexistent/python'", 0.0
    )
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert share.share_host().trouble.startswith(("EOFError", "ConnectionResetError", "BrokenPipeError"))
    assert share.share_gpu("GPU-0").startswith(("EOFError", "ConnectionResetError", "BrokenPipeError"))


def test_without_cuda_a_gpu_cannot_be_shared() -> None:
    """Both children come up, and the owner says what it lacks."""
    assert share.share_gpu("GPU-0").startswith(("import cuda.bindings: not installed", "cuInit"))


class FakeDriver:
    """One block of 1 MiB at 4096 that goes by IPC handle; a reader may be refused it."""

    def __init__(self, opens: bool = True, shares: bool = True) -> None:
        self.opens, self.shares, self.mapped = opens, shares, 0

    def retain(self, address: int) -> int:
        raise DeviceError("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE")

    def address_range(self, address: int) -> tuple[int, int]:
        return 4096, share.GPU_BYTES

    def buffer_id(self, address: int) -> int:
        return 1

    def ipc_handle(self, base: int) -> bytes:
        if not self.shares:
            raise DeviceError("cuIpcGetMemHandle", "CUDA_ERROR_INVALID_VALUE")
        return bytes(64)

    def open_ipc(self, handle: bytes) -> int:
        if not self.opens:
            raise DeviceError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_CONTEXT")
        self.mapped += 1
        return 8192

    def close_ipc(self, base: int) -> None:
        self.mapped -= 1

    def synchronize(self) -> None:
        return


def lend(driver: Any) -> dict[str, Any]:
    """What a reader says of a block of the driver's, or what its owner says."""
    pairs = [socket.socketpair() for _end in range(2)]
    owner, reader = (Connection(pair[0]) for pair in pairs)
    children = [
        threading.Thread(target=share.lend_gpu, args=(Connection(pairs[0][1]), driver, 4096)),
        threading.Thread(target=share.map_gpu, args=(Connection(pairs[1][1]), driver)),
    ]
    try:
        children[0].start()
        lent, fds = owner.receive(10)
        assert fds == []
        if lent["trouble"]:
            return lent
        children[1].start()
        reader.send({**lent, "fds": 0})
        return reader.receive(10)[0]
    finally:
        for pair in pairs:
            pair[0].close()
        for child in children:
            if child.ident is not None:
                child.join()
        for pair in pairs:
            pair[1].close()


def test_a_gpus_block_is_lent_and_mapped() -> None:
    """By the same calls as weights; nothing stays mapped; a refusal at either end is told in the driver's words."""
    driver = FakeDriver()
    assert lend(driver)["trouble"] == ""
    assert driver.mapped == 0
    assert lend(FakeDriver(opens=False))["trouble"] == "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT"
    assert "cuIpcGetMemHandle" not in lend(FakeDriver(shares=False))["trouble"]
    assert "neither an IPC handle" in lend(FakeDriver(shares=False))["trouble"]


def test_how_far_the_socket_lets_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing there; nobody behind it; not for us; somebody who never answers."""
    path = tmp_path / "hook.sock"
    found = reach(str(path))
    assert (found.contact, found.detail, found.mode) == (NO_DAEMON, "No such file or directory", 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o640)
        assert (reach(str(path)).contact, reach(str(path)).detail) == (NO_DAEMON, "Connection refused")
        listener.listen()
        monkeypatch.setattr("refitd.operate.doctor.contact._SECONDS", 0.2)
        found = reach(str(path))
        assert (found.contact, found.pid, found.mode, found.strangers) == (SILENT, os.getpid(), 0o640, ())
        assert "does not answer within 0.2 s" in found.detail

    def refuse(self: socket.socket, address: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert (reach(str(path)).contact, reach(str(path)).detail) == (FORBIDDEN, "Permission denied")


def test_namespaces_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the daemon that are not ours; what may not be looked at does not count."""
    for process, names in (("self", {"ipc": 1, "pid": 2, "user": 3}), (str(os.getpid()), {"ipc": 9, "pid": 2})):
        for name, number in names.items():
            (tmp_path / process / "ns").mkdir(parents=True, exist_ok=True)
            (tmp_path / process / "ns" / name).symlink_to(f"{name}:[{number}]")
    monkeypatch.setattr("refitd.operate.doctor.contact._SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "hook.sock"))
        listener.listen()
        assert reach(str(tmp_path / "hook.sock"), tmp_path).strangers == ("ipc",)


def test_the_command_examines_a_real_node(capsys: pytest.CaptureFixture[str]) -> None:
    """All checks in order, as rows and as text; status 0 without a failure, 1 with one; --strict counts warnings."""
    with LocalDaemon() as daemon:
        config = ["--config", str(daemon.folder / "refitd.toml")]
        code = main(["doctor", *config, "--json"])
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        rows = {row["name"]: row for row in found["checks"]}
        failed = [name for name, row in rows.items() if not row["ok"]]
        assert list(rows) == NAMES
        assert (code, found["ok"], found["reason"]) == (1 if failed else 0, not failed, ", ".join(failed))
        assert rows["IPC between processes"]["result"] in ("ok", "warn")
        assert (rows["IPC across containers"]["result"], rows["etcd"]["result"]) == ("ok", "ok")
        assert rows["socket"]["found"].startswith(f"{daemon.socket} (mode 0660, ")
        assert rows["limits: nofile"]["found"].endswith("(the daemon)")
        assert main(["doctor", *config, "--strict"]) == (0 if found["result"] == "ok" else 1)
        assert capsys.readouterr().out.splitlines()[-1].split(" ok")[0].isdecimal()


def test_a_doctor_imports_nothing_heavy() -> None:
    """Neither torch nor grpc on a machine without GPUs and without etcd."""
    program = (
        "import sys; from refitd.cli import main; main(['doctor', '--socket', '/nonexistent/hook.sock']);"
        "print([name for name in ('torch', 'grpc', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stderr == ""
