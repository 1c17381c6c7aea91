"""Who may speak at the hook's socket: by user and by group, supplementary groups included, on the kernel's word."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon

from refitd.hook import peer as peer_module
from refitd.hook.peer import Peer, peer_of, refusal

OWN = (1, 0)
STRANGER = Peer(7, 1000, 100, frozenset({100, 27, 2000}))


@pytest.mark.parametrize(
    ("uids", "gids", "field"),
    [
        ((), (), "uid"),
        ((1000,), (), ""),
        ((1001,), (), "uid"),
        ((), (100,), ""),
        ((), (2000, 5), ""),
        ((), (5,), "gid"),
        ((1000,), (27,), ""),
        ((1000,), (5,), "gid"),
        ((1001,), (27,), "uid"),
        ((1001,), (5,), "uid"),
    ],
)
def test_users_and_groups(uids: Sequence[int], gids: Sequence[int], field: str) -> None:
    """One list: it decides. Both: both must hold. Neither: only our own user and root."""
    assert refusal(STRANGER, uids, gids, OWN) == field


@pytest.mark.parametrize(
    ("uids", "gids", "field"), [((), (), ""), ((), (5,), ""), ((1000,), (), "uid"), ((0,), (5,), "gid")]
)
def test_root_and_our_own_user(uids: Sequence[int], gids: Sequence[int], field: str) -> None:
    """Let in until a list of users says otherwise."""
    assert refusal(Peer(7, 0, 0, frozenset({0})), uids, gids, OWN) == field


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_the_kernel_names_all_groups(pair: tuple[socket.socket, socket.socket]) -> None:
    """SO_PEERCRED has the primary group, SO_PEERGROUPS the supplementary ones."""
    assert peer_of(pair[0]) == Peer(os.getpid(), os.getuid(), os.getgid(), frozenset({os.getgid(), *os.getgroups()}))


class Crowded(socket.socket):
    """A peer with 300 groups: more than the first buffer takes."""

    def getsockopt(self, level: int, option: int, *room: int) -> Any:
        if option != peer_module._SO_PEERGROUPS:
            return super().getsockopt(level, option, *room)
        if room[0] < 300 * 4:
            raise OSError(errno.ERANGE, "Numerical result out of range")
        return array.array("I", range(5000, 5300)).tobytes()


def test_many_groups_need_more_room(pair: tuple[socket.socket, socket.socket]) -> None:
    """ERANGE asks for a larger buffer; nothing is cut off."""
    with Crowded(fileno=os.dup(pair[0].fileno())) as crowded:
        assert peer_of(crowded).groups == frozenset({os.getgid(), *range(5000, 5300)})


class Old(socket.socket):
    """A socket of a kernel without SO_PEERGROUPS."""

    def getsockopt(self, level: int, option: int, *room: int) -> Any:
        if option == peer_module._SO_PEERGROUPS:
            raise OSError(92, "Protocol not available")
        return super().getsockopt(level, option, *room)


def test_an_older_kernel_names_the_primary_group_only(pair: tuple[socket.socket, socket.socket]) -> None:
    """Fewer groups are known, so fewer are let in: never more."""
    with Old(fileno=os.dup(pair[0].fileno())) as old:
        assert peer_of(old).groups == frozenset({os.getgid()})


# Against a server, as this process and, where we may, as others.

CLIENT = """
import json, os, socket, sys
from refitd.hook.wire import Connection
if who := json.loads(sys.argv[2]):
    os.setgroups(who["groups"])
    os.setgid(who["id"])
    os.setuid(who["id"])
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
wire = Connection(sock)
try:
    wire.send({"id": 1, "method": "hello", "proto": 1, "client": "", "job": "", "side": "admin", "group": "", "rank": 0,
               "world": 1, "incarnation": ""})
except BrokenPipeError:
    pass
answer = wire.receive(10)[0]
print("in" if answer.get("ok") else answer["error"]["field"] + ": " + answer["error"]["got"])
"""


def heard(path: Path, fake: dict[str, Any], who: dict[str, Any] | None = None) -> str:
    """What a client process hears at a server with these lists, as another user or as this one."""
    daemon = FakeDaemon(path, **fake).start()
    try:
        os.chmod(path, 0o666)
        client = [sys.executable, "-c", CLIENT, str(path), json.dumps(who)]
        return subprocess.run(client, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.strip()
    finally:
        daemon.end()


def test_this_process_is_let_in_and_kept_out(tmp_path: Path) -> None:
    """By its user, by one of its groups, by both; and refused by the one that does not hold."""
    path, uid, gid = tmp_path / "hook.sock", os.getuid(), os.getgid()
    nobody = max({*os.getgroups(), gid}) + 1
    groups = str(sorted({gid, *os.getgroups()}))
    assert heard(path, {}) == "in"
    assert heard(path, {"uids": [uid], "gids": [gid]}) == "in"
    assert heard(path, {"uids": [uid + 1]}) == f"uid: {uid}"
    assert heard(path, {"uids": [uid], "gids": [nobody]}) == f"gid: {groups}"
    assert heard(path, {"uids": [uid + 1], "gids": [gid]}) == f"uid: {uid}"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users; the rules are tested above")
def test_other_users_are_let_in_and_kept_out() -> None:
    """A user with a supplementary group of the list comes in; one without, and one that only claims to, do not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "hook.sock"
        alice, mallory = {"id": 4001, "groups": [4100, 4200]}, {"id": 4002, "groups": [4300]}
        assert heard(path, {"gids": [4200]}, alice) == "in"
        assert heard(path, {"gids": [4200]}, mallory) == "gid: [4002, 4300]"
        assert heard(path, {"gids": [4001]}, alice) == "in"
        assert heard(path, {"uids": [4001]}, alice) == "in"
        assert heard(path, {"uids": [4001]}, mallory) == "uid: 4002"
        assert heard(path, {"uids": [4001, 4002], "gids": [4200]}, alice) == "in"
        assert heard(path, {"uids": [4001, 4002], "gids": [4200]}, mallory) == "gid: [4002, 4300]"
        assert heard(path, {}, alice) == "uid: 4001"
