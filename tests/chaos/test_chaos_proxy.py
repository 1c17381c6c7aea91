"""Proxies with gates: what is cut waits, one way, and nobody is told."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from refitd.demo.chaos.proxy import Gates, Proxies


def accept(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed at the end of a test
        while True:
            threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()


def echo(peer: socket.socket) -> None:
    with peer, contextlib.suppress(OSError):
        while data := peer.recv(1000):
            peer.sendall(data)


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture
def proxies(gates: Gates) -> Iterator[Proxies]:
    found = Proxies(gates, lambda key: key.split("/")[0])
    yield found
    found.close()


def serve(port: int = 0) -> socket.socket:
    server = socket.create_server(("127.0.0.1", port))
    threading.Thread(target=accept, args=(server,), daemon=True).start()
    return server


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def silent(peer: socket.socket) -> bool:
    peer.settimeout(0.3)
    try:
        return not peer.recv(1000)
    except TimeoutError:
        return True
    finally:
        peer.settimeout(5)


def test_a_cut_holds_bytes_back_and_healing_delivers_them(gates: Gates, proxies: Proxies) -> None:
    """Both directions have a gate of their own; other nodes do not notice."""
    with serve() as server:
        host, port = server.getsockname()
        fronts = {node: proxies.to_member(node, "n0", host, port) for node in "ab"}
        with connect(fronts["a"]) as ours, connect(fronts["b"]) as other:
            ours.sendall(b"one")
            assert ours.recv(1000) == b"one"
            for direction in (("a", "n0"), ("n0", "a")):
                gates.shut(*direction)
                ours.sendall(b"two")
                other.sendall(b"three")
                assert other.recv(1000) == b"three"
                assert silent(ours)
                gates.open(*direction)
                assert ours.recv(1000) == b"two"


def test_a_data_connection_is_known_by_its_hello(gates: Gates, proxies: Proxies) -> None:
    """Whose rank dials in decides which gate it passes; the hello arrives unchanged."""
    front, behind = proxies.to_node("c")
    hello = json.dumps({"kind": "edge", "src": "a/0"}).encode()
    frame = struct.pack(">I", len(hello)) + hello
    gates.shut("a", "c")
    with serve(behind), connect(front) as ours:
        ours.sendall(frame)
        assert silent(ours)
        gates.open("a", "c")
        assert ours.recv(1000) == frame
