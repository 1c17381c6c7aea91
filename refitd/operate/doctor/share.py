"""Tries what refits stand on: a child reads memory that this process lends it, on the host and on a GPU.

``python -m refitd.operate.doctor.share ROLE FD [UUID]`` is the child: ``host`` reads a memfd, ``owner`` lends a block
of a GPU, ``reader`` maps it. The children speak the hook's framing over the inherited socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from refitd.errors import DeviceError, ProtocolError, RefitdError
from refitd.hook.gpu.driver import Calls, Driver
from refitd.hook.gpu.export import Extent, export
from refitd.hook.memfd import create_memory, map_shared
from refitd.hook.wire import Connection
from refitd.operate.doctor.facts import Sharing

HOST_BYTES, GPU_BYTES = 64 << 20, 1 << 20
_TIMES = 3
_SECONDS = 60.0  # torch's first look at a GPU takes many
_MARK = b"refitd"


def share_host() -> Sharing:
    """Lend a child a memfd, and hear what it read there and how fast."""
    try:
        fd = create_memory("refitd-doctor", HOST_BYTES)
        with contextlib.closing(_Owned(fd)), _child("host") as peer:
            with map_shared(fd, HOST_BYTES) as memory:
                memory[:] = _MARK.ljust(4096, b"\1") * (HOST_BYTES // 4096)
            peer.send({"nbytes": HOST_BYTES, "fds": 1}, [fd])
            answer = _hear(peer)
    except (OSError, EOFError, RefitdError) as error:
        return Sharing(f"{type(error).__name__}: {error}")
    return Sharing(answer["trouble"], answer["rate"])


def share_gpu(uuid: str) -> str:
    """Why a process could not map another's memory on the GPU; empty where it could."""
    try:
        with _child("owner", uuid) as owner, _child("reader", uuid) as reader:
            lent, fds = owner.receive(_SECONDS)
            try:
                if not lent["trouble"]:
                    reader.send({**lent, "fds": len(fds)}, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            return str(lent["trouble"] or _hear(reader)["trouble"])
    except (OSError, EOFError, RefitdError) as error:
        return f"{type(error).__name__}: {error}"


class _Owned:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def _child(role: str, *arguments: str) -> Iterator[Connection]:
    """A child in its role, at the other end of a connection; it ends when that closes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "refitd.operate.doctor.share", role, str(theirs.fileno()), *arguments]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL) as process:
            theirs.close()
            try:
                yield Connection(ours)
            finally:
                ours.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                process.kill()


def _hear(peer: Connection) -> dict[str, Any]:
    answer, _fds = peer.receive(_SECONDS)
    return answer


# What the children do.


def read_host(peer: Connection) -> None:
    """Read all of what we are lent, a copy of it, and say how fast."""
    message, fds = peer.receive(_SECONDS)
    nbytes = int(message["nbytes"])
    copy = bytearray(nbytes)
    with map_shared(fds[0], nbytes) as memory, memoryview(memory) as lent, memoryview(copy) as own:
        seconds = min(_timed(own, lent) for _time in range(_TIMES))  # the first one also pays for new pages
    trouble = "" if copy.startswith(_MARK) else "other bytes than were written"
    peer.send({"trouble": trouble, "rate": nbytes / max(seconds, 1e-9)})


def _timed(own: memoryview, lent: memoryview) -> float:
    began = time.monotonic()
    own[:] = lent  # between memoryviews nothing is copied twice
    return time.monotonic() - began


def lend_gpu(peer: Connection, driver: Calls, address: int) -> None:
    """Describe the block at ``address`` to whoever maps it, and keep it until the peer hangs up."""
    made = export(driver, {"probe": Extent(address, GPU_BYTES)})
    try:
        trouble = next(iter(made.refused.values()), "")
        peer.send({"trouble": trouble, "device": made.message, "fds": len(made.fds)}, made.fds)
    finally:
        made.close()
    with contextlib.suppress(EOFError, OSError):
        peer.receive(_SECONDS)


def map_gpu(peer: Connection, driver: Calls) -> None:
    """Map what we are lent, let go of it, and say how that went."""
    from refitd.mover.cuda.imports import Imports

    message, fds = peer.receive(_SECONDS)
    imports = Imports(driver)
    try:
        imports.open("owner", message["device"], fds)
        imports.close_all()
        trouble = ""
    except (DeviceError, ProtocolError) as error:
        trouble = str(error)
    peer.send({"trouble": trouble})


def main(argv: list[str]) -> int:
    """The child's life."""
    role, fd, *rest = argv
    peer = Connection(socket.socket(fileno=int(fd)))
    try:
        if role == "host":
            read_host(peer)
        elif role == "reader":
            map_gpu(peer, Driver(rest[0]))
        else:
            driver = Driver(rest[0])
            with allocated(driver.ordinal) as address:
                lend_gpu(peer, driver, address)
    except DeviceError as error:
        with contextlib.suppress(OSError):
            peer.send({"trouble": str(error), "rate": 0.0})
    except EOFError:
        return 1  # nobody asks any more
    return 0


@contextlib.contextmanager
def allocated(ordinal: int) -> Iterator[int]:
    """A block of torch's, as a trainer's weights are. Raises DeviceError where torch has no CUDA."""
    try:
        import torch

        block = torch.zeros(GPU_BYTES, dtype=torch.uint8, device=f"cuda:{ordinal}")
    except (ImportError, RuntimeError, AssertionError) as error:
        raise DeviceError("allocate with torch", str(error).splitlines()[0]) from error
    yield block.data_ptr()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
