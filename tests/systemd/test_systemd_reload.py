"""What a configuration that is read again changes at once, and what waits for a restart."""

from __future__ import annotations

import dataclasses
import pathlib

from refitd.config import Config, load
from refitd.daemon.reload import AT_ONCE, merge

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "systemd.md"


def configured(**values: object) -> Config:
    return load(None, {"HOME": "/root"}, {"node.name": "n0", **{k.replace("__", "."): v for k, v in values.items()}})


def test_some_keys_are_taken_and_others_wait() -> None:
    """Times, users, logs and the permitted lag change at once; addresses and names do not, and both are named."""
    old = configured(log__level="info")
    new = configured(
        log__level="debug", hook__uids=[1000], timeouts__progress=9.0, job__max_lag=3, data__verify="reread",
        store__url="etcd://10.0.0.1:2379", job__ttl=60.0, data__port=9465,
    )  # fmt: skip
    change = merge(old, new)
    assert set(change.taken) == {"log.level", "hook.uids", "timeouts.progress", "job.max_lag", "data.verify"}
    assert set(change.waiting) == {"store.url", "job.ttl", "data.port"}
    assert change.config == dataclasses.replace(
        old, log=new.log, hook=new.hook, timeouts=new.timeouts,
        job=dataclasses.replace(old.job, max_lag=3), data=dataclasses.replace(old.data, verify="reread"),
    )  # fmt: skip


def test_nothing_changed() -> None:
    """The same file again takes and leaves nothing."""
    old = configured()
    assert merge(old, configured()) == (old, (), ())


def test_the_docs_name_the_keys_that_are_taken() -> None:
    """docs/systemd.md lists what a reload changes."""
    text = DOCS.read_text()
    assert [key for key in AT_ONCE if f"`{key.rstrip('.')}`" not in text and f"`{key}*`" not in text] == []
