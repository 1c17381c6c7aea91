"""What the server demands before a handler sees a message: a proper hello, and descriptors that are safe to map."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from refitd.errors import ProtocolError
from refitd.hook.memfd import check_memory
from refitd.hook.messages import ADMIN, HOST_SHADOW, check
from refitd.hook.page import ControlPage
from refitd.hook.session import Fds, Session
from refitd.hook.wire import Message


def admit(session: Session, message: Message, fds: Fds) -> None:
    """Fill the session from its hello and map its control page. Raises ProtocolError."""
    if message.get("method") != "hello":
        raise ProtocolError("method", "hello", repr(message.get("method"))[:80])
    check(message)
    session.client, session.job, session.side = message["client"], message["job"], message["side"]
    session.group, session.incarnation = message["group"], message["incarnation"]
    session.rank, session.world = message["rank"], message["world"]
    if session.side != ADMIN:
        _require(fds, 1)
        session.page = ControlPage.map(fds[0])


def check_descriptors(message: Message, fds: Fds) -> None:
    """Raises ProtocolError where a request's descriptors are missing, too small or could shrink."""
    if message["method"] == "hello":
        raise ProtocolError("method", "one hello", "a second hello")
    if message["method"] == "register":
        fd_count = len(fds) - ("path" in message)
        _require(fds, 1 + (message["mode"] == HOST_SHADOW) + ("path" in message))
        if "path" in message and not stat.S_ISSOCK(os.fstat(fds[fd_count]).st_mode):
            raise ProtocolError("fds", "the socket of a mover thread, last", "another kind of descriptor")
        _check_lent(message.get("shadow") or {}, fds[1:fd_count], "shadow.")
    else:
        _check_lent(message, fds)


def _check_lent(lent: Mapping[str, Any], fds: Sequence[int], prefix: str = "") -> None:
    """Memory as a message describes it, on the host or on a device, and the descriptors that it speaks of."""
    for i, entry in enumerate(lent.get("memory") or ()):
        field = f"{prefix}memory[{i}]"
        if entry["fd"] >= len(fds):
            raise ProtocolError(f"{field}.fd", f"less than {len(fds)}", str(entry["fd"]))
        check_memory(fds[entry["fd"]], entry["offset"] + entry["nbytes"], field)
    for i, block in enumerate((lent.get("device") or {}).get("blocks", ())):
        if block["kind"] == "vmm" and block["fd"] + len(block["segments"]) > len(fds):
            raise ProtocolError(
                f"{prefix}device.blocks[{i}].fd", f"a descriptor for each segment, of {len(fds)}", str(block["fd"])
            )


def _require(fds: Fds, count: int) -> None:
    if len(fds) < count:
        raise ProtocolError("fds", f"{count} descriptors", str(len(fds)))
