"""What is asked of the node around the GPUs: store, socket, clock, limits, and what refits reach. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from refitd.hook.executor import LIBRARY
from refitd.operate.doctor.check import Check, fail, good, skip, warn
from refitd.operate.doctor.facts import ANSWERS, FORBIDDEN, NO_DAEMON, REFUSED, SILENT, Facts
from refitd.operate.rate import format_rate

NOFILE, LEAST_NOFILE = 65536, 4096  # what the unit sets; a daemon of eight ranks in a large job
SHM = 1 << 30  # NCCL and data loaders; container runtimes give 64 MiB
_CLOCK_SECONDS = 1.0
_SLOW_STORE = 0.1
_LARGE = 64e6  # bytes of a refit below which it is messages that take the time
_PART = {"network": 0.3, "peer": 0.1}  # of what a link can carry that a refit should reach; peers also check and cast

_STORE_REMEDIES = {
    "StoreUnavailable": "is etcd up (etcdctl endpoint health), and does a firewall let its port 2379 through?",
    "StoreTimeout": "etcd is overloaded or has no quorum: etcdctl endpoint status; look at its disk",
    "Unauthenticated": "check store.user and store.password_file against etcdctl user get",
    "Untrusted": "check store.ca, store.cert and store.key: the authority that signed them, their names, their dates",
    "ConfigError": "run this as root or as the daemon's user, who may read the files that the configuration names",
}


def socket(facts: Facts) -> Check:
    """We may speak to the daemon."""
    daemon, name, expected = facts.daemon, "socket", "a daemon that answers, and lets this user in"
    mode = f" (mode {daemon.mode:04o}, {daemon.owner}:{daemon.group})" if daemon.mode else ""
    if daemon.contact == ANSWERS:
        return good(name, expected, f"{daemon.socket}{mode} answers {facts.user}")
    remedies = {
        NO_DAEMON: "start it: systemctl start refitd, or refitd run; another place: --socket, --config, $REFITD_SOCKET",
        FORBIDDEN: f"add {facts.user} to the group {daemon.group or 'refitd'} (usermod -aG) and log in again",
        REFUSED: f"name {facts.user} or one of its groups in hook.uids or hook.gids, and reload",
        SILENT: "the daemon hangs: curl its /healthz, read its log; systemd restarts it once its watchdog is not fed",
    }
    found = f"{daemon.socket}{mode}: {daemon.detail}"
    judge = warn if daemon.contact == NO_DAEMON else fail
    return judge(name, expected, found, remedies[daemon.contact])


def store(facts: Facts) -> Check:
    """The membership store answers."""
    known, name, expected = facts.daemon.status.get("store"), "etcd", "a store that answers quickly"
    if known and known["answers"] is False:
        remedy = _STORE_REMEDIES["StoreUnavailable"]
        return fail(name, expected, f"{known['url']} does not answer the daemon", remedy)
    url = facts.store.url
    if url.startswith("memory:"):
        return good(name, expected, "memory://: this node only, no etcd needed")
    if url.startswith("etcd+spawn:"):
        return good(name, expected, f"{url}: a child of the daemon")
    if facts.store.kind:
        remedy = _STORE_REMEDIES.get(facts.store.kind, _STORE_REMEDIES["StoreUnavailable"])
        return fail(name, expected, f"{url}: {facts.store.detail}", remedy)
    found = f"{url} answers in {1000 * facts.store.seconds:.1f} ms"
    if facts.store.seconds > _SLOW_STORE:
        return warn(name, expected, found, "put etcd on a disk of its own (WAL fsync below 10 ms) and near the nodes")
    return good(name, expected, found)


def clock(facts: Facts) -> Check:
    """Clocks agree. No decision needs them: logs, metrics and certificates do."""
    name, expected, known = "clock", f"synchronised to within {_CLOCK_SECONDS:g} s", facts.clock
    if known.synchronised is None:
        return skip(name, expected, "the kernel does not say")
    if known.synchronised and known.error <= _CLOCK_SECONDS:
        return good(name, expected, f"synchronised, off by {1000 * known.error:.0f} ms at most")
    found = f"off by up to {known.error:.1f} s" if known.synchronised else "not synchronised"
    remedy = "run chronyd or systemd-timesyncd; else logs of nodes do not line up and certificates may seem expired"
    return warn(name, expected, found, remedy)


def memlock(facts: Facts) -> Check:
    """RDMA and pinned memory need locked pages."""
    limit, name, expected = facts.limits.memlock, "limits: memlock", "no limit where there are GPUs or RDMA"
    if limit is None:
        return good(name, expected, f"no limit ({facts.limits.whose})")
    found = f"{_bytes(limit)} ({facts.limits.whose})"
    if not facts.gpus.present and not facts.rdma:
        return skip(name, expected, f"{found}; neither GPUs nor RDMA")
    return warn(name, expected, found, "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container")


def nofile(facts: Facts) -> Check:
    """Enough descriptors for clients, edges and memory."""
    limit, name, expected = facts.limits.nofile, "limits: nofile", f"{NOFILE} or more"
    if limit is None or limit >= NOFILE:
        return good(name, expected, f"{limit or 'no limit'} ({facts.limits.whose})")
    judge = warn if limit >= LEAST_NOFILE else fail
    remedy = f"LimitNOFILE={NOFILE} in the unit, ulimit -n {NOFILE}, or --ulimit nofile={NOFILE} for a container"
    return judge(name, expected, f"{limit} ({facts.limits.whose})", remedy)


def shm(facts: Facts) -> Check:
    """Shared memory of the system is large enough for NCCL and for trainers' own use."""
    size, name, expected = facts.limits.shm, "limits: /dev/shm", f"{_bytes(SHM)} or more"
    if size is not None and size >= SHM:
        return good(name, expected, _bytes(size))
    found = "none" if size is None else _bytes(size)
    remedy = "--shm-size=8g for a container; in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    return warn(name, expected, found, remedy)


