"""One GPU as a mover uses it: a driver, what is mapped from other processes, and kernels that are compiled already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from refitd.errors import DeviceError
from refitd.hook.gpu.driver import Calls, Driver
from refitd.mover.cuda.imports import Imports
from refitd.mover.kernels import Launch, Table, Touch, prepare, touch
from refitd.mover.spent import Spent

_active = threading.local()  # by thread: which device it is


class Device:
    """May be used from any thread that calls `activate` first. ``name`` is torch's name of it."""

    def __init__(self, driver: Calls, name: str) -> None:
        self.driver, self.name = driver, name
        self._stream: Any = None
        self.uuid = driver.uuid()
        _active.device = None  # to make a driver is to change the thread's context
        self.imports = Imports(driver)
        self._lock = threading.Lock()
        self._compiled: dict[tuple[tuple[str, str], bool], int] = {}  # (dtypes, store) -> kinds of rows

    def activate(self) -> None:
        """Work in this device's context from here on, in the calling thread."""
        if getattr(_active, "device", None) is self:  # nobody but `activate` changes it in a mover's threads
            return
        if self.name != "cpu":
            import torch

            torch.cuda.set_device(self.name)
            if self._stream is not None:
                torch.cuda.set_stream(self._stream)
        self.driver.activate()
        _active.device = self

    def step_aside(self) -> None:
        """Launch on a stream of our own from here on: in a client's process the usual one is the client's."""
        if self.name != "cpu":
            import torch

            stream: Any = torch.cuda.Stream
            with device_errors("make a stream"):
                self._stream = stream(device=self.name)
        _active.device = None

    def reach(self, uuid: str) -> None:
        """Let kernels here read the memory of another card. Raises DeviceError."""
        self.driver.enable_peer(uuid)

    def room(self, nbytes: int, what: str) -> Any:
        """Memory of this device's own, as a tensor of bytes (zeros). Raises DeviceError, where none is left."""
        with device_errors(what):
            import torch

            return torch.zeros(nbytes, dtype=torch.uint8, device=self.name)

    def prepare(self, table: Table, kinds: int = 0) -> Launch:
        """Ready to run, by a kernel that is compiled already where one has all kinds of rows that ``table`` has.

        ``kinds``: more of them, that the kernel shall have too. Raises DeviceError where the device has no memory left.
        """
        of = table.dtypes, table.store
        with self._lock:
            known = self._compiled.get(of, 0)
            self._compiled[of] = kinds = known | kinds | table.kinds
        with device_errors("prepare a launch"):
            return prepare(table, self.name, kinds=kinds)

    def touch(self, tables: Sequence[Table]) -> Touch | None:
        """What reads a little of what ``tables`` move, ahead of it; None where kernels do not move it. As `prepare`."""
        with device_errors("prepare a touch"):
            return touch(tables, self.name)


def open_device(uuid: str, spent: Spent) -> Device:
    """The GPU of that UUID. Raises DeviceError where there is none, or no driver, or no torch for CUDA."""
    with spent.on("import"), contextlib.suppress(ImportError):
        import cuda.bindings.driver  # noqa: F401  so that the context's time is its own
    with spent.on("context"):
        driver = Driver(uuid)
    with spent.on("torch"), device_errors("start torch on the device"):
        import torch

        torch.cuda.init()  # type: ignore[no-untyped-call]
    return Device(driver, f"cuda:{driver.ordinal}")


@contextlib.contextmanager
def device_errors(call: str) -> Iterator[None]:
    """What torch and Triton raise for a device becomes a DeviceError: most of it only a new process can mend."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(call, _first_line(error)) from error


def _first_line(error: Any) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
