"""Who is asked to lend, and who is told that the receive it waits in has come to nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.daemon.lane import LaneDriver
from refitd.daemon.prepare import Preparer
from refitd.daemon.rank import LocalRank
from refitd.epoch.codec import encode
from refitd.epoch.records import Ack, PubId
from refitd.epoch.view import View

OLD, NEW = PubId(1, 28), PubId(1, 30)


@pytest.mark.parametrize(("heard", "left_behind"), [(OLD, True), (PubId(1, 20), False)])
def test_what_the_lead_heard_is_known_although_its_neighbour_missed_it(heard: PubId, left_behind: bool) -> None:
    """The lead's node says what the lead serves, not only the oldest that any of its ranks serves."""
    ack = Ack(9, "digest", "prepared", *NEW, {}, served=(0, 0), lead=heard)
    view = View()
    view.put("acks/r0/a", encode(ack), 5, 5)
    lane = SimpleNamespace(lead=SimpleNamespace(key="engine/r0/0", node="a"))
    context = SimpleNamespace(agreement=SimpleNamespace(view=view), ranks={})
    driver = cast("LaneDriver", SimpleNamespace(context=context, lane=lane, replica="r0"))
    waits = SimpleNamespace(key="engine/r0/1", receiving=SimpleNamespace(generation=1, revision=28))
    assert Preparer(driver)._left_behind(cast("LocalRank", cast("Any", waits)), NEW) is left_behind
