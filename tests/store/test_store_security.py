"""Who is let in: mutual TLS, a user limited to the job's prefix, tokens that end; and secrets that are never shown."""

from __future__ import annotations

import pathlib
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import grpc
import pytest
import structlog
import trustme
from watching import Collector, insist

from refitd.errors import ConfigError, PermissionDenied, StoreError, StoreUnavailable, Unauthenticated, Untrusted
from refitd.store import CreateRevision, Deleted, DeleteOp, GetOp, Item, Put, PutOp, open_store
from refitd.store._etcd_endpoint import etcdrpc
from refitd.store.cluster import EtcdCluster, Tls
from refitd.testing import free_port

PASSWORD = "correct-horse-battery"


class Files:
    """Certificates: of an authority ``ca`` and a foreign one, for servers and clients."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        ours, theirs = trustme.CA(), trustme.CA()
        for name, ca in (("ca", ours), ("foreign", theirs)):
            ca.cert_pem.write_to_path(folder / f"{name}.pem")
        certificates = {
            "server": ours.issue_cert("127.0.0.1"),
            "elsewhere": ours.issue_cert("elsewhere.example"),
            "client": ours.issue_cert("refitd"),
            "stranger": theirs.issue_cert("refitd"),
        }
        for name, cert in certificates.items():
            cert.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
            cert.private_key_pem.write_to_path(folder / f"{name}.key")

    def __call__(self, name: str) -> str:
        return str(self.folder / name)

    def client(self, ca: str = "ca", name: str = "client") -> dict[str, str]:
        """The options of open_store."""
        pair = {"cert": self(f"{name}.pem"), "key": self(f"{name}.key")} if name else {}
        return {"ca": self(f"{ca}.pem")} | pair

    def server(self, name: str = "server") -> Tls:
        return Tls(self("ca.pem"), self(f"{name}.pem"), self(f"{name}.key"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(files: Files) -> Iterator[EtcdCluster]:
    """Three nodes that want a client certificate."""
    with EtcdCluster(3, tls=files.server()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def users() -> Iterator[EtcdCluster]:
    """One node whose user "daemon" may touch /refitd/ only, and whose tokens live 2 s without use."""
    with EtcdCluster(1, flags=["--auth-token-ttl=2", "--bcrypt-cost=4"]) as cluster:
        with grpc.insecure_channel(cluster.endpoints[0]) as channel:
            _add_users(etcdrpc.AuthStub(channel))
        yield cluster


@pytest.fixture
def login(tmp_path: pathlib.Path) -> dict[str, str]:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    return {"user": "daemon", "password_file": str(tmp_path / "password")}


def test_mutual_tls_over_three_nodes(secure: EtcdCluster, files: Files) -> None:
    """With our certificate everything works, and goes on when the node in use dies: each is checked by its own name."""
    store = open_store(secure.url, **files.client())
    lease = store.grant(30)
    revision = store.put("/tls/k", b"v", lease)
    collector = Collector(store.watch("/tls/", revision))
    collector.wait_for(1)
    dead = secure.endpoints.index(store.endpoint)  # type: ignore[attr-defined]
    secure.kill(dead)
    last = insist(store, "/tls/l", b"")
    assert collector.wait_for_revision(last) == [
        Put(Item("/tls/k", b"v", revision, revision, lease.id)),
        Put(Item("/tls/l", b"", last, last, 0)),
    ]
    assert lease.keepalive() == 30.0
    secure.restart(dead)
    store.close()
    collector.join()


@pytest.mark.parametrize(
    ("ca", "name", "reason"),
    [
        ("foreign", "client", "its certificate is refused: unable to get local issuer certificate"),
        ("ca", "", "TLS failed: .*ALERT_BAD_CERTIFICATE|TLS failed: .*CERTIFICATE_REQUIRED"),
        ("ca", "stranger", "TLS failed: .*ALERT_BAD_CERTIFICATE|TLS failed: .*UNKNOWN_CA"),
    ],
    ids=["wrong authority", "no client certificate", "client certificate of another authority"],
)
def test_the_wrong_party_is_refused_by_tls(secure: EtcdCluster, files: Files, ca: str, name: str, reason: str) -> None:
    """Calls of every kind and watches raise Untrusted, with the reason, after each node was asked once."""
    store = open_store(secure.url, request_timeout=10.0, **files.client(ca, name))
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("get", lambda: store.get("k")),
        ("put", lambda: store.put("k", b"")),
        ("txn", lambda: store.txn([CreateRevision("k", 0)], [PutOp("k", b"")])),
        ("grant", lambda: store.grant(5)),
        ("watch", lambda: next(store.watch("/", 1))),
    ]
    for kind, call in calls:
        with pytest.raises(Untrusted, match=rf"^etcd 127\.0\.0\.1:\d+: ({reason})"):
            call()
        assert store.counts.so_far()[kind] == 3
    store.close()


def test_a_server_with_another_name_is_refused(files: Files) -> None:
    """A good certificate of somebody else's host is not enough."""
    with EtcdCluster(1, tls=files.server("elsewhere")) as cluster:
        store = open_store(cluster.url, **files.client())
        with pytest.raises(Untrusted, match=r"its certificate is refused: .*127\.0\.0\.1"):
            store.put("k", b"")
        store.close()


