"""One etcd server: its address, the gRPC channel to it, and who we are there."""

from __future__ import annotations

import pathlib
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any

import grpc

from refitd.errors import ConfigError, StoreUnavailable
from refitd.store import _etcd3_compat

_etcd3_compat.install()

from etcd3 import etcdrpc as etcdrpc  # noqa: E402 - importable only after install()

Metadata = tuple[tuple[str, str], ...]

# A watch notices a frozen server in 11 s, and only with http2.ping_timeout_ms; a call has a deadline of its own. etcd
# hangs up on who pings more often than every 5 s, or while no call is open. A list may be larger than gRPC's 4 MiB.
# min_reconnect_backoff is the time that a connection gets.
_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
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
        """Refuse halves, and files that are none. Raises ConfigError."""
        if bool(self.cert) != bool(self.key) or (self.cert and not self.ca):
            given = [name for name in ("ca", "cert", "key") if getattr(self, name)]
            raise ConfigError("store.cert", "store.ca, or store.ca with store.cert and store.key", f"only {given}")
        if self.password_file and not self.user:
            raise ConfigError("store.user", "the user that store.password_file belongs to", "none")
        if self.ca:
            self.context()

    def password(self) -> str:
        """The password, read anew so that it may be rotated. Raises ConfigError."""
        return _read("store.password_file", self.password_file).decode().removesuffix("\n")

    def context(self) -> ssl.SSLContext:
        """These files in Python's words: to check them, and to ask why a handshake failed. Raises ConfigError."""
        for name in ("ca", "cert", "key"):
            if getattr(self, name):
                _read(f"store.{name}", getattr(self, name))
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError as error:
            raise ConfigError("store.ca", "certificates in PEM", f"{self.ca!r} ({error})") from error
        try:
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except ssl.SSLError as error:
            raise ConfigError("store.cert", "a certificate and its store.key", f"{self.cert!r} ({error})") from error
        context.set_alpn_protocols(["h2"])
        return context

    def channel(self) -> grpc.ChannelCredentials:
        """These files in gRPC's words, read anew so that they may be rotated. Raises ConfigError."""
        cert, key = (_read("store.cert", self.cert), _read("store.key", self.key)) if self.cert else (None, None)
        return grpc.ssl_channel_credentials(_read("store.ca", self.ca), key, cert)


def _read(field: str, path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(field, "a readable file", f"{path!r} ({error.strerror})") from error


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """``host:port,[v6]:port`` as pairs. Raises ConfigError naming store.url."""
    pairs = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if "@" in part:  # what stands before it may be a password
            raise ConfigError("store.url", "no user or password (use store.user, store.password_file)", "one with '@'")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError("store.url", "etcd://host:port[,host:port]", repr(f"etcd://{text}"))
        pairs.append((host.strip("[]"), int(port)))
    return pairs


@dataclass(frozen=True, slots=True)
class Stubs:
    """etcd's services over one gRPC channel."""

    channel: grpc.Channel
    kv: Any
    lease: Any
    auth: Any
    watch: Any


class Endpoint:
    """The channel to ``address``, opened at its first use. Streams over it can be ended together."""

    def __init__(self, host: str, port: int, credentials: Credentials) -> None:
        self.host, self.port, self._credentials = host, port, credentials
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.failed_at = 0.0  # monotonic, of the last failure
        self._lock = threading.Lock()
        self._stubs: Stubs | None = None
        self._streams: set[Any] = set()
        self._closed = False

    def stubs(self) -> Stubs:
        """The services, over an open channel. Raises ConfigError for files, StoreUnavailable after close()."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store was closed")
            if self._stubs is None:
                self._stubs = self._open()
            return self._stubs

    def hold(self, stream: Any) -> None:
        """Remember a running stream."""
        with self._lock:
            self._streams.add(stream)

    def release(self, stream: Any) -> None:
        """End a stream."""
        with self._lock:
            self._streams.discard(stream)
        stream.cancel()

    def drop_streams(self) -> None:
        """End all streams; their readers go elsewhere."""
        with self._lock:
            streams, self._streams = self._streams, set()
        for stream in streams:
            stream.cancel()

    def close(self, for_good: bool = True) -> None:
        """Close the sockets. ``for_good=False``: the next use connects anew, with the certificates as they are then."""
        with self._lock:
            self._closed = self._closed or for_good
            stubs, self._stubs = self._stubs, None
        if stubs is not None:
            stubs.channel.close()

    def distrust(self, seconds: float) -> str:
        """Why TLS fails here, '' where it does not: gRPC says no more than that it could not connect."""
        if not self._credentials.ca:
            return ""
        context = self._credentials.context()
        try:
            raw = socket.create_connection((self.host, self.port), timeout=seconds)
            with raw, context.wrap_socket(raw, server_hostname=self.host) as sock:
                sock.settimeout(min(seconds, 0.2))
                sock.recv(1)  # TLS 1.3: the server judges our certificate after our side of the handshake
        except ssl.SSLCertVerificationError as error:
            return f"its certificate is refused: {error.verify_message}"
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return ""  # it went away meanwhile
        except ssl.SSLError as error:
            return f"TLS failed: {error.reason or error}"
        except OSError:
            return ""
        return ""

    def _open(self) -> Stubs:
        if self._credentials.ca:
            channel = grpc.secure_channel(self._target(), self._credentials.channel(), options=_OPTIONS)
        else:
            channel = grpc.insecure_channel(self._target(), options=_OPTIONS)
        services = (etcdrpc.KVStub, etcdrpc.LeaseStub, etcdrpc.AuthStub, etcdrpc.WatchStub)
        return Stubs(channel, *(service(channel) for service in services))

    def _target(self) -> str:
        """Literal addresses are given as such: gRPC then checks them against the certificate's addresses."""
        for scheme, family in (("ipv4", socket.AF_INET), ("ipv6", socket.AF_INET6)):
            try:
                socket.inet_pton(family, self.host)
            except OSError:
                continue
            return f"{scheme}:{self.address}"
        return f"dns:///{self.address}"
