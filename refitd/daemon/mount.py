"""Giving a mover a rank's memory: descriptors and places, never pointers."""

from __future__ import annotations

from refitd.daemon.rank import LocalRank


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
        "word_index": owner.word_index,
    }  # fmt: skip
    mover.send(message, [*memory.fds, owner.page.fd])
    reader.mounted[owner.key] = memory.version


def unmount(reader: LocalRank, key: str) -> None:
    """Have a mover let go of a rank's memory."""
    if reader.mounted.pop(key, None) is not None and reader.mover is not None:
        reader.mover.send({"kind": "unmount", "memory": key})
