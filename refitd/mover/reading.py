"""Read one bucket from lent memory, block by block, and know at its end whether all of it was read under the loan."""

from __future__ import annotations

from refitd.mover.frames import Checksum
from refitd.mover.round import Round
from refitd.plan.execute import Bytes
from refitd.plan.program import Bucket


class Reading:
    """``owed`` bytes are still to be read; ``digest`` is fed with those that were.

    Raises TransportError where the loan is not what the round was told, Stopped.
    """

    def __init__(self, round_: Round, bucket: Bucket) -> None:
        self._round, self._bucket = round_, bucket
        self._word = round_.options.words.get(bucket.src)
        self.owed, self.digest = bucket.nbytes, Checksum(bucket.id)
        with round_.touching():
            self._memory = round_.lender(bucket, self._word)
            self._blocks = self._memory.pack_blocks(round_.program, bucket)

    def read(self) -> Bytes:
        """The next block, valid until the next call; the last one only where the loan held until it was read.

        Raises TransportError where the loan was withdrawn, Stopped where the round has ended; nothing is mapped then.
        """
        try:
            with self._round.touching(), self._round.gathering:
                block = next(self._blocks)
                self.digest.update(block.data)
                if len(block) == self.owed:
                    self._round.require_loan(self._bucket, self._memory, self._word)
        except BaseException:
            self._blocks.close()
            raise
        self.owed -= len(block)
        return block
