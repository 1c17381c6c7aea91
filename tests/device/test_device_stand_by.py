"""A mover that is told to stand by wakes its device for a round like the last, and listens instead of sleeping."""

import socket
import threading
from types import SimpleNamespace

import pytest
from pull_rig import OWNERS, READER

from refitd.daemon.prepare import Preparer
from refitd.errors import DeviceError
from refitd.hook.wire import Connection, send
from refitd.mover import child
from refitd.mover.child import Reporter, obey
from refitd.mover.transport import peer

HEARD = {"kind": "stand_by", "lane": "r0", "token": 1}


class FakeTouch:
    """Of a device whose work is done by kernels; counts, and may be broken."""

    def __init__(self, tables):
        self.rows, self.ran, self.broken = sum(len(table.rows) for table in tables), [], False

    def run(self):
        if self.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.ran.append(threading.current_thread())


@pytest.fixture
def one(rig, gpu, monkeypatch):
    """A rig that has done a round, on a device that can be touched."""
    monkeypatch.setattr(gpu.FakeDevice, "touch", lambda _device, tables: FakeTouch(tables))
    monkeypatch.setattr(child, "STAND_BY_SECONDS", 0.0)
    monkeypatch.setattr(peer, "AT_ONCE_SECONDS", 60.0)
    made = rig()
    made.mount()
    made.build()
    made.run()
    made.wait("done")
    monkeypatch.setattr(child, "STAND_BY_SECONDS", 60.0)
    return made


def touched(one):
    return one.mover._lanes["r0"]._peer._worker._puller._whole[1].touch


def calls(after):
    """Answers of a socket on which something comes at the ``after``-th look."""
    looks = iter([False] * (after - 1))
    return lambda: next(looks, True)


def test_the_device_is_awake_when_the_run_comes(one):
    """By the thread of the commands; what is moved then is what it would have been."""
    touch, before = touched(one), one.mine.bytes.copy()
    assert touch.rows == 8
    one.mover.handle(dict(HEARD), [])
    one.mover.stand_by(calls(4))
    assert touch.ran == [threading.current_thread()]
    assert one.mine.bytes.tolist() == before.tolist()
    assert [memory._users for memory in one.mover._memories.values()] == [0, 0, 0]
    one.ranks[0].bytes[:] = 3
    one.run(attempt=2)
    assert one.round().finished()
    assert one.mine.bytes.tolist() == one.expected().tolist()
    one.mover.stand_by(lambda: False)  # that was for one run
    assert len(touch.ran) == 1


def test_it_is_woken_again_while_nobody_calls(one, monkeypatch):
    monkeypatch.setattr(child, "AWAKE_SECONDS", 0.0)
    one.mover.handle(dict(HEARD), [])
    one.mover.stand_by(calls(7))
    assert len(touched(one).ran) == 3


@pytest.mark.parametrize("why", ["called", "stale", "no lane", "mounted anew", "unmapped", "busy", "broken edge"])
def test_what_cannot_be_made_ready_is_left_alone(one, why):
    """Nobody is told, nothing is touched, and the mover goes back to sleep (else this would take a minute)."""
    touch, lane, message = touched(one), one.mover._lanes["r0"], dict(HEARD)
    if why == "stale":
        message["token"] = 2
    if why == "no lane":
        message["lane"] = "r1"
    if why == "mounted anew":
        one.ranks[0].mount(one.mover)
        one.wait("mounted")
    if why == "unmapped":
        one.mover._memories[OWNERS[0]].close()
    if why == "busy":
        lane._peer._worker._pulling.acquire()
    if why == "broken edge":
        lane._board.broken[READER, READER] = "by a test"
    one.mover.handle(message, [])
    one.mover.stand_by((lambda: True) if why == "called" else lambda: False)
    if why == "busy":
        lane._peer._worker._pulling.release()
    assert touch.ran == []
    assert one.said.empty()


def test_a_guest_does_not_listen_in_its_clients_time(one):
    one.mover._guest = True
    one.mover.handle(dict(HEARD), [])
    one.mover.stand_by(lambda: False)
    assert len(touched(one).ran) == 1


def test_a_device_that_fails_ends_the_mover_there_too(one):
    touched(one).broken = True
    one.mover.handle(dict(HEARD), [])
    with pytest.raises(DeviceError, match="stand by: RuntimeError: CUDA error: unspecified launch failure"):
        one.mover.stand_by(lambda: False)
    assert [memory._users for memory in one.mover._memories.values()] == [0, 0, 0]


def test_the_next_command_ends_it(one):
    """On a socket: one that came with it, one that comes later, and its end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(theirs)
        for message in (HEARD, {"kind": "ping", "n": 1}, HEARD):
            send(ours, message)
        thread = threading.Thread(target=obey, args=(connection, one.mover, Reporter(connection, lambda: None)))
        thread.start()
        one.wait("pong")
        ours.shutdown(socket.SHUT_WR)
        thread.join(30)
        assert not thread.is_alive()


def test_movers_on_devices_are_told_once_all_is_prepared():
    """Members whose weights are on one, and have a mover in the lane."""
    said = []
    handles = {key: SimpleNamespace(send=lambda message, key=key: said.append((key, message))) for key in "abc"}
    members = [SimpleNamespace(key=key, device=None if key == "b" else "GPU-fake") for key in "abd"]
    built = SimpleNamespace(handles=handles, token=7)
    Preparer(SimpleNamespace(built=built, replica="r0", my_members=lambda: members))._stand_by()
    Preparer(SimpleNamespace(built=None, replica="r0", my_members=lambda: members))._stand_by()
    assert said == [("a", {"kind": "stand_by", "lane": "r0", "token": 7})]
