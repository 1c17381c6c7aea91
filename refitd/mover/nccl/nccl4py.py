"""`Library` by nccl4py (0.6), over the NCCL that torch has loaded. It needs a GPU; docs/gpu.md says what has run.

Communicators are nonblocking, all calls are grouped, buffers are byte views and are never registered. A call that is
still under way is told from a finished one by `state` alone: nccl4py treats both alike.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from refitd.errors import CommunicatorError
from refitd.mover.device import bytes_at
from refitd.mover.nccl import streams
from refitd.mover.nccl.library import IN_PROGRESS, SETTLED, SPIN_PAUSE, Part, settle, usable

ENQUEUE_SECONDS = 3.0
EVENT_SECONDS = 0.05  # usually far below a millisecond; connecting takes longer, and blocks nobody
# A block may need a processor to itself, and an H200 has 132: kernels of four lanes fit at once, a fifth one's wait.
# Over NVLink 8 blocks reach 267 GB/s, 16 and 32 reach 366 and 372; but beside kernels that pack, which take their share
# of the processors, 16 fall to 326 and 32 to 355 (``send_recv_*`` of `refitd bench refit --gpus 2`, nccl_steps.py).
MAX_CTAS = 32
_USE = "nccl"  # of streams


class Nccl:
    """The process's NCCL. Raises CommunicatorError where it is missing or too old.

    ``host``: what NCCL is to take for this rank's host (several ranks on one card must differ); only the first counts.
    """

    def __init__(self, host: str = "") -> None:
        if host:
            os.environ.setdefault("NCCL_HOSTID", host)
        with _errors("load NCCL"):
            import nccl.bindings.nccl as bindings
            import nccl.core as core
            import torch

            torch.cuda.init()  # type: ignore[no-untyped-call]
            loaded = core.get_version().libnccl
        self._core, self._results = core, bindings.Result
        self.version = "" if loaded is None else str(loaded.version)
        if why := usable(self.version):
            raise CommunicatorError("load NCCL", why)

    def unique_id(self) -> bytes:
        with _errors("ncclGetUniqueId"):
            return bytes(self._core.get_unique_id())

    def init(self, size: int, rank: int, id_: bytes, name: str) -> _Comm:
        with _errors("ncclCommInitRank"):
            uid = self._core.UniqueId.from_bytes(id_)
            return _Comm(self, self._core.Communicator.init(size, rank, uid, self.config(name)))

    def join(self, size: int, rank: int, id_: bytes, name: str) -> _Comm:
        with _errors("ncclCommGrow"):
            uid = self._core.UniqueId.from_bytes(id_)
            return _Comm(self, self._core.Communicator().grow(size, uid, rank, self.config(name)))

    def config(self, name: str) -> Any:
        """Of every communicator."""
        return self._core.NCCLConfig(blocking=False, max_ctas=MAX_CTAS, comm_name=name)

    def unique(self, id_: bytes) -> Any:
        """nccl4py's own form of an id."""
        return self._core.UniqueId.from_bytes(id_)

    def group(self) -> Any:
        """nccl4py's group of calls."""
        return self._core.group()

    def shrink_flag(self, broken: bool) -> Any:
        """How a communicator is to be shrunk."""
        return self._core.CommShrinkFlag.ABORT if broken else self._core.CommShrinkFlag.DEFAULT

    def word(self, result: Any) -> str:
        """A result code as `Communicator.state` gives it."""
        if result == self._results.Success:
            return SETTLED
        return IN_PROGRESS if result == self._results.InProgress else str(getattr(result, "name", result))


class _Comm:
    """The object of nccl4py is kept until the state has settled: it owns what is still being made."""

    def __init__(self, library: Nccl, comm: Any) -> None:
        import torch

        self._library, self._comm, self._gone = library, comm, False
        self._device = f"cuda:{torch.cuda.current_device()}"
        self._stream = streams.take(self._device, _USE)

    def state(self) -> str:
        if self._gone:
            return "aborted"
        if not self._comm.is_valid:  # shrink and grow fill it in at their end; until then only the parent has a state
            return IN_PROGRESS
        with _errors("ncclCommGetAsyncError"):
            return self._library.word(self._comm.get_async_error())

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], after: Sequence[Any] = ()) -> _Work:
        settle("exchange", [self], ENQUEUE_SECONDS, _idle)  # no call may follow one that is still under way
        with _errors("ncclGroupEnd"):
            for event in after:
                self._stream.wait_event(event)
            handle, _known = self._stream.cuda_stream, self._comm.device  # which asks NCCL once, outside of a group
            with self._library.group():
                for peer, address, nbytes in sends:
                    self._comm.send(bytes_at(address, nbytes, self._device), peer, stream=handle)
                for peer, address, nbytes in receives:
                    self._comm.recv(bytes_at(address, nbytes, self._device), peer, stream=handle)
        work = _Work(self, self._stream)
        work.begun()
        return work

    def revoke(self) -> None:
        with _errors("ncclCommRevoke"):
            self._comm.revoke()

    def abort(self) -> None:
        gone, self._gone = self._gone, True
        if not gone:
            with _errors("ncclCommAbort"):
                self._comm.abort()
            streams.give(self._device, _USE, self._stream)

    def shrink(self, excluded: Sequence[int], broken: bool, name: str) -> _Comm:
        with _errors("ncclCommShrink"):
            flag = self._library.shrink_flag(broken)
            return _Comm(self._library, self._comm.shrink(list(excluded), self._library.config(name), flag))

    def grow_id(self) -> bytes:
        with _errors("ncclCommGetUniqueId"):
            return bytes(self._comm.get_unique_id())

    def grow(self, size: int, id_: bytes | None, name: str) -> _Comm:
        with _errors("ncclCommGrow"):
            uid = None if id_ is None else self._library.unique(id_)
            return _Comm(self._library, self._comm.grow(size, uid, None, self._library.config(name)))


class _Work:
    """Done when an event is that was recorded after the group: no sooner than the group has been enqueued."""

    def __init__(self, comm: _Comm, stream: Any) -> None:
        self._comm, self._stream = comm, stream
        self._event: Any = None

    def begun(self) -> None:
        """Record the event as soon as the group is enqueued, before anything else is; the first group takes longer."""
        deadline = time.monotonic() + EVENT_SECONDS
        while self._event is None and time.monotonic() < deadline:
            self.done()
            time.sleep(SPIN_PAUSE)

    def done(self) -> bool:
        state = self._comm.state()
        if state not in (SETTLED, IN_PROGRESS):
            raise CommunicatorError("exchange", state)
        if state == IN_PROGRESS:
            return False
        if self._event is None:
            self._event = self._stream.record_event()
        return bool(self._event.query())


def _idle() -> None:
    """Between polls there is nothing to do."""


@contextlib.contextmanager
def _errors(call: str) -> Iterator[None]:
    """nccl4py's errors have no base class but Exception."""
    try:
        yield
    except CommunicatorError:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise CommunicatorError(call, f"{type(error).__name__}: {text}") from error