def path(facts: Facts) -> Check:
    """Which way bytes take here, and why."""
    name, expected = "chosen path", "memory read in place by movers, bytes between nodes over the data port"
    if facts.links == "network":
        return warn(
            name, expected, "data.links = network: every rank counts as a node of its own",
            'take data.links = "network" out of the configuration, unless this is a test',
        )  # fmt: skip
    guests = [f"{rank['key']} ({rank['path_why']})" for rank in facts.ranks() if rank.get("path") == LIBRARY]
    between = "; between nodes: TCP" + (f"; by threads of the clients: {', '.join(sorted(guests))}" if guests else "")
    if not facts.gpus.present:
        return good(name, expected, f"inside the node: shared memory of the host, since there is no GPU{between}")
    barred = [card for card in facts.gpus.present if facts.gpus.ipc.get(card.uuid) or not card.sharable]
    if barred:
        found = f"GPU {', '.join(str(card.index) for card in barred)}: staged through the host's memory{between}"
        return warn(name, expected, found, "see compute mode and IPC between processes")
    return good(name, expected, f"inside the node: CUDA IPC, one launch for a bucket{between}")


def bandwidth(facts: Facts) -> Iterator[Check]:
    """What the last large refits reached on each link, against what the link can carry."""
    rates = _achieved(facts)
    for link, part in _PART.items():
        name, most = f"bandwidth: {link}", _capacity(facts, link)
        expected = f"at least {_rate(part * most)}" if most else "as much as the link carries"
        if link not in rates:
            yield skip(name, expected, f"no refit of {_LARGE / 1e6:g} MB lately; try refitd bench refit")
        elif not most:
            yield good(name, expected, f"{_rate(rates[link])}; what the link carries is not known")
        elif rates[link] >= part * most:
            yield good(name, expected, _rate(rates[link]))
        else:
            yield warn(name, expected, _rate(rates[link]), _SLOWER[link])


_SLOWER = {
    "network": "refitd status names the slow link; look for a throttled or failing NIC (ethtool -S), data.advertise on "
    "the wrong network, a cap (refitd limit JOB none), and other traffic",
    "peer": "refitd bench pack --only processes measures the copies alone; look for a busy or capped CPU, and for "
    "memory that is staged (see the daemon's log)",
}


def _achieved(facts: Facts) -> dict[str, float]:
    """The best rate of each link in refits that this node remembers: bytes that came over the time of the transfer."""
    best: dict[str, float] = {}
    for job in facts.daemon.status.get("jobs", {}).values():
        for refit in job.get("refits", ()):
            seconds = refit["phases"].get("transfer", 0.0)
            for link, nbytes in refit["moved"].items():
                if refit["outcome"] == "ok" and seconds > 0 and nbytes >= _LARGE:
                    best[link] = max(best.get(link, 0.0), nbytes / seconds)
    return best


def _capacity(facts: Facts, link: str) -> float:
    """Bytes a second that a link can carry into this node; 0 where that is not known.

    Inside a node it is what one process read of another's memory just now; a GPU's own memory is not measured here.
    """
    if link == "peer":
        return 0.0 if facts.gpus.present else facts.sharing.rate
    caps = [job["limit"] for job in facts.daemon.status.get("jobs", {}).values() if job["limit"] is not None]
    known = [rate for rate in (sum(facts.nics.values()), *caps) if rate]
    return min(known, default=0.0)


def _rate(rate: float) -> str:
    return format_rate(int(rate))


def _bytes(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"
