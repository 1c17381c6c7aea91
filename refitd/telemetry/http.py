"""The daemon's HTTP port, in threads of its own: /metrics, /healthz, /readyz, and a page for people at /."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry

from refitd.errors import ConfigError
from refitd.telemetry.facts import Verdict
from refitd.telemetry.routes import Health, Picture, Ready, Routes

_SLOW = 5.0  # seconds that a client may take over its request
MAX_CLIENTS = 64  # each is a thread and a descriptor; when another comes, the oldest is hung up on
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    # The page brings its style and nothing else: no script, no picture, no frame around it.
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
)


def _well() -> str:
    return ""


def _unknown(job: str, replica: str, max_lag: int | None) -> Verdict:
    del job, replica, max_lag
    return Verdict(False, "this daemon does not say")


class MetricsServer:
    """Serves a registry, and what `Routes` says, on ``host:port`` from construction to close().

    ``health`` returns what is wrong, or ``""``: /healthz answers 200 or 503 with that text. Port 0 takes a free one.
    Raises ConfigError naming metrics.listen when the address cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        health: Health = _well,
        ready: Ready = _unknown,
        picture: Picture = dict,
    ) -> None:
        try:
            self._server = _Server(host, port, Routes(registry, health, ready, picture))
        except (OSError, OverflowError) as error:
            raise ConfigError("metrics.listen", "an address that is free", f"{host}:{port} ({error})") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="refitd-metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """``http://host:port``."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Stop listening and hang up on clients that are still connected; no thread is left."""
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close() waits for them
    allow_reuse_address = True

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes = routes
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, None] = {}  # the oldest first
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: that asks the DNS for our own name, which may take many seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._clients) >= MAX_CLIENTS:
                _hang_up(oldest := next(iter(self._clients)))
                del self._clients[oldest]
            self._clients[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up in the middle of its answer is its own affair; anything else is a bug, said aloud."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def hang_up(self) -> None:
        """End connections whose clients say nothing; their threads would stay until the timeout."""
        with self._lock:
            for client in self._clients:
                _hang_up(client)


def _hang_up(client: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it hung up itself
        client.shutdown(socket.SHUT_RD)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SLOW

    def do_GET(self) -> None:
        """Answer with a page and its body."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Answer with a page's headers."""
        self._answer(body=False)

    def version_string(self) -> str:
        """Who answers; which Python, and which version of it, is nobody's affair."""
        return "refitd"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that http.server uses
        """Scrapes are not logged."""

    def _answer(self, body: bool) -> None:
        status, kind, content = self.server.routes.answer(self.path, self.headers.get("Accept", ""))
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
