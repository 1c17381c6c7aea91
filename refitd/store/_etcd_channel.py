"""One channel to an etcd cluster: addresses, credentials, and etcd's errors turned into ours."""

from __future__ import annotations

import pathlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from refitd.errors import (
    ConfigError,
    LeaseLost,
    PermissionDenied,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    Unauthenticated,
)
from refitd.store import _etcd3_compat

_etcd3_compat.install()

import etcd3  # noqa: E402 - importable only after install()
from etcd3 import etcdrpc as etcdrpc  # noqa: E402

# A frozen server is noticed in 11 s only with http2.ping_timeout_ms; a keepalive below 5 s makes etcd hang up.
_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
# A write that ended with UNAVAILABLE for one of these reasons never reached the log.
_NOTHING_WRITTEN = (
    "failed to connect",
    "connections to all backends failing",
    "connection refused",
    "no leader",
    "dns resolution failed",
)
_BAD_CREDENTIALS = ("authentication failed", "user name is empty", "auth", "invalid auth token")
_UNKNOWN_OUTCOME = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to be let in. ``ca``, ``cert``, ``key``: PEM files; ``password_file`` ends in at most one newline."""

    user: str = ""
    password_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        """Refuse halves. Raises ConfigError."""
        if bool(self.cert) != bool(self.key) or (self.cert and not self.ca):
            given = [name for name in ("ca", "cert", "key") if getattr(self, name)]
            raise ConfigError("store.cert", "store.ca, or store.ca with store.cert and store.key", f"only {given}")
        if self.password_file and not self.user:
            raise ConfigError("store.user", "the user that store.password_file belongs to", "none")

    def password(self) -> str:
        """The password, read anew so that it may be rotated. Raises ConfigError."""
        return _read("store.password_file", self.password_file).removesuffix("\n")


def _read(field: str, path: str) -> str:
    try:
        return pathlib.Path(path).read_text()
    except OSError as error:
        raise ConfigError(field, "a readable file", f"{path!r} ({error.strerror})") from error


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """``host:port,[v6]:port`` as pairs. Raises ConfigError naming store.url."""
    pairs = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError("store.url", "etcd://host:port[,host:port]", repr(f"etcd://{text}"))
        pairs.append((host.strip("[]"), int(port)))
    return pairs


def resolve(addresses: list[tuple[str, int]]) -> str:
    """One gRPC target for all addresses, IPv4 where there is one. Raises StoreUnavailable."""
    found: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    reasons = []
    for host, port in addresses:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            reasons.append(f"{host}: {error}")
            continue
        for family, _, _, _, address in answers:
            text = f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
            if family in found and text not in found[family]:
                found[family].append(text)
    if found[socket.AF_INET]:
        return "ipv4:" + ",".join(found[socket.AF_INET])
    if found[socket.AF_INET6]:
        return "ipv6:" + ",".join(found[socket.AF_INET6])
    raise StoreUnavailable(f"no etcd address resolves: {'; '.join(reasons)}")


def translate(error: grpc.RpcError, write: bool) -> StoreError:
    """Our error for one of gRPC's; ``write``: an answer that was lost may hide a change."""
    code, detail = error.code(), error.details() or ""
    text = f"etcd: {detail or code.name}"
    lower = detail.lower()
    if code is grpc.StatusCode.UNAUTHENTICATED or (
        code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
        and any(mark in lower for mark in _BAD_CREDENTIALS)
    ):
        return Unauthenticated(text)
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return PermissionDenied(text)
    if code is grpc.StatusCode.NOT_FOUND:
        return LeaseLost(text)
    if code is grpc.StatusCode.UNAVAILABLE:
        known = not write or any(mark in lower for mark in _NOTHING_WRITTEN)
        return StoreUnavailable(text) if known else StoreTimeout(text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED or (write and code in _UNKNOWN_OUTCOME):
        return StoreTimeout(text)
    return StoreUnavailable(text) if code in _UNKNOWN_OUTCOME else StoreError(text)


class Channel:
    """The channel, opened at its first use; it logs in again when the token is refused."""

    def __init__(self, addresses: list[tuple[str, int]], credentials: Credentials, timeout: float) -> None:
        self._addresses, self._credentials, self.timeout = addresses, credentials, timeout
        self._lock = threading.Lock()
        self._client: Any = None
        self._token: str | None = None
        self._closed = False

    def call(self, stub: str, method: str, request: Any, *, write: bool, timeout: float | None = None) -> Any:
        """One unary call. Raises a StoreError."""
        timeout = self.timeout if timeout is None else timeout
        return self.use(
            lambda client, meta: getattr(getattr(client, stub), method)(request, timeout, metadata=meta), write
        )

    def use(self, action: Callable[[Any, tuple[tuple[str, str], ...]], Any], write: bool) -> Any:
        """Run ``action(client, metadata)``, once more with a new token when the old one is refused."""
        token = self._token
        try:
            return self._try(action, write)
        except Unauthenticated:
            if not self._credentials.user:
                raise
            self.forget_token(token)
            return self._try(action, write)

    def forget_token(self, token: str | None) -> None:
        """Log in again at the next call, unless another thread has done so since ``token`` was used."""
        with self._lock:
            if self._token == token:
                self._token = None

    @property
    def token(self) -> str | None:
        """The token in use, None before the first login."""
        return self._token

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def has_user(self) -> bool:
        """Whether there is somebody to log in as."""
        return bool(self._credentials.user)

    def close(self) -> None:
        """Close the sockets; calls in flight end, later ones raise StoreUnavailable."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _try(self, action: Callable[[Any, tuple[tuple[str, str], ...]], Any], write: bool) -> Any:
        try:
            client, metadata = self._ready()
            return action(client, metadata)
        except grpc.RpcError as error:
            raise translate(error, write) from error
        except ValueError as error:  # gRPC's answer to a call on a closed channel
            if not self._closed:
                raise
            raise StoreUnavailable("the store was closed") from error

    def _ready(self) -> tuple[Any, tuple[tuple[str, str], ...]]:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store was closed")
            if self._client is None:
                self._client = self._connect()
            if self._credentials.user and self._token is None:
                self._token = self._login(self._client)
            token = (("token", self._token),) if self._token else ()
            # Without this a member that lost its quorum keeps watches silently.
            return self._client, (*token, ("hasleader", "true"))

    def _connect(self) -> Any:
        host, _, port = resolve(self._addresses).rpartition(":")
        credentials, options = self._credentials, list(_OPTIONS)
        if credentials.ca:
            options.append(("grpc.ssl_target_name_override", self._addresses[0][0]))
        try:
            return etcd3.client(
                host=host,
                port=int(port),
                ca_cert=credentials.ca or None,
                cert_cert=credentials.cert or None,
                cert_key=credentials.key or None,
                timeout=self.timeout,
                grpc_options=options,
            )
        except OSError as error:
            raise ConfigError("store.ca, store.cert, store.key", "readable files", str(error)) from error

    def _login(self, client: Any) -> str:
        request = etcdrpc.AuthenticateRequest(name=self._credentials.user, password=self._credentials.password())
        reply = etcdrpc.AuthStub(client.channel).Authenticate(request, self.timeout)
        return str(reply.token)
