"""etcd that freezes, dies, comes back, comes back empty, or forgets who we are."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from watching import Collector

from refitd.errors import ConfigError, PermissionDenied, StoreTimeout, StoreUnavailable, Unauthenticated
from refitd.store import (
    Deleted,
    DeleteOp,
    Item,
    Put,
    Resync,
    _etcd_endpoint,
    _etcd_watch,
    below,
    open_store,
    spawn,
    spawn_etcd,
)
from refitd.store._etcd_codec import key_range
from refitd.store._etcd_endpoint import Credentials, Endpoint, etcdrpc, parse_addresses
from refitd.store._etcd_errors import translate
from refitd.store.spawn import EtcdProcess, SpawnedStore, find_etcd


@pytest.fixture
def own_etcd() -> Iterator[EtcdProcess]:
    """An etcd that a test may freeze."""
    process = spawn_etcd(prefer="distro")
    yield process
    process.stop()


@pytest.fixture
def data(tmp_path: pathlib.Path) -> Iterator[str]:
    """A data folder that is deleted at once: etcd preallocates 123 MB."""
    yield str(tmp_path / "etcd")
    shutil.rmtree(tmp_path / "etcd", ignore_errors=True)


def test_a_frozen_etcd_is_a_timeout(own_etcd: EtcdProcess) -> None:
    """Reads and writes raise StoreTimeout within the request timeout, and work again when etcd does."""
    store = open_store(own_etcd.url, request_timeout=0.5)
    store.put("k", b"before")
    own_etcd.freeze()
    try:
        for call in (lambda: store.put("k", b"frozen"), lambda: store.get("k"), lambda: store.grant(5)):
            start = time.monotonic()
            with pytest.raises(StoreTimeout):
                call()
            assert 0.4 < time.monotonic() - start < 2
    finally:
        own_etcd.thaw()
    item = store.get("k")
    assert item is not None
    assert item.value in (b"before", b"frozen")
    store.close()


def test_a_watch_goes_on_where_it_was_when_etcd_is_killed_and_restarted(data: str) -> None:
    """Every event is seen once and in order over a kill and a restart on the same data."""
    first = spawn_etcd(data, prefer="distro", fsync=True)
    store = open_store(first.url)
    collector = Collector(store.watch("/w/", 1))
    revisions = [store.put(f"/w/{n}", b"") for n in range(20)]
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    with pytest.raises((StoreUnavailable, StoreTimeout)):  # gRPC may not know yet that the server is gone
        store.put("/w/away", b"")
    second = spawn_etcd(data, prefer="distro", port=first.port, fsync=True)
    revisions += [_put_when_back(store, f"/w/{n}") for n in range(20, 40)]
    events = list(collector.wait_for(40))
    store.close()
    collector.join()
    second.stop()
    assert events == [Put(Item(f"/w/{n}", b"", r, r, 0)) for n, r in enumerate(revisions)]


def test_a_watch_resyncs_after_a_long_outage(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage longer than the limit the watch gives the whole state anew."""
    monkeypatch.setattr(_etcd_watch, "RESYNC_AFTER", 0.0)
    first = spawn_etcd(data, prefer="distro", fsync=True)
    store = open_store(first.url)
    revision = store.put("/w/a", b"")
    collector = Collector(store.watch("/w/", revision))
    collector.wait_for(1)
    first.stop()
    second = spawn_etcd(data, prefer="distro", port=first.port, fsync=True)
    events = list(collector.wait_for(2))
    store.close()
    collector.join()
    second.stop()
    item = Item("/w/a", b"", revision, revision, 0)
    assert events == [Put(item), Resync((item,), revision)]


def test_a_watch_notices_an_etcd_that_was_set_up_anew(own_etcd: EtcdProcess) -> None:
    """When etcd comes back without its history, the watch gives the new, empty state."""
    store = open_store(own_etcd.url)
    revisions = [store.put(f"/w/{n}", b"") for n in range(5)]
    collector = Collector(store.watch("/w/", revisions[-1]))
    collector.wait_for(1)
    own_etcd.stop()
    other = spawn_etcd(prefer="distro", port=own_etcd.port)
    events = list(collector.wait_for(2))
    store.close()
    collector.join()
    other.stop()
    assert events[1:] == [Resync((), 1)]