def test_tls_and_plain_do_not_mix(secure: EtcdCluster, path_etcd: Any, files: Files) -> None:
    """A server without TLS is not spoken to, nor one with TLS without it: nothing was changed."""
    store = open_store(path_etcd.url, **files.client())
    with pytest.raises(StoreUnavailable, match="Handshake read failed"):
        store.put("k", b"")
    store.close()
    store = open_store(secure.url)
    with pytest.raises(StoreUnavailable, match="failed to connect"):
        store.put("k", b"")
    store.close()


def test_a_spawned_etcd_serves_others_by_certificate_only(files: Files) -> None:
    """An etcd of our own may serve other daemons: those with a certificate of the same authority, and nobody else."""
    listen = f"127.0.0.1:{free_port()}"
    tls = files.client(name="server")
    with closing(open_store("etcd+spawn://", listen=listen, **tls)) as ours:
        ours.put("/refitd/job/a", b"1")
        with closing(open_store(f"etcd://{listen}", **files.client())) as other:
            item = other.get("/refitd/job/a")
            assert item is not None
            assert item.value == b"1"
        for stranger in ({}, {"ca": files("ca.pem")}):
            other = open_store(f"etcd://{listen}", **stranger, request_timeout=1.0)
            with closing(other), pytest.raises((Untrusted, StoreUnavailable)):
                other.get("/refitd/job/a")


@pytest.mark.parametrize(
    ("url", "options", "got"),
    [
        ("etcd+spawn://", {}, "got only []"),
        ("etcd+spawn://", {"ca": "a", "cert": "b"}, "got only ['ca', 'cert']"),
        ("etcd+spawn://", {"ca": "a", "cert": "b", "key": "c", "user": "u"}, "got only ['user', 'ca', 'cert', 'key']"),
        ("etcd://h:1", {}, "got etcd://"),
        ("memory://", {}, "got memory://"),
    ],
)
def test_a_spawned_etcd_serves_nobody_in_clear(url: str, options: dict[str, str], got: str) -> None:
    """store.listen wants certificates, and an etcd to spawn."""
    with pytest.raises(ConfigError, match=rf"^store\.listen: expected .*{re.escape(got)}$"):
        open_store(url, listen="10.0.0.1:2379", **options)


def test_certificates_are_read_anew_after_a_refusal(secure: EtcdCluster, files: Files, tmp_path: pathlib.Path) -> None:
    """A certificate that is replaced on disk serves the store that is open."""
    paths = {"ca": files("ca.pem"), "cert": str(tmp_path / "c.pem"), "key": str(tmp_path / "c.key")}

    def install(name: str) -> None:
        shutil.copy(files(f"{name}.pem"), paths["cert"])
        shutil.copy(files(f"{name}.key"), paths["key"])

    install("stranger")
    store = open_store(secure.url, **paths)
    with pytest.raises(Untrusted):
        store.get("k")
    install("client")
    assert store.get("k") is None
    store.close()


