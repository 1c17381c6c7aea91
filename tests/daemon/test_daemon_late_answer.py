"""An answer of the store that comes after the watch has told what became of the record since."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from refitd.daemon.agree import Agreement
from refitd.epoch.codec import encode
from refitd.epoch.records import Leader
from refitd.store import Compare, Deleted, DeleteOp, Event, Item, MemoryStore, Op, TxnResult

KEY = "/refitd/job/leader"
A, B = encode(Leader("a", "1")), encode(Leader("b", "2"))


class Late(MemoryStore):
    """Does what it is asked, then ``meanwhile``, and answers when the watch has told both."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] | None = None
        self.told = threading.Event()

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        result = super().txn(compares, then, otherwise)
        if result.ok:
            self._change()
        return result

    def get(self, key: str) -> Item | None:
        item = super().get(key)
        self._change()
        return item

    def remove(self) -> None:
        """Somebody else removes the record."""
        MemoryStore.txn(self, [], [DeleteOp(KEY)])

    def _change(self) -> None:
        if (change := self.meanwhile) is not None:
            self.meanwhile = None
            change()
            assert self.told.wait(10)


def late_write(expected: int, before: bytes | None) -> tuple[bool, int]:
    """Write ``leader`` while somebody else deletes it; what write says, and the revision in the picture afterwards."""
    store = Late()

    async def main() -> tuple[bool, int]:
        agreement = Agreement(store, "job", 10, 3, False, lambda: None)
        if before is not None:
            store.put(KEY, before)
        await agreement.start()
        apply = agreement.following._apply

        def told(event: Event) -> bool:
            changed = apply(event)
            if isinstance(event, Deleted):
                store.told.set()
            return changed

        agreement.following._apply = told  # type: ignore[method-assign]
        store.meanwhile = store.remove
        done = await agreement.write("leader", A, expected)
        revision = agreement.view.revision_of("leader")
        await agreement.close()
        return done, revision

    found = asyncio.run(main())
    store.close()
    return found


def test_a_record_that_is_gone_again_does_not_come_back_with_the_answer() -> None:
    """Written at 2, deleted at 3, both told; the answer comes last, and the picture stays without it."""
    assert late_write(0, None) == (True, 0)


def test_what_was_read_back_too_late_does_not_come_back_either() -> None:
    """The write is refused; what it reads instead is deleted before the read's answer is here."""
    assert late_write(99, B) == (False, 0)
