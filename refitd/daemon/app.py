"""The daemon: starts its parts in order, waits for a signal, and stops them in the opposite order."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from refitd.config import Config, split_listen
from refitd.daemon.agree import Agreement
from refitd.daemon.data import DataServer
from refitd.daemon.job import Job
from refitd.daemon.observe import Observer
from refitd.daemon.orders import Orders
from refitd.daemon.reload import merge
from refitd.daemon.requests import Requests
from refitd.daemon.secret import load_secret
from refitd.daemon.sweep import Sweeper
from refitd.errors import ConfigError, Refused
from refitd.hook.server import HookServer
from refitd.mover.pool import MoverPool
from refitd.store import MemoryStore, open_store
from refitd.telemetry.activation import passed_sockets
from refitd.telemetry.logs import setup
from refitd.telemetry.metrics import Metrics
from refitd.telemetry.notify import Notifier

START_SECONDS = 60.0  # until a store answers whether it can be used; a child of our own must start first
STUCK_SECONDS = 60.0  # more than a pass of a job's loop takes that asks one dead node after the other


class Daemon:
    """One refitd on one node. `start` raises ConfigError or Refused for what is wrong with its surroundings."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.observer = Observer(self)
        self.jobs: dict[str, Job] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger().bind(node=config.node.name)
        self._lock = _lock_node(config)
        self._secret = load_secret(config)
        self.orders = Orders(self)
        self.requests = Requests(self)
        self.hook = HookServer(
            config.hook.socket, self.requests, uids=config.hook.uids, gids=config.hook.gids,
            node=config.node.name, log=self._log_hook, count=self.metrics.hook_error,
            listener=passed_sockets().get("hook"), mover=config.data.path,
        )  # fmt: skip
        self._pool = MoverPool()
        self._notify = Notifier()

    async def start(self) -> None:
        """Bind everything that can be refused, then say READY; the store may come later."""
        config = self.config
        self._data = DataServer(config.data.host, config.data.port, self._secret, self._take_edge, self._find_blob)
        self._data.start()
        store = config.store
        self._notify.extend(START_SECONDS)
        self._store = await asyncio.to_thread(
            open_store, store.url, user=store.user, password_file=store.password_file, ca=store.ca,
            cert=store.cert, key=store.key, listen=store.listen, request_timeout=store.request_timeout,
        )  # fmt: skip
        listen = config.metrics.listen
        self._http = self.observer.serve(*split_listen(listen)) if listen else None
        await self.hook.start()  # clients find everything that a request needs
        self._warming = asyncio.create_task(self._pool.start())
        self._sweeping = asyncio.create_task(Sweeper(self._store, config.job.ttl, self.jobs.keys).run())
        http = self._http.url if self._http else ""
        self._log.info("ready", socket=config.hook.socket, data_port=self._data.port, store=store.url, http=http)
        self._notify.ready(f"serving {config.hook.socket}")

    async def stop(self) -> None:
        """Leave every job, end every mover, remove the socket."""
        self._notify.stopping()
        for task in (self._warming, self._sweeping, *self._leaving):
            task.cancel()
        await asyncio.gather(self._warming, self._sweeping, *self._leaving, return_exceptions=True)
        await self.hook.stop()
        for job in self.jobs.values():
            await job.close()
        await self._pool.close()
        await self._data.stop()
        if self._http:
            await asyncio.to_thread(self._http.close)
        await asyncio.to_thread(self._store.close)
        os.close(self._lock)
        self._log.info("stopped")

    def job(self, name: str) -> Job:
        """The job of this name, joined with the first client that speaks of it."""
        if name not in self.jobs:
            data = self.config.data
            address = data.advertise or f"{data.host}:{self._data.port}"
            self.jobs[name] = Job(name, self.config, self._store, self._pool, self.metrics, self._secret, address)
            self.jobs[name].on_ended = self.job_ended
            self.jobs[name].draining.wanted = self.orders.draining
        return self.jobs[name]

    def guest(self, name: str) -> Agreement:
        """The records of a job that this node has no part in, to read and to write a word; the caller closes it."""
        store = self.config.store
        inline = isinstance(self._store, MemoryStore)
        return Agreement(self._store, name, store.lease_ttl, store.keepalive, inline, lambda: None)

    def job_ended(self, job: Job) -> None:
        """A job is over: leave it."""
        if self.jobs.get(job.job) is job:
            del self.jobs[job.job]
            task = asyncio.create_task(job.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def store_requests(self) -> Mapping[str, int]:
        """Requests sent to the store so far, by kind."""
        return self._store.counts.so_far()

    def watchdog(self) -> None:
        """Feed systemd's watchdog while the loops that do the work turn: one that is stuck starves it."""
        self.metrics.beat("the main loop")
        if not self.metrics.pulse.stuck(STUCK_SECONDS):
            self._notify.watchdog()
        self._notify.tell(self.observer.line())

    def reload(self, read: Callable[[], Config]) -> None:
        """Read the configuration again and take from it what can change while we run. A bad one changes nothing."""
        self._notify.reloading()
        try:
            change = merge(self.config, read())
        except ConfigError as error:
            self.metrics.reloaded(False)
            self._log.error("reload_refused", error=str(error))
        else:
            self.metrics.reloaded(True)
            self.config = change.config
            self.hook.allow(change.config.hook.uids, change.config.hook.gids)
            for job in self.jobs.values():
                job.config = change.config
            setup(change.config.log.level, change.config.log.format)
            self._log.info("reloaded", taken=change.taken, waiting_for_a_restart=change.waiting)
        self._notify.ready(self.observer.line())

    def _take_edge(self, hello: dict[str, Any], sock: Any) -> None:
        job = self.jobs.get(str(hello.get("job")))
        if job is None:
            sock.close()
        else:
            job.take_edge(hello, sock)

    def _find_blob(self, digest: str) -> bytes | None:
        return next((job.blobs[digest] for job in self.jobs.values() if digest in job.blobs), None)

    def _log_hook(self, event: str, facts: dict[str, Any]) -> None:
        self._log.warning(event, **facts)


def _lock_node(config: Config) -> int:
    """Hold the node's lock file: one daemon for a node name on a machine. Raises Refused, ConfigError."""
    folder = Path(config.node.state_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / f"{config.node.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("node.state_dir", "a folder that we may write to", f"{folder} ({error.strerror})") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise Refused("node.name", "a node without a daemon", f"{config.node.name} has one already") from None
    return fd


async def run(config: Config, read: Callable[[], Config] | None = None) -> int:
    """Run until SIGTERM or SIGINT. A second SIGINT ends the process at once. SIGHUP takes what ``read`` gives.

    SIGTERM may come again: a batch system tells every process of a job, and so does the script that began it.
    """
    daemon = Daemon(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            sys.exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)
    await daemon.start()
    if read:
        loop.add_signal_handler(signal.SIGHUP, daemon.reload, read)
    while not stop.is_set():
        daemon.watchdog()
        try:
            async with asyncio.timeout(1.0):
                await stop.wait()
        except TimeoutError:
            continue
    await daemon.stop()
    return 0
