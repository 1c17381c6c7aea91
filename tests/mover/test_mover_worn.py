"""A mover that has had many communicators asks to be replaced, when no lane has it."""

from __future__ import annotations

import queue
import re

import numpy as np
import pytest
from mover_rig import DIGEST, JOB, SECRET

from refitd.hook.memfd import create_document
from refitd.mover import child
from refitd.mover.child import Mover
from refitd.plan.program import Program

KEY = "engine/r0/0"


@pytest.fixture
def said():
    return queue.Queue()


@pytest.fixture(params=[False, True], ids=["child", "guest"])
def mover(request, said, monkeypatch):
    monkeypatch.setattr(child, "MOST_COMMUNICATORS", 3)
    one = Mover(KEY, said.put, guest=request.param)
    yield one
    one.close()


def build(mover, lane, token, nccl=True):
    """A lane that has nothing to move."""
    fd = create_document("program", Program(KEY, DIGEST, (), np.zeros((0, 10), np.int64), ()).to_bytes())
    head = {"kind": "build", "lane": lane, "token": token, "rank": KEY, "secret": SECRET, "job": JOB}
    group = {"nccl": {"ranks": [KEY], "host": "h"}} if nccl else {}
    mover.handle({**head, "connect": [], "accept": [], **group}, [fd])


def revoke(mover, lane, token):
    mover.handle({"kind": "revoke", "lane": lane, "token": token}, [])


def words(said):
    found = []
    while not said.empty():
        found.append(said.get_nowait())
    return [word for word in found if word["kind"] in ("revoked", "worn")]


def test_it_is_worn_after_so_many_communicators_and_only_between_lanes(mover, said):
    """By TCP it never is; a guest's process is its client's, and is not to be replaced."""
    for token in (1, 2, 3, 4):
        build(mover, "tcp", token, nccl=False)
        revoke(mover, "tcp", token)
    assert [word["kind"] for word in words(said)] == ["revoked"] * 4
    build(mover, "r0", 1)
    build(mover, "r1", 1)
    build(mover, "r1", 2)
    revoke(mover, "r0", 1)
    assert [word["kind"] for word in words(said)] == ["revoked"]
    revoke(mover, "r1", 2)
    last = words(said)
    assert [word["kind"] for word in last] == (["revoked"] if mover._guest else ["revoked", "worn"])
    if not mover._guest:
        assert re.fullmatch(r"3 communicators, \d+ descriptors are open", last[1]["reason"])