def test_etcd_does_not_hang_up_on_a_store_that_is_idle(
    path_etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It counts pings without a call as abuse: a message on stderr, and gRPC pings half as often from then on.

    Thirty times as fast as we ping, for the third ping is one too many.
    """
    often = {**dict(_etcd_endpoint._OPTIONS), "grpc.keepalive_time_ms": 300}
    monkeypatch.setattr(_etcd_endpoint, "_OPTIONS", tuple(often.items()))
    with contextlib.closing(open_store(path_etcd.url)) as store:
        assert store.get("idle") is None
        time.sleep(3)
        assert store.get("idle") is None
    assert "too_many_pings" not in capfd.readouterr().err


def test_a_spawned_etcd_forgets_history(path_etcd: EtcdProcess) -> None:
    """By itself it keeps every write for ever, until it is full and refuses all."""
    told = pathlib.Path(f"/proc/{path_etcd.pid}/cmdline").read_text().split("\0")
    assert {"--auto-compaction-mode=periodic", "--auto-compaction-retention=5m"} <= set(told)


def test_reads_wait_out_a_short_absence() -> None:
    """A read is repeated while etcd is away, for no longer than the request timeout."""
    store = open_store("etcd://127.0.0.1:1", request_timeout=2.0)
    start = time.monotonic()
    with pytest.raises(StoreUnavailable, match="Connection refused"):
        store.get("k")
    assert 1.5 < time.monotonic() - start < 10
    with pytest.raises(StoreUnavailable, match="Connection refused"):
        store.put("k", b"")
    store.close()


def test_retries_leave_the_programs_chance_alone() -> None:
    """A program that seeded ``random`` draws the same numbers with a store in trouble as without one."""
    before = random.getstate()
    store = open_store("etcd://127.0.0.1:1,127.0.0.1:2", request_timeout=3.0)
    with pytest.raises(StoreUnavailable, match="Connection refused"):
        store.get("k")
    store.close()
    assert random.getstate() == before


def test_another_address_serves_when_one_is_dead(path_etcd: EtcdProcess) -> None:
    """With several addresses, calls and watches go to one that answers."""
    store = open_store(f"etcd://127.0.0.1:1,127.0.0.1:{path_etcd.port}")
    revision = store.put("/several/k", b"")
    assert next(store.watch("/several/", revision)) == Put(Item("/several/k", b"", revision, revision, 0))
    store.txn((), [DeleteOp("/several/k")])
    store.close()


def test_nothing_is_left_after_close(path_etcd: EtcdProcess) -> None:
    """Opening, watching and closing leaves no thread and no descriptor behind."""
    threads = threading.active_count()
    _use(path_etcd.url)  # grpc keeps a few descriptors from its first use on
    _settle(threads, 0)
    descriptors = _descriptors()
    for _ in range(5):
        _use(path_etcd.url)
    _settle(threads, descriptors)
    assert threading.active_count() <= threads
    assert _descriptors() <= descriptors  # fewer, where what an earlier test left to be collected goes meanwhile


def test_a_spawned_store_ends_its_etcd_and_deletes_its_data() -> None:
    """etcd+spawn:// works at once, and close() leaves neither process nor folder."""
    store = open_store("etcd+spawn://")
    assert isinstance(store, SpawnedStore)
    assert store.put("k", b"v") == 2
    pid, folder = store.process.pid, store.process.data
    assert folder.exists()
    store.close()
    assert not folder.exists()
    assert not pathlib.Path(f"/proc/{pid}").exists()


def test_folders_of_the_dead_are_deleted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder whose owner was killed goes with the next spawn; one in use stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(spawn, "_FRESH", -1.0)
    dead = spawn_etcd(prefer="distro")
    alive = spawn_etcd(prefer="distro")
    os.kill(dead.pid, signal.SIGKILL)
    while dead.running:
        time.sleep(0.01)
    third = spawn_etcd(prefer="distro")
    assert sorted(tmp_path.iterdir()) == sorted([alive.data, third.data])
    for process in (dead, alive, third):
        process.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_is_kept(data: str) -> None:
    """A spawned etcd with a data folder finds its keys again, on another port."""
    for value in (None, b"v"):
        store = open_store(f"etcd+spawn://{data}")
        item = store.get("k")
        assert (item.value if item else None) == value
        store.put("k", b"v")
        store.close()


def test_an_etcd_that_cannot_start_is_said(tmp_path: pathlib.Path) -> None:
    """A data folder that cannot be made gives StoreUnavailable, soon."""
    (tmp_path / "file").write_text("")
    start = time.monotonic()
    with pytest.raises(StoreUnavailable, match="did not become healthy"):
        spawn_etcd(str(tmp_path / "file" / "data"), prefer="distro")
    assert time.monotonic() - start < 10


def test_a_missing_etcd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any etcd program the error names the packages."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="apt install etcd-server"):
        find_etcd()


def test_the_child_dies_with_its_parent(tmp_path: pathlib.Path) -> None:
    """A parent that is killed takes its etcd along."""
    code = (
        "import sys, time; from refitd.store import spawn_etcd; "
        "print(spawn_etcd(sys.argv[1], 'distro').pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "d")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _alive(pid)
        parent.kill()
    deadline = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(tmp_path / "d", ignore_errors=True)
    assert not _alive(pid)


def test_users_and_tokens(data: str, tmp_path: pathlib.Path) -> None:
    """A wrong password, a foreign key and a token that a restart made stale each end as they should."""
    (tmp_path / "good").write_text("secret\n")
    (tmp_path / "bad").write_text("other\n")
    first = spawn_etcd(data, prefer="distro", fsync=True)
    _enable_users(first.port)
    for url, options in ((first.url, {"user": "daemon", "password_file": str(tmp_path / "bad")}), (first.url, {})):
        stranger = open_store(url, **options)
        with pytest.raises(Unauthenticated):
            stranger.put("/refitd/k", b"")
        stranger.close()
    store = open_store(first.url, user="daemon", password_file=str(tmp_path / "good"))
    revision = store.put("/refitd/k", b"1")
    with pytest.raises(PermissionDenied):
        store.put("/other/k", b"")
    with pytest.raises(PermissionDenied):
        next(store.watch("/other/", revision))
    first.stop()
    second = spawn_etcd(data, prefer="distro", port=first.port, fsync=True)
    watch = store.watch("/refitd/", revision)
    assert next(watch) == Put(Item("/refitd/k", b"1", revision, revision, 0))
    last = store.txn((), [DeleteOp("/refitd/k")]).revision
    assert next(watch) == Deleted("/refitd/k", last)
    store.close()
    second.stop()


def test_a_password_file_that_is_missing_is_said(path_etcd: EtcdProcess) -> None:
    """An unreadable password file names the key of the configuration."""
    store = open_store(path_etcd.url, user="daemon", password_file="/nowhere/p")
    with pytest.raises(ConfigError, match=r"store\.password_file: expected a readable file, got '/nowhere/p'"):
        store.get("k")
    store.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cert": "c", "key": "k"}, "store.cert"),
        ({"ca": "a", "cert": "c"}, "store.cert"),
        ({"ca": "a", "key": "k"}, "store.cert"),
        ({"password_file": "p"}, "store.user"),
    ],
)
def test_half_of_the_credentials_is_refused(options: dict[str, str], field: str) -> None:
    """A certificate without its key or authority, or a password without its user, is refused at once."""
    with pytest.raises(ConfigError) as caught:
        open_store("etcd://127.0.0.1:2379", **options)
    assert caught.value.field == field


