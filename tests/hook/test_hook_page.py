"""The control page and the memfds behind it."""

from __future__ import annotations

import os

import pytest

from refitd.errors import ProtocolError
from refitd.hook.memfd import check_memory, create_document, create_memory, read_document
from refitd.hook.page import PAGE_BYTES, ControlPage, Taken


def test_words_are_shared() -> None:
    """What one side writes into a word the other side reads, and each word has its documented place."""
    client = ControlPage.create()
    daemon = ControlPage.map(client.fd)
    names = ["loan_word", "heartbeat", "dirty", "generation", "revision", "token", "shadow_loan_word"]
    for i, name in enumerate(names):
        setattr(client, name, 100 + i)
    assert [daemon.read(i) for i in range(7)] == list(range(100, 107))
    assert [getattr(daemon, name) for name in names] == list(range(100, 107))
    assert os.pread(client.fd, 16, 0) == (100).to_bytes(8, "little") + (101).to_bytes(8, "little")
    client.close()
    daemon.close()


def test_loan_word_wraps() -> None:
    """The loan word changes at every bump, also past the largest 64-bit value."""
    page = ControlPage.create()
    page.loan_word = (1 << 64) - 1
    assert page.bump_loan() == 0
    assert page.bump_loan() == 1
    page.close()


def test_taken_ticket_is_whole() -> None:
    """The ticket that was taken last is read as a whole, and one that is half written does not exist."""
    page = ControlPage.create()
    assert page.taken is None
    page.take(Taken(1, 7, 5))
    page.take(Taken(1, 9, 6))
    for index in (11, 12, 13):  # the slot that the next ticket would go to
        page.write(index, 99)
    assert page.taken == Taken(1, 9, 6)
    page.close()
    page.close()
    assert page.closed


def test_map_refuses_other_sizes() -> None:
    """Memory of another size is no control page."""
    fd = create_memory("page", 2 * PAGE_BYTES)
    with pytest.raises(ProtocolError, match="control page: expected 4096 bytes, got 8192"):
        ControlPage.map(fd)
    os.close(fd)


def test_memory_cannot_shrink() -> None:
    """Memory that is lent keeps its size for ever, and its size is checked before it is mapped."""
    fd = create_memory("weights", 100)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    check_memory(fd, 100, "memory")
    with pytest.raises(ProtocolError, match="at least 101 bytes, got 100"):
        check_memory(fd, 101, "memory")
    os.close(fd)


def test_documents_are_sealed() -> None:
    """A document is read back as it was written, cannot be changed, and an unsealed one is not read."""
    fd = create_document("layout", b"pieces" * 1000)
    assert read_document(fd) == b"pieces" * 1000
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(ProtocolError, match="at most 10 bytes"):
        read_document(fd, limit=10)
    os.close(fd)
    fd = create_memory("open", 10)
    with pytest.raises(ProtocolError, match="sealed memfd"):
        read_document(fd)
    os.close(fd)


def test_both_slots_of_the_taken_ticket_are_the_same_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written in turn, and who waits for a point must find it in every publication."""
    passed: list[str] = []
    monkeypatch.setattr("refitd.hook.page.effect", passed.append)
    page = ControlPage.create()
    page.take(Taken(1, 7, 5))
    once = list(passed)
    page.take(Taken(1, 8, 6))
    page.close()
    assert sorted(once) == ["word 10", "word 7", "word 8", "word 9"]
    assert passed == once * 2
