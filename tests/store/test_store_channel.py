"""What a channel makes of servers that fail one after the other, without any server."""

from __future__ import annotations

from types import SimpleNamespace

from structlog.testing import capture_logs

from refitd.store._etcd_channel import Channel
from refitd.store._etcd_endpoint import Credentials
from refitd.store.base import Counts


def test_an_outage_is_said_once_and_so_is_its_end() -> None:
    """Without a leader servers are left dozens of times a second: all but the first are for those who debug."""
    channel = Channel("127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", Credentials(), 1.0, Counts())
    answer = SimpleNamespace(cluster_id=1, revision=5, raft_term=2)
    with capture_logs() as logs:
        channel.note(answer)
        assert not channel.away
        for _ in range(4):
            channel.blame(channel.endpoint, "no leader")
            assert channel.away
        channel.note(answer)
        assert not channel.away
        channel.note(answer)
        channel.blame(channel.endpoint, "no leader")
    said = [(line["event"], line["log_level"]) for line in logs]
    left = "store_endpoint_left"
    expected = [(left, "warning"), *[(left, "debug")] * 3, ("store_answers", "info"), (left, "warning")]
    assert said == expected
    channel.close()


def test_a_failure_that_changes_no_server_leaves_the_first_change_to_be_said() -> None:
    """A watch may blame a server that was left already; the outage is not known to people by that."""
    channel = Channel("127.0.0.1:1,127.0.0.1:2", Credentials(), 1.0, Counts())
    other = next(one for one in channel._endpoints if one is not channel.endpoint)
    with capture_logs() as logs:
        channel.blame(other, "it ended a watch")
        assert channel.away
        channel.note(SimpleNamespace(cluster_id=1, revision=5, raft_term=2))
        channel.blame(other, "it ended a watch")
        channel.blame(channel.endpoint, "no leader")
    assert [(line["event"], line["log_level"]) for line in logs] == [("store_endpoint_left", "warning")]
    channel.close()
