"""Anonymous files that two processes share: sealed documents, and memory that cannot be cut away under a reader."""

from __future__ import annotations

import fcntl
import mmap
import os

from refitd.errors import ProtocolError

DOCUMENT_LIMIT = 256 << 20
_NO_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FROZEN = _NO_RESIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def create_memory(name: str, nbytes: int) -> int:
    """A memfd of ``nbytes`` zero bytes whose size can never change again. The caller closes the descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _NO_RESIZE | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_document(name: str, data: bytes) -> int:
    """A memfd with ``data`` that nobody can change any more. The caller closes the descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FROZEN)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_document(fd: int, field: str = "document", limit: int = DOCUMENT_LIMIT) -> bytes:
    """The bytes of a sealed memfd that a peer sent. Raises ProtocolError where it is not sealed or too large."""
    _require_seals(fd, _NO_RESIZE | fcntl.F_SEAL_WRITE, field, "a sealed memfd")
    size = os.fstat(fd).st_size
    if size > limit:
        raise ProtocolError(field, f"at most {limit} bytes", str(size))
    chunks, offset = [], 0
    while offset < size and (chunk := os.pread(fd, size - offset, offset)):
        chunks.append(chunk)
        offset += len(chunk)
    return b"".join(chunks)


def check_memory(fd: int, end: int, field: str) -> None:
    """Raises ProtocolError unless ``fd`` is a memfd that cannot shrink and has at least ``end`` bytes.

    A mapping of a file that shrinks kills its reader with SIGBUS, so this is asked before anything is mapped.
    """
    _require_seals(fd, fcntl.F_SEAL_SHRINK, field, "a memfd sealed against shrinking")
    size = os.fstat(fd).st_size
    if end > size:
        raise ProtocolError(field, f"at least {end} bytes", str(size))


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Map ``nbytes`` (at least one) of a memfd, readable and writable; the mapping outlives the descriptor."""
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _require_seals(fd: int, seals: int, field: str, expected: str) -> None:
    try:
        present = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(field, expected, f"a descriptor without seals ({error.strerror})") from None
    if present & seals != seals:
        raise ProtocolError(field, expected, f"a memfd with seals {present:#x}")
