"""What the records of a job may never say, one change after the other: I2, I3, I4 and I10 of the design, by name.

It believes nobody: it reads the store's history as it was written, and knows no clock and no process. The simulation
feeds it every write of its store; a chaos run, what a watch of the real one tells (`Listener`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from refitd.daemon.paths import Paths
from refitd.epoch.records import Commit, Lane, PubId
from refitd.epoch.view import Stored, View
from refitd.errors import StoreError
from refitd.store import Deleted, Event, Item, Put, Resync, Store, Watch

LATE_SECONDS = 10.0
Broken = Callable[[str, str], None]


class Witness:
    """``broken`` is called with the name of what does not hold, and a text. ``one_plan``: whether I10 must hold now."""

    def __init__(self, job: str, broken: Broken, one_plan: Callable[[], bool] = lambda: True) -> None:
        self.view = View()
        self.seen: Counter[str] = Counter()  # records by kind; and gaps
        self.acked: dict[tuple[str, str], int] = {}  # by replica and node: the newest token
        self._key, self._broken, self._one_plan = Paths(job).key, broken, one_plan
        self._digests: dict[tuple[str, int], str] = {}
        self._committed: dict[str, PubId] = {}
        self._generation = 0

    def take(self, event: Event) -> None:
        """The next change. After a gap the records are believed as they stand."""
        if isinstance(event, Resync):
            self._begin_anew(event)
        elif isinstance(event, Deleted):
            self.view.delete(self._key(event.key), event.revision)
        elif self._put(event.item):
            self._judge(self._key(event.item.key))

    def _put(self, item: Item) -> bool:
        return self.view.put(self._key(item.key), item.value, item.create_revision, item.mod_revision)

    def _begin_anew(self, event: Resync) -> None:
        self.seen["gaps"] += 1
        self.view = View()
        for item in event.items:
            self._put(item)

    def _judge(self, key: str) -> None:
        kind, _, name = key.partition("/")
        if kind == "generation":
            self.assert_i3_generation()
        elif kind == "acks":
            self.assert_i4_i10_ack(name)
        elif kind == "commits":
            self.assert_i2_i3_commit(name)
        self.seen[kind] += 1

    def _expect(self, holds: bool, name: str, text: str) -> None:
        if not holds:
            self._broken(name, text)

    def assert_i3_generation(self) -> None:
        """Generations never go back, and a run leads once."""
        assert self.view.generation is not None
        record = self.view.generation.value
        self._expect(record.number > self._generation, "I3", f"generation {record.number} after {self._generation}")
        self._expect(record.run not in record.past, "I3", f"run {record.run} opens a second generation")
        self._generation = record.number

    def assert_i4_i10_ack(self, name: str) -> None:
        """An ack is of its lane's present token, and of the plan that the others have."""
        replica, _, node = name.partition("/")
        ack, lane = self.view.acks[name].value, self.view.lanes.get(replica)
        token = lane.revision if lane else 0
        self._expect(ack.token == token, "I4", f"ack of {node} in {replica} under {ack.token}, which is {token} now")
        self.acked[replica, node] = max(ack.token, self.acked.get((replica, node), 0))
        if ack.digest:
            first = self._digests.setdefault((replica, ack.token), ack.digest)
            same = first == ack.digest or not self._one_plan()
            self._expect(same, "I10", f"{node} in {replica}: {ack.digest}, others {first}")

    def assert_i2_i3_commit(self, replica: str) -> None:
        """A commit rests on what every node of the lane verified under this token, in lives that stand; none goes
        back."""
        commit, lane = self.view.commits[replica].value, self.view.lanes.get(replica)
        last = self._committed.get(replica, PubId(0, 0))
        self._expect(commit.id >= last, "I3", f"{replica} commits {tuple(commit.id)} after {tuple(last)}")
        self._committed[replica] = commit.id
        what = f"{replica} commits {tuple(commit.id)} under {commit.token}"
        for reason in self._unfounded(replica, commit, lane):
            self._broken("I2", f"{what}: {reason}")

    def _unfounded(self, replica: str, commit: Commit, lane: Stored[Lane] | None) -> Iterator[str]:
        if lane is None or lane.revision != commit.token:
            yield f"the lane's token is {lane.revision if lane else 0}"
            return
        if lane.value.incarnations != commit.incarnations:
            yield f"it names {commit.incarnations}, the lane is of {lane.value.incarnations}"
        for slot in lane.value.members:
            if self.view.created_of(f"members/{slot.node}") != slot.member:
                yield f"{slot.key} was on {slot.node} in another life"
        for node in lane.value.member_nodes:
            ack = self.view.ack(replica, node)
            if ack is None or (ack.token, ack.phase, ack.id) != (commit.token, "verified", commit.id):
                yield f"{node} said {(ack.token, ack.phase, *ack.id) if ack else 'nothing'}"


class Listener:
    """A thread that tells a witness what a watch of the store tells, and keeps what it finds in ``broken``.

    Raises StoreError where the store does not answer.
    """

    def __init__(self, store: Store, job: str) -> None:
        everything = Paths(job).everything
        self.broken: list[str] = []
        self._told, self._seen, self._store, self._span = Counter[str](), 0, store, everything
        self.witness = Witness(job, lambda name, text: self.broken.append(f"{name}: {text}"))
        items, self._seen = store.list(everything)
        for item in items:
            self.witness.take(Put(item))
        self._watch: Watch = store.watch(everything, self._seen + 1)
        self._thread = threading.Thread(target=self._listen, name="witness", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            for event in self._watch:
                self.witness.take(event)
                self._seen = event.item.mod_revision if isinstance(event, Put) else event.revision
        except Exception as error:  # noqa: BLE001 - a witness that has gone blind must say so
            self.broken.append(f"the witness saw no more: {error!r}")

    def catch_up(self) -> None:
        """Wait until all that the store holds by now was seen, or nothing more will be."""
        deadline, newest = time.monotonic() + LATE_SECONDS, None
        while self._thread.is_alive() and (newest is None or self._seen < newest):
            if time.monotonic() > deadline:
                self.broken.append(f"the witness saw nothing after {self._seen} for {LATE_SECONDS:g} s, of {newest}")
                return
            newest = self._newest() if newest is None else newest
            time.sleep(0.01)

    def _newest(self) -> int | None:
        """The last change of what is in the store; None while it does not answer, as after an outage."""
        try:
            items, _revision = self._store.list(self._span)
        except StoreError:
            return None
        return max((item.mod_revision for item in items), default=0)

    def news(self) -> dict[str, int]:
        """How many records of each kind were seen since it was asked last."""
        before, self._told = self._told, self.witness.seen.copy()
        return dict(self._told - before)

    def close(self) -> None:
        self._watch.close()
        self._thread.join()