@pytest.mark.parametrize("url", ["memory://", "etcd+spawn://"])
@pytest.mark.parametrize("name", ["user", "password_file", "ca", "cert", "key"])
def test_credentials_without_a_cluster_are_refused(url: str, name: str) -> None:
    """A store that would ignore them says so, before anything is started."""
    with pytest.raises(ConfigError) as caught:
        open_store(url, **{name: "x"})
    assert str(caught.value) == f"store.{name}: expected an etcd:// URL that it is for, got {url}"


def test_grpc_is_imported_for_etcd_only() -> None:
    """The store's protocol and the memory store come without grpc and etcd3."""
    code = "import sys; from refitd.store import open_store; open_store('memory://'); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"grpc", "etcd3", "google.protobuf", "tenacity", "torch"} & set(modules)
    assert "refitd.store.memory" in modules


@pytest.mark.parametrize(
    ("code", "detail", "write", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", True, StoreUnavailable),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader", True, StoreUnavailable),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", True, StoreTimeout),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out", True, StoreTimeout),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", False, StoreUnavailable),
        (grpc.StatusCode.CANCELLED, "", True, StoreTimeout),
        (grpc.StatusCode.INTERNAL, "", False, StoreUnavailable),
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", True, PermissionDenied),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty", False, Unauthenticated),
    ],
)
def test_what_an_error_says_about_the_outcome(code: Any, detail: str, write: bool, error: type[Exception]) -> None:
    """A write whose answer was lost is StoreTimeout (unknown), never StoreUnavailable (nothing changed)."""

    class Failure(grpc.RpcError):
        def code(self) -> Any:
            return code

        def details(self) -> str:
            return detail

    assert type(translate(Failure(), write)) is error


