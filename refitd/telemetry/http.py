"""``/metrics`` and ``/healthz`` over HTTP, in threads of their own."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from refitd.errors import ConfigError

Health = Callable[[], str]
_SLOW = 5.0  # seconds that a client may take over its request


def _well() -> str:
    return ""


class MetricsServer:
    """Serves a registry on ``host:port`` from construction to close().

    ``health`` returns what is wrong, or ``""``: /healthz answers 200 or 503 with that text. Port 0 takes a free one.
    Raises ConfigError naming metrics.listen when the address cannot be had.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health = _well) -> None:
        try:
            self._server = _Server(host, port, registry, health)
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

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry, self.health = registry, health
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: that asks the DNS for our own name, which may take many seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._clients.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End connections whose clients say nothing; their threads would stay until the timeout."""
        with self._lock:
            for client in self._clients:
                with contextlib.suppress(OSError):  # it hung up itself
                    client.shutdown(socket.SHUT_RD)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SLOW

    def do_GET(self) -> None:
        """Answer one of the three pages."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, kind, encode(self.server.registry))
        elif path == "/healthz":
            problem = self.server.health()
            self._answer(503 if problem else 200, "text/plain; charset=utf-8", (problem or "ok").encode() + b"\n")
        elif path == "/":
            self._answer(200, "text/plain; charset=utf-8", b"refitd: /metrics /healthz\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"not found\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that http.server uses
        """Scrapes are not logged."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
