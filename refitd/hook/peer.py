"""Who is at the other end of a Unix socket, by the kernel's word and not by the peer's.

SO_PEERCRED (unix(7)) gives pid, uid and gid of the process that called connect(), as they were then: the effective ids,
translated into our user namespace (an id that has no place in it comes as 65534). It gives the primary group only.
Supplementary groups come from SO_PEERGROUPS (Linux 4.13), also as of connect(); /proc/<pid>/status is not asked, since
the pid may be another process by the time it is read. None of this says which program runs, nor what happens when the
connected descriptor is handed to somebody else afterwards.
"""

from __future__ import annotations

import array
import contextlib
import errno
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # not in the socket module; the same on x86, arm64 and ppc64le
_ROOM = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """A process as it was when it connected; ``groups`` holds its primary and its supplementary groups."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]


def peer_of(sock: socket.socket) -> Peer:
    """The process that connected to us. Without SO_PEERGROUPS (an older kernel) only its primary group is known."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    with contextlib.suppress(OSError):
        return Peer(pid, uid, gid, frozenset({gid, *_supplementary(sock)}))
    return Peer(pid, uid, gid, frozenset({gid}))


def _supplementary(sock: socket.socket) -> list[int]:
    room = _ROOM
    while True:
        try:
            data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, room * 4)
        except OSError as error:
            if error.errno != errno.ERANGE or room >= 1 << 16:
                raise
            room *= 16
        else:
            return array.array("I", data).tolist()


def refusal(peer: Peer, uids: Collection[int], gids: Collection[int], own: Collection[int]) -> str:
    """The field (``uid`` or ``gid``) by which a peer is refused; empty where it is let in.

    ``uids`` names the users that are let in and ``gids`` the groups; where both are given, both must hold. Where only
    ``gids`` is given, members of one of them are let in beside ``own`` users; where neither is, ``own`` users are.
    """
    by_uid, by_gid = peer.uid in uids, not peer.groups.isdisjoint(gids)
    if uids and gids:
        return "" if by_uid and by_gid else ("gid" if by_uid else "uid")
    if uids:
        return "" if by_uid else "uid"
    return "" if by_gid or peer.uid in own else ("gid" if gids else "uid")
