"""The way to an etcd cluster: one server is asked at a time, the next one when it fails or does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog
import tenacity

from refitd.errors import StoreError, StoreTimeout, StoreUnavailable, Unauthenticated, Untrusted
from refitd.store._chance import CHANCE
from refitd.store._etcd_endpoint import Credentials, Endpoint, Metadata, Stubs, parse_addresses
from refitd.store._etcd_errors import translate
from refitd.store._etcd_login import Login
from refitd.store.base import Counts

Action = Callable[[Stubs, float, Metadata], Any]
LEAST = 0.05  # seconds that a last attempt is given
_PAUSE = (0.05, 0.2)  # seconds between rounds over all servers
_PROBE = 1.0  # seconds that finding out why TLS fails may take
_CLOSED = ("closed channel", "Channel closed")  # before the call began, and while it did


class Attempts:
    """The servers that one call has asked, and the time that it has left.

    A call that may be repeated gives each server an equal share, so that one that is frozen leaves time for the
    others; one that may not waits for its answer, and goes on only where nothing was written.
    """

    def __init__(self, seconds: float, servers: int, repeat: bool) -> None:
        self._deadline = time.monotonic() + seconds
        self._servers, self._repeat = servers, repeat
        self._share = seconds / servers if repeat else seconds
        self._failures: list[StoreError] = []

    @property
    def left(self) -> float:
        """Seconds for the next attempt."""
        return max(LEAST, min(self._share, self._deadline - time.monotonic()))

    def again(self, error: BaseException) -> bool:
        """Whether to ask another server after this failure."""
        if not isinstance(error, StoreUnavailable | StoreTimeout | Untrusted):
            return False
        self._failures.append(error)
        everybody = len(self._failures) >= self._servers
        if self._repeat:
            hopeless = everybody and all(isinstance(e, Untrusted) for e in self._failures)
            return not hopeless and time.monotonic() < self._deadline - LEAST
        return not everybody and not isinstance(error, StoreTimeout)

    def pause(self, _state: object) -> float:
        """Seconds until the next attempt: none before everybody was asked."""
        if len(self._failures) % self._servers:
            return 0.0
        return max(0.0, min(CHANCE.uniform(*_PAUSE), self._deadline - time.monotonic()))

    def error(self, last: StoreError) -> StoreError:
        """The failure to report: one that leaves the outcome open, else the last one."""
        return next((e for e in self._failures if isinstance(e, StoreTimeout)), last)


class Channel:
    """All servers of ``addresses``, in an order of this store's own so that clients spread over them.

    ``revision``, ``term``: the highest that any answer told, of the cluster that answered last.
    """

    def __init__(self, addresses: str, credentials: Credentials, timeout: float, counts: Counts) -> None:
        pairs = parse_addresses(addresses)
        self._endpoints = [Endpoint(host, port, credentials) for host, port in CHANCE.sample(pairs, len(pairs))]
        self._current, self.timeout, self.counts = self._endpoints[0], timeout, counts
        self.login = Login(credentials, counts.add)
        self.revision = self.term = self._cluster = 0
        self.closed = False
        self._away_since: float | None = None
        self._said = False  # that a server was left, in this outage
        self._lock = threading.Lock()
        self._log = structlog.get_logger()

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._endpoints)

    @property
    def away(self) -> bool:
        """Whether a server failed, and none has answered since."""
        return self._away_since is not None

    @property
    def endpoint(self) -> Endpoint:
        """The server that is asked now."""
        return self._current

    def call(
        self, kind: str, action: Action, *, write: bool = False, repeat: bool = True, timeout: float | None = None
    ) -> Any:
        """Run ``action(stubs, seconds, metadata)``, counted as ``kind``; ``repeat``: twice does no harm.

        Raises a StoreError: StoreTimeout where a ``write`` may have happened.
        """
        attempts = Attempts(self.timeout if timeout is None else timeout, len(self._endpoints), repeat)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: not self.closed and attempts.again(error)),
            wait=attempts.pause,
            reraise=True,
        )
        try:
            return retrying(lambda: self._turn(kind, action, write, attempts.left))
        except (StoreUnavailable, StoreTimeout, Untrusted) as error:
            raise attempts.error(error) from None

    def stream(self, kind: str, start: Callable[[Stubs, Metadata], Any]) -> tuple[Endpoint, Metadata, Any]:
        """Start a stream at the present server: (server, metadata, stream). End it with ``server.release(stream)``.

        Its reader gets gRPC's errors, and CANCELLED when the server is left.
        """
        endpoint = self._current
        metadata = self.login.metadata(endpoint, self.timeout)
        self.counts.add(kind)
        try:
            stream = start(endpoint.stubs(), metadata)
        except ValueError as error:
            raise self._shut(error) from error
        endpoint.hold(stream)
        return endpoint, metadata, stream

    def note(self, header: Any) -> None:
        """Learn from an answer's header. A cluster that was set up anew begins to count anew."""
        with self._lock:
            if header.cluster_id != self._cluster:
                self._cluster, self.revision, self.term = header.cluster_id, 0, 0
            self.revision = max(self.revision, header.revision)
            self.term = max(self.term, header.raft_term)
            since, said = self._away_since, self._said
            self._away_since, self._said = None, False
        if since is not None and said:
            self._log.info("store_answers", endpoint=self._current.address, after=round(time.monotonic() - since, 3))

    def blame(self, endpoint: Endpoint, reason: str) -> None:
        """Leave a server that failed, with all streams, for the one whose last failure is longest ago.

        Only the first such step is said aloud until a server answers: while none does, there are dozens a second.
        """
        with self._lock:
            endpoint.failed_at = time.monotonic()
            self._away_since = self._away_since or endpoint.failed_at
            others = [e for e in self._endpoints if e is not endpoint]
            if endpoint is not self._current or not others:
                return
            self._current = min(others, key=lambda e: e.failed_at)
            log, self._said = self._log.debug if self._said else self._log.warning, True
        log("store_endpoint_left", endpoint=endpoint.address, to=self._current.address, reason=reason)
        endpoint.drop_streams()

    def explained(self, endpoint: Endpoint, error: StoreError, seconds: float = _PROBE) -> StoreError:
        """Untrusted where TLS is why a server cannot be reached; its certificates are read anew next time."""
        if not isinstance(error, StoreUnavailable) or "failed to connect" not in str(error):
            return error
        reason = endpoint.distrust(max(LEAST, min(_PROBE, seconds)))
        if not reason:
            return error
        endpoint.close(for_good=False)
        return Untrusted(f"etcd {endpoint.address}: {reason}")

    def close(self) -> None:
        """Close the sockets; calls in flight end, later ones raise StoreUnavailable."""
        self.closed = True
        for endpoint in self._endpoints:
            endpoint.close()

    def _turn(self, kind: str, action: Action, write: bool, seconds: float) -> Any:
        """Ask the present server; leave it when it fails."""
        endpoint = self._current
        try:
            return self._ask(kind, endpoint, action, write, seconds)
        except (StoreUnavailable, StoreTimeout, Untrusted) as error:
            if not self.closed:
                self.blame(endpoint, str(error))
            raise

    def _ask(self, kind: str, endpoint: Endpoint, action: Action, write: bool, seconds: float) -> Any:
        """One server; once more with a new token when the old one is refused."""
        deadline = time.monotonic() + seconds
        metadata = self.login.metadata(endpoint, seconds)
        try:
            return self._send(kind, endpoint, action, write, deadline, metadata)
        except Unauthenticated:
            if not self.login.has_user:
                raise
        self.login.forget(metadata)
        metadata = self.login.metadata(endpoint, max(LEAST, deadline - time.monotonic()))
        return self._send(kind, endpoint, action, write, deadline, metadata)

    def _send(
        self, kind: str, endpoint: Endpoint, action: Action, write: bool, deadline: float, metadata: Metadata
    ) -> Any:
        self.counts.add(kind)
        try:
            reply = action(endpoint.stubs(), max(LEAST, deadline - time.monotonic()), metadata)
        except grpc.RpcError as error:
            ours = translate(error, write, endpoint.address)
            raise self.explained(endpoint, ours, deadline - time.monotonic()) from error
        except ValueError as error:
            raise self._shut(error) from error
        self.note(reply.header)
        return reply

    def _shut(self, error: ValueError) -> StoreError:
        """gRPC's answers to a call on a closed channel. Raises what it is given when it is something else."""
        if not any(words in str(error) for words in _CLOSED):
            raise error
        return StoreUnavailable("the store was closed" if self.closed else "the connection was just closed")