def test_files_that_are_none_are_refused_by_name(files: Files, tmp_path: pathlib.Path) -> None:
    """Missing files, text that is no certificate and a key of another certificate are said before anything is sent."""
    (tmp_path / "text").write_text("none\n")
    text = str(tmp_path / "text")
    cases = [
        ({"ca": "/nowhere"}, r"store\.ca: expected a readable file, got '/nowhere'"),
        ({"ca": text}, r"store\.ca: expected certificates in PEM"),
        (files.client() | {"key": "/nowhere"}, r"store\.key: expected a readable file"),
        (files.client() | {"cert": text}, r"store\.cert: expected a certificate and its store\.key"),
        (files.client() | {"key": files("stranger.key")}, r"store\.cert: expected a certificate and its store\.key"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            open_store("etcd://127.0.0.1:1", **options)


def test_a_user_stays_below_its_prefix(users: EtcdCluster, login: dict[str, str]) -> None:
    """Inside everything works; outside every operation is PermissionDenied after one request, and a watch after two."""
    store = open_store(users.url, **login)
    lease = store.grant(30)
    revision = store.put("/refitd/job/k", b"v", lease)
    watch = store.watch("/refitd/", revision)
    assert next(watch) == Put(Item("/refitd/job/k", b"v", revision, revision, lease.id))
    assert store.txn([CreateRevision("/refitd/l", 0)], [PutOp("/refitd/l", b"")], [GetOp("/refitd/l")]).ok
    calls: list[tuple[str, int, Callable[[], Any]]] = [
        ("get", 1, lambda: store.get("/other/k")),
        ("list", 1, lambda: store.list("/refit")),  # wider than what is allowed
        ("list", 1, lambda: store.list("")),
        ("put", 1, lambda: store.put("/other/k", b"")),
        ("txn", 1, lambda: store.txn([CreateRevision("/other/k", 0)], [PutOp("/refitd/k", b"")])),
        ("txn", 1, lambda: store.txn((), [PutOp("/refitd/k", b""), PutOp("/other/k", b"")])),
        ("txn", 1, lambda: store.txn((), [DeleteOp("/other/k")])),
        ("watch", 2, lambda: next(store.watch("/other/", revision))),
        ("list", 1, lambda: next(store.watch("/other/"))),
    ]
    for kind, number, call in calls:
        before = store.counts.so_far()
        with pytest.raises(PermissionDenied, match="permission denied"):
            call()
        asked = store.counts.so_far() - before
        assert asked[kind] == number
        assert asked.total() <= number + 1  # a watch logs in once more before it believes
    assert store.get("/refitd/k") is None
    lease.revoke()
    store.txn((), [DeleteOp("/refitd/l")])
    store.close()


def test_tokens_end_and_are_renewed(users: EtcdCluster, login: dict[str, str]) -> None:
    """After its time without use a token is gone: calls and watches log in again by themselves, once."""
    store = open_store(users.url, **login)
    revision = store.put("/refitd/k", b"1")
    assert store.counts.so_far()["login"] == 1
    time.sleep(4.5)
    assert store.put("/refitd/k", b"2") == revision + 1
    assert store.counts.so_far()["login"] == 2
    time.sleep(4.5)
    watch = store.watch("/refitd/k", revision + 1)
    assert next(watch) == Put(Item("/refitd/k", b"2", revision, revision + 1, 0))
    assert store.counts.so_far()["login"] == 3
    last = store.txn((), [DeleteOp("/refitd/k")]).revision
    assert next(watch) == Deleted("/refitd/k", last)
    store.close()


def test_a_wrong_password_is_tried_once(users: EtcdCluster, login: dict[str, str]) -> None:
    """No call and no watch hammers a server that refuses the password; one that is mended works at once."""
    pathlib.Path(login["password_file"]).write_text("wrong\n")
    store = open_store(users.url, **login)
    for number, call in enumerate((lambda: store.get("/refitd/k"), lambda: next(store.watch("/refitd/", 1))), 1):
        with pytest.raises(Unauthenticated, match="authentication failed"):
            call()
        assert store.counts.so_far() == {"login": number}
    pathlib.Path(login["password_file"]).write_text(PASSWORD + "\n")
    assert store.get("/refitd/none") is None
    store.close()


def test_a_permission_that_is_taken_away_ends_calls_and_watches(users: EtcdCluster, tmp_path: pathlib.Path) -> None:
    """A role that loses the prefix: the next call, and a watch that has to come back, are refused and end."""
    with grpc.insecure_channel(users.endpoints[0]) as channel:
        auth = etcdrpc.AuthStub(channel)
        root = auth.Authenticate(etcdrpc.AuthenticateRequest(name="root", password="r")).token
        _add_user(auth, "short", "s", b"/short/", (("token", root),))
        (tmp_path / "p").write_text("s")
        store = open_store(users.url, user="short", password_file=str(tmp_path / "p"))
        revision = store.put("/short/k", b"")
        collector = Collector(store.watch("/short/", revision))
        collector.wait_for(1)
        root = auth.Authenticate(etcdrpc.AuthenticateRequest(name="root", password="r")).token
        request = etcdrpc.AuthRoleRevokePermissionRequest(role="short", key=b"/short/", range_end=b"/short0")
        auth.RoleRevokePermission(request, metadata=(("token", root),))
    with pytest.raises(PermissionDenied):
        store.get("/short/k")
    collector.watch._stream.endpoint.drop_streams()
    collector.join(10)
    assert isinstance(collector.error, PermissionDenied)
    store.close()


def test_secrets_are_never_shown(users: EtcdCluster, login: dict[str, str]) -> None:
    """Neither password nor token is in a repr, an error with all its causes, or a log; a URL with one is not echoed."""
    store = open_store(f"etcd://127.0.0.1:1,{users.endpoints[0]}", **login)
    with structlog.testing.capture_logs() as logs:
        store.put("/refitd/secret", b"")
        token = store._channel.login._token  # type: ignore[attr-defined]
        errors = [_error(lambda: store.put("/other/k", b"")), _error(lambda: next(store.watch("/other/", 1)))]
        pathlib.Path(login["password_file"]).write_text("wrong-battery")
        store._channel.login._token = "stale"  # type: ignore[attr-defined]
        errors.append(_error(lambda: store.get("/refitd/k")))
        for endpoint in store._channel._endpoints:  # type: ignore[attr-defined]
            store._channel.blame(endpoint, "test")  # type: ignore[attr-defined]
    errors += [_error(partial(open_store, url)) for url in (f"etcd://daemon:{PASSWORD}@h:1", f"http://d:{PASSWORD}@h")]
    channel: Any = store._channel  # type: ignore[attr-defined]
    shown = [repr(store), repr(channel), repr(channel.login), repr(channel.login._credentials), repr(logs)]
    shown += [repr(vars(channel.endpoint)), *errors]
    assert len(logs) >= 2
    assert token
    for text in shown:
        for secret in (PASSWORD, "wrong-battery", token):
            assert secret not in text
    store.close()


def _error(call: Callable[[], Any]) -> str:
    """The error as a traceback shows it, causes and all."""
    try:
        call()
    except (StoreError, ConfigError) as error:
        lines = traceback.format_exception(error, chain=True)
        return "".join([*lines, repr(error), repr(error.__cause__), repr(error.__context__)])
    raise AssertionError("it did not fail")


def _add_users(auth: Any) -> None:
    _add_user(auth, "root", "r", b"")
    _add_user(auth, "daemon", PASSWORD, b"/refitd/")
    auth.AuthEnable(etcdrpc.AuthEnableRequest())


def _add_user(auth: Any, name: str, password: str, prefix: bytes, metadata: Any = ()) -> None:
    auth.UserAdd(etcdrpc.AuthUserAddRequest(name=name, password=password), metadata=metadata)
    auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name=name), metadata=metadata)
    auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=name, role=name), metadata=metadata)
    if prefix:
        permission = {"permType": 2, "key": prefix, "range_end": prefix[:-1] + b"0"}
        request = etcdrpc.AuthRoleGrantPermissionRequest(name=name, perm=permission)
        auth.RoleGrantPermission(request, metadata=metadata)
