"""The token of an etcd user: taken at the first call, and anew when a server does not know it (any more)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc

from refitd.errors import StoreTimeout
from refitd.store._etcd_endpoint import Credentials, Endpoint, Metadata, etcdrpc
from refitd.store._etcd_errors import translate


class Login:
    """Metadata for calls. A server that was restarted has forgotten its tokens, and they end after some minutes."""

    def __init__(self, credentials: Credentials, count: Callable[[str], None]) -> None:
        self._credentials, self._count = credentials, count
        self._lock = threading.Lock()
        self._token: str | None = None

    @property
    def has_user(self) -> bool:
        """Whether there is somebody to log in as."""
        return bool(self._credentials.user)

    def metadata(self, endpoint: Endpoint, seconds: float) -> Metadata:
        """What goes with a call. Raises Unauthenticated for a wrong password, StoreUnavailable, StoreTimeout."""
        # Without hasleader a member that lost its quorum keeps watches silently.
        token = self._token or (self._ask(endpoint, seconds) if self.has_user else None)
        return (("hasleader", "true"), *((("token", token),) if token else ()))

    def forget(self, metadata: Metadata) -> None:
        """Log in again at the next call, unless another thread has done so since ``metadata`` was made."""
        if self._token == dict(metadata).get("token"):
            self._token = None

    def _ask(self, endpoint: Endpoint, seconds: float) -> str:
        """One thread logs in, the others wait for it: etcd spends 50 ms of processor time on a password."""
        if not self._lock.acquire(timeout=seconds):
            raise StoreTimeout(f"etcd {endpoint.address}: no answer to a login")
        try:
            token = self._token
            if token is None:
                token = self._token = self._login(endpoint, seconds)
            return token
        finally:
            self._lock.release()

    def _login(self, endpoint: Endpoint, seconds: float) -> str:
        self._count("login")
        request = etcdrpc.AuthenticateRequest(name=self._credentials.user, password=self._credentials.password())
        try:
            return str(endpoint.stubs().auth.Authenticate(request, seconds).token)
        except grpc.RpcError as error:
            raise translate(error, write=False, address=endpoint.address) from None