def test_addresses() -> None:
    """Literal addresses are given to gRPC as such, names are resolved by it; a name that is none is said."""
    assert parse_addresses("10.0.0.1:2379,[::1]:1") == [("10.0.0.1", 2379), ("::1", 1)]
    targets = [Endpoint(host, 1, Credentials())._target() for host in ("10.0.0.1", "::1", "etcd-0.example")]
    assert targets == ["ipv4:10.0.0.1:1", "ipv6:[::1]:1", "dns:///etcd-0.example:1"]
    store = open_store("etcd://nowhere.invalid:1", request_timeout=0.5)
    with pytest.raises(StoreUnavailable, match=r"nowhere\.invalid"):
        store.put("k", b"")
    store.close()


@pytest.mark.parametrize("url", ["etcd://", "etcd://host", "etcd://host:0", "etcd://a:1,b", "http://a:1", "memory://x"])
def test_urls_that_are_none(url: str) -> None:
    """A URL that is none of ours is refused by name."""
    with pytest.raises(ConfigError, match=r"store\.url: expected .*etcd://host:port"):
        open_store(url)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [("a/", (b"a/", b"a0")), ("", (b"\0", b"\0")), ("z", (b"z", b"{"))],
)
def test_the_range_of_a_prefix(prefix: str, expected: tuple[bytes, bytes]) -> None:
    """The range end is the first key after all keys with the prefix."""
    assert key_range(below(prefix)) == expected


def _put_when_back(store: Any, key: str) -> int:
    deadline = time.monotonic() + 5
    while True:
        try:
            return int(store.put(key, b""))
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _use(url: str) -> None:
    store = open_store(url)
    watch = store.watch("/use/", 0)
    assert isinstance(next(watch), Resync)
    store.put("/use/k", b"", store.grant(5))
    assert isinstance(next(watch), Put)
    store.close()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _settle(threads: int, descriptors: int) -> None:
    """grpc's threads end a moment after the channel was closed."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and (threading.active_count() > threads or _descriptors() > descriptors):
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def _enable_users(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        auth = etcdrpc.AuthStub(channel)
        for name, password in (("root", "r"), ("daemon", "secret")):
            auth.UserAdd(etcdrpc.AuthUserAddRequest(name=name, password=password))
            auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name=name))
            auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=name, role=name))
        permission = {"permType": 2, "key": b"/refitd/", "range_end": b"/refitd0"}
        auth.RoleGrantPermission(etcdrpc.AuthRoleGrantPermissionRequest(name="daemon", perm=permission))
        auth.AuthEnable(etcdrpc.AuthEnableRequest())


@pytest.mark.parametrize(
    "words", ["Cannot invoke RPC on closed channel!", "Cannot invoke RPC: Channel closed!"], ids=["before", "meanwhile"]
)
def test_a_channel_that_closes_under_a_call_is_an_absence_of_the_store(words: str) -> None:
    """gRPC says it in two ways, as a ValueError; any other is a fault of ours and is not hidden."""
    store = open_store("etcd://127.0.0.1:1")

    def call(said: str) -> None:
        def start(_stubs: object, _metadata: object) -> None:
            raise ValueError(said)

        store._channel.stream("watch", start)  # type: ignore[attr-defined]

    with pytest.raises(StoreUnavailable, match="the connection was just closed"):
        call(words)
    with pytest.raises(ValueError, match="something else"):
        call("something else")
    store.close()
    with pytest.raises(StoreUnavailable, match="the store was closed"):
        call(words)
