"""Virtual time: an asyncio loop that jumps to the next timer, processes that can be killed and paused, blocking code.

Nothing here waits, and nothing runs at the same time: one handle runs after another, in an order that the seed decides.
Blocking code (the daemon's store threads) runs in greenlets, whose waits are waits in virtual time.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from greenlet import getcurrent, greenlet

TICK = 1e-6  # between two words of one connection: timers of the same moment run in any order
_numbers = itertools.count()


class Idle(Exception):
    """Nothing is left to happen: whoever waits, waits for ever."""


class Process:
    """What the kernel stops and ends as a whole: everything that runs in its context."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.dead = False
        self.paused_at: float | None = None
        self.resumed_at = 0.0
        self.on_death: list[Callable[[], None]] = []
        self.held: list[asyncio.Handle] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}{' dead' if self.dead else ''}{' paused' if self.paused else ''}>"

    @property
    def paused(self) -> bool:
        return self.paused_at is not None

    def spawn(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        return loop().create_task(coro, context=self.context.copy())

    def call(self, delay: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Run a callback in this process after a while."""
        return loop().call_later(delay, callback, *args, context=self.context)

    def run(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Run a callback in this process now."""
        return self.context.copy().run(callback, *args)

    def pause(self) -> None:
        """SIGSTOP: nothing of it runs; what would have waits, and the clock goes on."""
        if not self.dead and not self.paused:
            self.paused_at = loop().time()

    def resume(self) -> None:
        """SIGCONT."""
        if self.paused:
            self.paused_at, self.resumed_at = None, loop().time()
            held, self.held = self.held, []
            for handle in held:
                loop().requeue(handle)

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more; whoever watches it hears."""
        if self.dead:
            return
        self.dead, self.paused_at = True, None
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop().graveyard.append(self)  # its frames must not unwind: a killed process runs no finally
        for callback in self.on_death:
            callback()
        self.held = []


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs one handle after another; when none is ready, time jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.events = 0
        self.deadline = float("inf")
        self.graveyard: list[Any] = []
        self.faults: list[str] = []
        self.nobody = contextvars.Context()  # for what goes on whichever process ends
        self._chains: dict[int, asyncio.Future[Any]] = {}
        self.set_task_factory(_task_of_process)
        self.set_exception_handler(self._fault)

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        while not ready:
            scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
            if not scheduled:
                raise Idle
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer.cancelled():
                self.now = max(self.now, timer.when())
                ready.append(timer)
        handle = ready.popleft()
        if handle.cancelled():
            return
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None:
            if process.dead:
                self.graveyard.append(handle)
                return
            if process.paused_at is not None:
                process.held.append(handle)
                return
        self.events += 1
        handle._run()

    def requeue(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)  # type: ignore[attr-defined]

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _check_closed(self) -> None:
        """What unwinds after the end may still cancel its timers."""

    def _process_events(self, event_list: Any) -> None:
        """There are no events but ours."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> Any:
        """Blocking code; an executor of one worker runs one call after another."""
        previous = self._chains.get(id(executor)) if executor is not None else None

        def ordered() -> Any:
            if previous is not None and not previous.done():
                settled = self.create_future()
                previous.add_done_callback(lambda _done: settled.set_result(None))
                wait(settled)
            return func(*args)

        future = blocking(ordered)
        if executor is not None:
            self._chains[id(executor)] = future
            self.graveyard.append(executor)  # so that its id stays its own
        return future

    def _fault(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        trace = "".join(traceback.format_exception(error)) if error else ""
        self.faults.append(f"{context.get('message')}: {trace}")


def loop() -> VirtualLoop:
    """The running loop."""
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running


def _task_of_process(of: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=of, name=f"t{next(_numbers)}", **options)
    process = (options.get("context") or contextvars.copy_context()).get(PROCESS)
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


# Blocking code.


def blocking(func: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run blocking code of the current process; the future of its result."""
    future: asyncio.Future[Any] = loop().create_future()

    def body() -> None:
        try:
            result = func()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for it
            if not future.cancelled():
                future.set_exception(error)
                future.exception()  # a thread that dies unheard is told by whoever joins it
        else:
            if not future.cancelled():
                future.set_result(result)

    thread = greenlet(body)
    thread.gr_context = contextvars.copy_context()
    loop().graveyard.append(thread)
    loop().call_soon(thread.switch)
    return future


def wait(future: asyncio.Future[Any]) -> Any:
    """In blocking code: wait for a future; its result."""
    thread = getcurrent()
    assert thread.parent is not None, "only blocking code waits"
    if not future.done():
        future.add_done_callback(lambda _done: thread.switch(), context=contextvars.copy_context())
        thread.parent.switch()
    return future.result()


def sleep(seconds: float) -> None:
    """In blocking code: let time pass."""
    future = loop().create_future()
    loop().call_later(max(seconds, 0.0), _set, future)
    wait(future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Event:
    """`threading.Event` for blocking code in virtual time."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[asyncio.Future[None]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            _set(future)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            future = loop().create_future()
            self._waiting.append(future)
            if timeout is not None:
                loop().call_later(timeout, _set, future)
            wait(future)
            self._waiting = [other for other in self._waiting if other is not future]
        return self._set


class Thread:
    """`threading.Thread` as a greenlet of the process that started it."""

    def __init__(self, target: Callable[[], None], name: str = "", daemon: bool = True) -> None:
        self._target, self.name, self.daemon = target, name, daemon
        self._done: asyncio.Future[Any] | None = None

    def start(self) -> None:
        self._done = blocking(self._target)

    def join(self, timeout: float | None = None) -> None:
        del timeout
        if self._done is not None:
            wait(self._done)


class RLock:
    """`threading.RLock` where nobody is interrupted."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_error: object) -> None:
        """As the real one has it."""


class Condition(RLock):
    """`threading.Condition` for blocking code in virtual time; its lock is nothing."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            _set(future)

    def wait(self, timeout: float | None = None) -> None:
        future = loop().create_future()
        self._waiting.append(future)
        if timeout is not None:
            loop().call_later(max(timeout, 0.0), _set, future)
        wait(future)
        self._waiting = [other for other in self._waiting if other is not future]

    def wait_for(self, holds: Callable[[], bool], timeout: float) -> bool:
        end = loop().time() + timeout
        while not holds() and loop().time() < end:
            self.wait(end - loop().time())
        return holds()
