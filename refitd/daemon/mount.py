"""Giving a mover a rank's memory: descriptors and places, never pointers."""

from __future__ import annotations

import os
from typing import Any

from refitd.daemon.rank import LocalRank
from refitd.mover.handle import MoverHandle


def mount(reader: LocalRank, owner: LocalRank, writable: bool) -> None:
    """Have ``reader``'s mover map ``owner``'s memory, unless it has this version of it mapped already."""
    memory, mover = owner.memory, reader.mover
    if memory is None or mover is None or reader.mounted.get(owner.key) == memory.version:
        return
    storages = owner.layout.storages
    described = [
        {
            "name": region.name, "fd": region.fd, "offset": region.offset, "nbytes": region.nbytes,
            "dtype": storages[region.name][1],
        }
        for region in memory.regions
    ]  # fmt: skip
    message = {
        "kind": "mount", "memory": owner.key, "storages": described, "writable": writable,
        "word_index": owner.word_index, "device": memory.device,
    }  # fmt: skip
    if memory.device is None:
        mover.send(message, [*memory.fds, owner.page.fd])
    elif mover.in_client and _same_process(reader, owner):
        mover.send({**message, "own": True}, [*memory.fds, mover.pidfd, owner.page.fd])
    else:
        _send_with_owner(owner, mover, message, memory.fds)
    reader.mounted[owner.key] = memory.version


def _same_process(reader: LocalRank, owner: LocalRank) -> bool:
    """A pid of 0 stands for every process that we do not see."""
    return reader is owner or reader.session.pid == owner.session.pid > 0


def _send_with_owner(owner: LocalRank, mover: MoverHandle, message: dict[str, Any], fds: list[int]) -> None:
    """With the owner's pidfd, so that a mover lets go of the memory of a dead process without being told."""
    try:
        pidfd = os.pidfd_open(owner.session.pid)
    except ProcessLookupError:
        return  # its session ends in a moment
    try:
        mover.send(message, [*fds, pidfd, owner.page.fd])
    finally:
        os.close(pidfd)
