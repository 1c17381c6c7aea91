"""One rank of ``refitd bench repair``: a process with a communicator that is broken and mended on command."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from refitd.bench.fake_nccl import FakeNccl, Faults
from refitd.errors import CommunicatorError
from refitd.hook.wire import Connection, Message
from refitd.mover.nccl.library import Communicator, Library, Part, finish
from refitd.mover.nccl.opening import open_library
from refitd.mover.nccl.repair import Change, repair

SCRATCH_BYTES, PAYLOAD_BYTES = 4096, 4 << 20
_POLL_SECONDS = 0.0005


class Woken(Exception):
    """The parent has something to say."""


class FolderMeeting:
    """Agreement by files of one folder, which no other repair uses."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        folder.mkdir(parents=True, exist_ok=True)

    def tell(self, topic: str, value: str) -> None:
        draft = self._folder / f".{topic}.{self._rank}"
        draft.write_text(value)
        draft.rename(self._folder / topic)

    def hear(self, topic: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while not (self._folder / topic).exists():
            if time.monotonic() > deadline:
                raise CommunicatorError("meeting", f"nobody told {topic} within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return (self._folder / topic).read_text()

    def agree(self, topic: str, good: bool, seconds: float) -> bool:
        self.tell(f"{topic}-{self._rank}", "yes" if good else "no")
        try:
            return all(self.hear(f"{topic}-{rank}", seconds) == "yes" for rank in range(self._size))
        except CommunicatorError:
            return False


@dataclass
class Rank:
    """``device`` is cpu (the fake library) or cuda; ``gpu`` the card's number, ``host`` as for `Nccl`."""

    number: int
    device: str
    gpu: int
    host: str
    faults: Path
    comm: Communicator | None = None
    library: Library = field(init=False)

    def start(self) -> None:
        where = "cpu" if self.device == "cpu" else f"cuda:{self.gpu}"
        if self.device == "cpu":
            self.library = FakeNccl(Faults(file=self.faults))
        else:
            torch.cuda.set_device(self.gpu)
            self.library = open_library(self.host)
        self._buffer = torch.zeros(SCRATCH_BYTES + 2 * PAYLOAD_BYTES, dtype=torch.uint8, device=where)

    def serve(self, connection: Connection) -> None:
        """Do what the parent says until it hangs up."""
        self.start()
        connection.send({"ready": self.library.version})
        while True:
            message, _fds = connection.receive()
            if message["do"] == "quit":
                return
            try:
                answer = self._do(message, connection)
            except CommunicatorError as error:
                answer = {"failed": str(error)}
            connection.send(answer)

    def _do(self, message: Message, connection: Connection) -> Message:
        if message["do"] == "repair":
            return self._repair(message)
        if message["do"] == "transfer":
            began = time.monotonic()
            self._transfer(message["rank"], message["size"], message["seconds"], lambda: None)
            return {"seconds": time.monotonic() - began}
        if message["do"] == "hang":
            return self._hang(message, connection)
        if self.comm is not None:  # drop
            self.comm.abort()
            self.comm = None
        return {}

    def _repair(self, said: Message) -> Message:
        """``fresh_id``: without an old communicator, and without a method that needs one."""
        change = Change(said["method"], said["size"], said["rank"], tuple(said["gone"]), said["died"])
        meeting = FolderMeeting(Path(said["folder"]), said["rank"], said["size"])
        began = time.monotonic()
        old, self.comm = self.comm, None
        scratch = int(self._buffer.data_ptr())
        done = repair(self.library, old, change, meeting, said["deadline"], scratch)
        self.comm = done.comm
        return {
            "seconds": time.monotonic() - began, "method": done.method, "refused": done.refused, "steps": done.seconds,
        }  # fmt: skip

    def _transfer(self, rank: int, size: int, seconds: float, tick: Callable[[], None]) -> None:
        """Around the ring."""
        assert self.comm is not None
        at = int(self._buffer.data_ptr()) + SCRATCH_BYTES
        sends = [Part((rank + 1) % size, at, PAYLOAD_BYTES)]
        receives = [Part((rank - 1) % size, at + PAYLOAD_BYTES, PAYLOAD_BYTES)]
        finish("transfer", self.comm.exchange(sends, receives), seconds, tick)

    def _hang(self, said: Message, connection: Connection) -> Message:
        """Transfer with a peer that never comes, until the parent says that it is dead, or NCCL does."""
        connection.send({"hanging": os.getpid()})

        def tick() -> None:
            if select.select([connection.fileno()], [], [], 0)[0]:
                raise Woken

        try:
            self._transfer(said["rank"], said["size"], said["seconds"], tick)
        except Woken:
            told = connection.receive()[0]
            return {"noticed": time.monotonic() - told["killed"], "by": "parent"}
        except CommunicatorError as error:
            told = connection.receive()[0]
            return {"noticed": time.monotonic() - told["killed"], "by": str(error)}
        connection.receive()  # neither of its neighbours was the victim
        return {"noticed": 0.0, "by": "nothing: the transfer ended"}


def answer_of(answer: Message) -> dict[str, Any]:
    """Raises CommunicatorError where the rank has failed."""
    if "failed" in answer:
        raise CommunicatorError("rank", answer["failed"])
    return answer
