"""Every check of the doctor, with the facts that make it say each of its remedies; no check touches the machine."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from refitd.daemon.devices import Device
from refitd.operate.doctor import gpu_checks, node_checks
from refitd.operate.doctor.check import FAIL, OK, SKIP, WARN, Check, worst
from refitd.operate.doctor.examine import CHECKS, examine
from refitd.operate.doctor.facts import (
    ANSWERS,
    FORBIDDEN,
    NO_DAEMON,
    REFUSED,
    SILENT,
    Clock,
    Daemon,
    Facts,
    Gpus,
    Limits,
    Sharing,
    StoreFacts,
)
from refitd.operate.doctor.report import lines, print_checks


def card(index: int, **changes: Any) -> Device:
    """An H200 of a host with NVLink."""
    device = Device(f"GPU-{index}", index, "H200", f"00000000:0{index}:00.0", 1 << 37, "default", 18, None, ("mlx5_0",))
    return replace(device, **changes)


def gpus(*cards: Device, **changes: Any) -> Gpus:
    """Cards that all work."""
    versions, ipc = {"torch": "2.13.0", "nccl": "2.29.2"}, {each.uuid: "" for each in cards}
    return replace(Gpus(len(cards), "580.1", "", cards, versions, ipc), **changes)


def status(**changes: Any) -> dict[str, Any]:
    """A daemon of one job, whose last refit brought 1 GB over the network in 0.1 s and as much from peers in 0.25 s."""
    refit = {"outcome": "ok", "phases": {"transfer": 0.1}, "moved": {"network": 10**9, "local": 5}}
    local = {"outcome": "ok", "phases": {"transfer": 0.25}, "moved": {"peer": 10**9}}
    small = {"outcome": "ok", "phases": {"transfer": 1e-6}, "moved": {"network": 10**6}}
    failed = {"outcome": "failed", "phases": {"transfer": 1e-3}, "moved": {"network": 10**9}}
    job = {
        "limit": None, "ranks": [{"key": "trainer/a/0", "pid": 7}, {"key": "engine/r0/0", "pid": 8}],
        "refits": [refit, local, small, failed],
    }  # fmt: skip
    store = {"url": "etcd://10.0.0.9:2379", "answers": True}
    return {"store": store, "jobs": {"grpo": {**job, **changes}}}


def healthy(**changes: Any) -> Facts:
    """A node with two GPUs, a daemon and an etcd, of which nothing is wrong."""
    facts = Facts(
        daemon=Daemon("/run/refitd/hook.sock", ANSWERS, "", 70, 0o660, "refitd", "refitd", (), status()),
        store=StoreFacts("etcd://10.0.0.9:2379", seconds=0.002), gpus=gpus(card(0), card(1)),
        sharing=Sharing(rate=5e9), clock=Clock(True, 0.01),
        limits=Limits("the daemon", None, 65536, 1 << 33), nics={"mlx5_0/1": 25e9}, rdma=True, user="ann",
    )  # fmt: skip
    return replace(facts, **changes)


GUEST = {"key": "engine/r0/0", "pid": 0, "path": "library", "path_why": "the client asked for it"}
BARE = healthy(gpus=Gpus(trouble="NVML Shared Library Not Found"), rdma=False)


def daemon(**changes: Any) -> Facts:
    """The healthy node with another daemon."""
    return healthy(daemon=replace(healthy().daemon, **changes))


def test_a_healthy_node_has_nothing_to_mend() -> None:
    """Every check is ok, has said what it found and what it expected, and no two have one name."""
    checks = examine(healthy())
    assert [(check.name, check.result) for check in checks if check.result != OK] == []
    assert [check.name for check in checks if check.remedy or not check.found or not check.expected] == []
    assert len({check.name for check in checks}) == len(checks) == len(CHECKS) + 2
    assert worst(checks) == OK


def test_a_machine_without_a_gpu_says_so_and_goes_on() -> None:
    """The checks that need one are left out and say why; the others judge, and the node is fit."""
    checks = {check.name: check for check in examine(BARE)}
    assert checks["driver"].found == "no GPU on this machine (NVML Shared Library Not Found)"
    skipped = [name for name, check in checks.items() if check.result == SKIP]
    assert skipped == ["driver", "compute mode", "NVLink", "NCCL"]
    assert "shared memory of the host, since there is no GPU" in checks["chosen path"].found
    assert worst(list(checks.values())) == OK


CASES: list[tuple[str, Callable[[Facts], Check], Facts, str, str, str]] = [
    ("no driver", gpu_checks.driver, healthy(gpus=Gpus(8, trouble="Driver Not Loaded")), FAIL,
     "8 NVIDIA devices on the bus, and Driver Not Loaded", "modprobe nvidia"),
    ("no cards in the container", gpu_checks.driver, healthy(gpus=Gpus(8, "580.1")), FAIL,
     "8 NVIDIA devices on the bus, and none that NVML shows", "--gpus all"),
    ("exclusive", gpu_checks.compute_mode, healthy(gpus=gpus(card(0), card(1, compute_mode="exclusive process"))), WARN,
     "GPU 1: exclusive process", "nvidia-smi -i 1 -c DEFAULT"),
    ("a link is down", gpu_checks.nvlink, healthy(gpus=gpus(card(0), card(1, nvlinks=17))), WARN,
     "GPU 1: 17 of 18", "nvidia-smi nvlink -e"),
    ("no links", gpu_checks.nvlink, healthy(gpus=gpus(card(0, nvlinks=0), card(1, nvlinks=0))), WARN,
     "no NVLink is up: GPUs reach each other over PCIe", "nvidia-fabricmanager"),
    ("no nccl", gpu_checks.nccl, healthy(gpus=gpus(card(0), versions={"torch": "2.13.0+cpu", "nccl": ""})), WARN,
     "none (torch 2.13.0+cpu)", "pip install torch for CUDA"),
    ("no memfd", gpu_checks.processes, healthy(sharing=Sharing("OSError: not permitted")), FAIL,
     "on the host: OSError: not permitted", "seccomp"),
    ("no CUDA IPC", gpu_checks.processes, healthy(gpus=gpus(card(0), ipc={"GPU-0": "cuIpcOpenMemHandle: 1"})), FAIL,
     "GPU 0: cuIpcOpenMemHandle: 1", "same PID and IPC namespace"),
    ("not tried", gpu_checks.processes, healthy(gpus=gpus(card(0), card(1), ipc={"GPU-0": ""})), WARN,
     "the host's works; not tried: 1 x H200", "cuda-bindings"),
    ("a client in another container", gpu_checks.containers,
     daemon(status=status(ranks=[{"key": "engine/r0/0", "pid": 0}, {"key": "trainer/a/0", "pid": 7}])), FAIL,
     "the daemon does not see engine/r0/0", "shareProcessNamespace: true"),
    ("the daemon in another container", gpu_checks.containers, daemon(pid=0), FAIL,
     "this container does not see the daemon", "--pid=container:NAME"),
    ("another IPC namespace", gpu_checks.containers, daemon(strangers=("ipc", "user")), WARN,
     "the daemon has another IPC namespace, where CUDA's handles may not open", "--ipc=container:NAME"),
    ("slow memory", gpu_checks.shared_rate, healthy(sharing=Sharing(rate=2e8)), WARN, "0.20 GB/s", "CPU quota"),
    ("all network", node_checks.path, healthy(links="network"), WARN,
     "data.links = network: every rank counts as a node of its own", 'take data.links = "network" out'),
    ("staged", node_checks.path, healthy(gpus=gpus(card(0), ipc={"GPU-0": "refused"})), WARN,
     "GPU 0: staged through the host's memory; between nodes: TCP", "see compute mode and IPC"),
    ("the daemon has no store", node_checks.store,
     daemon(status={**status(), "store": {"url": "etcd://a:1", "answers": False}}), FAIL,
     "etcd://a:1 does not answer the daemon", "etcdctl endpoint health"),
    ("store down", node_checks.store, healthy(store=StoreFacts("etcd://a:1", "StoreUnavailable", "refused")), FAIL,
     "etcd://a:1: refused", "etcdctl endpoint health"),
    ("store hangs", node_checks.store, healthy(store=StoreFacts("etcd://a:1", "StoreTimeout", "2 s")), FAIL,
     "etcd://a:1: 2 s", "quorum"),
    ("wrong password", node_checks.store, healthy(store=StoreFacts("etcd://a:1", "Unauthenticated", "no")), FAIL,
     "etcd://a:1: no", "store.password_file"),
    ("certificate", node_checks.store, healthy(store=StoreFacts("etcd://a:1", "Untrusted", "expired")), FAIL,
     "etcd://a:1: expired", "store.ca"),
    ("unreadable password", node_checks.store, healthy(store=StoreFacts("etcd://a:1", "ConfigError", "denied")), FAIL,
     "etcd://a:1: denied", "run this as root"),
    ("slow store", node_checks.store, healthy(store=StoreFacts("etcd://a:1", seconds=0.5)), WARN,
     "etcd://a:1 answers in 500.0 ms", "fsync"),
    ("clock runs free", node_checks.clock, healthy(clock=Clock(False)), WARN, "not synchronised", "chronyd"),
    ("clock is off", node_checks.clock, healthy(clock=Clock(True, 3.0)), WARN, "off by up to 3.0 s", "chronyd"),
    ("memlock", node_checks.memlock, healthy(limits=Limits("the daemon", 8 << 20, None, 1 << 33)), WARN,
     "8 MiB (the daemon)", "LimitMEMLOCK=infinity"),
    ("nofile", node_checks.nofile, healthy(limits=Limits(nofile=20000)), WARN,
     "20000 (this process)", "LimitNOFILE=65536"),
    ("few files", node_checks.nofile, healthy(limits=Limits(nofile=1024)), FAIL, "1024 (this process)", "ulimit -n"),
    ("shm", node_checks.shm, healthy(limits=Limits(shm=64 << 20)), WARN, "64 MiB", "--shm-size=8g"),
    ("no shm", node_checks.shm, healthy(limits=Limits(shm=None)), WARN, "none", "emptyDir"),
    ("no daemon", node_checks.socket, healthy(daemon=Daemon("/x", NO_DAEMON, "No such file or directory")), WARN,
     "/x: No such file or directory", "systemctl start refitd"),
    ("not of the group", node_checks.socket, daemon(contact=FORBIDDEN, detail="Permission denied"), FAIL,
     "/run/refitd/hook.sock (mode 0660, refitd:refitd): Permission denied",
     "add ann to the group refitd (usermod -aG)"),
    ("not on the list", node_checks.socket, daemon(contact=REFUSED, detail="uid: expected ..."), FAIL,
     "/run/refitd/hook.sock (mode 0660, refitd:refitd): uid: expected ...", "hook.uids or hook.gids"),
    ("it hangs", node_checks.socket, daemon(contact=SILENT, detail="no answer within 3 s"), FAIL,
     "/run/refitd/hook.sock (mode 0660, refitd:refitd): no answer within 3 s", "/healthz"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "facts", "result", "found", "remedy"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_is_wrong_has_a_remedy(
    check: Callable[[Facts], Check], facts: Facts, result: str, found: str, remedy: str
) -> None:
    """The result, what was found to the letter, and a remedy that names the thing to do."""
    made = check(facts)
    assert (made.result, made.found) == (result, found)
    assert remedy in made.remedy


def test_every_check_can_find_fault() -> None:
    """No check is without a case above, and no kind of contact without a remedy."""
    assert {case[1] for case in CASES} == set(CHECKS)
    contacts = {case[2].daemon.contact for case in CASES if case[1] is node_checks.socket}
    assert contacts == {NO_DAEMON, FORBIDDEN, REFUSED, SILENT}


@pytest.mark.parametrize(
    ("check", "facts", "result", "found"),
    [
        (gpu_checks.nvlink, healthy(gpus=gpus(card(0))), SKIP, "one GPU"),
        (gpu_checks.nvlink, healthy(gpus=gpus(card(0, fabric="ab/7"), card(1, fabric="ab/7"))), OK,
         "18 links each, NVLink domain ab/7"),
        (gpu_checks.nccl, healthy(gpus=Gpus(versions={"nccl": ""})), SKIP, "none, and no GPU"),
        (gpu_checks.containers, healthy(daemon=Daemon("/x")), SKIP, "no daemon to compare with"),
        (gpu_checks.containers, daemon(strangers=("user",)), OK,
         "this process and every client see the daemon (other namespaces: user)"),
        (gpu_checks.containers, daemon(status=status(ranks=[GUEST])), OK,
         "this process and every client see the daemon"),
        (node_checks.path, replace(BARE, daemon=daemon(status=status(ranks=[GUEST])).daemon), OK,
         ("inside the node: shared memory of the host, since there is no GPU; between nodes: TCP; "
          "by threads of the clients: engine/r0/0 (the client asked for it)")),
        (gpu_checks.shared_rate, healthy(sharing=Sharing("no")), SKIP, "cannot be shared"),
        (node_checks.store, healthy(store=StoreFacts("memory://")), OK, "memory://: this node only, no etcd needed"),
        (node_checks.store, healthy(store=StoreFacts("etcd+spawn://")), OK, "etcd+spawn://: a child of the daemon"),
        (node_checks.clock, healthy(clock=Clock()), SKIP, "the kernel does not say"),
        (node_checks.memlock, replace(BARE, limits=Limits(memlock=1 << 16)), SKIP,
         "64 KiB (this process); neither GPUs nor RDMA"),
        (node_checks.nofile, healthy(limits=Limits(nofile=None)), OK, "no limit (this process)"),
    ],
)  # fmt: skip
def test_what_is_no_fault_is_none(check: Callable[[Facts], Check], facts: Facts, result: str, found: str) -> None:
    """Other surroundings, not worse ones."""
    made = check(facts)
    assert (made.result, made.found, made.remedy) == (result, found, "")


def bandwidths(facts: Facts) -> dict[str, tuple[str, str, str]]:
    return {check.name: (check.result, check.found, check.expected) for check in node_checks.bandwidth(facts)}


def test_bandwidth_is_held_against_the_link() -> None:
    """The best large refit that went well counts, against the NICs together, a cap, or a read of shared memory."""
    assert bandwidths(BARE) == {
        "bandwidth: network": (OK, "10GB/s", "at least 7.5GB/s"),
        "bandwidth: peer": (OK, "4GB/s", "at least 500MB/s"),
    }
    fast = replace(BARE, nics={"mlx5_0/1": 25e9, "mlx5_1/1": 25e9}, sharing=Sharing(rate=50e9))
    assert bandwidths(fast) == {
        "bandwidth: network": (WARN, "10GB/s", "at least 15GB/s"),
        "bandwidth: peer": (WARN, "4GB/s", "at least 5GB/s"),
    }
    remedies = [check.remedy for check in node_checks.bandwidth(fast)]
    assert ["ethtool -S" in remedies[0], "refitd bench pack" in remedies[1]] == [True, True]
    capped = replace(fast, daemon=replace(fast.daemon, status=status(limit=2 * 10**9)))
    assert bandwidths(capped)["bandwidth: network"] == (OK, "10GB/s", "at least 600MB/s")


def test_bandwidth_that_cannot_be_judged_says_why() -> None:
    """No refit yet; NICs that do not tell their speed; a GPU's own memory."""
    nothing = replace(BARE, daemon=Daemon("/x"))
    assert bandwidths(nothing)["bandwidth: network"][:2] == (
        SKIP, "no refit of 64 MB lately; try refitd bench refit",
    )  # fmt: skip
    mute = replace(healthy(), nics={"eth0": 0.0})
    assert bandwidths(mute) == {
        "bandwidth: network": (OK, "10GB/s; what the link carries is not known", "as much as the link carries"),
        "bandwidth: peer": (OK, "4GB/s; what the link carries is not known", "as much as the link carries"),
    }


def test_the_report_is_a_line_each() -> None:
    """Aligned; what is wrong is followed by what was expected and what to do; the last line counts."""
    checks = [
        Check("one", OK, "a", "b"),
        Check("three", WARN, "more", "less", "add some"),
        Check("two", SKIP, "c", "nothing"),
    ]
    stream = io.StringIO()
    print_checks(checks, stream)
    assert stream.getvalue() == (
        "ok    one    b\n"
        "warn  three  less\n"
        "             expected: more\n"
        "             remedy: add some\n"
        "skip  two    nothing\n"
        "1 ok, 1 warn, 1 skip\n"
    )
    assert [result for result, _line in lines(checks)] == [OK, WARN, WARN, WARN, SKIP, OK]
    assert worst(checks) == WARN
    assert worst([]) == OK


def test_a_terminal_gets_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """With colour, nothing wrapped, and nothing taken for markup."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    print_checks([Check("one", FAIL, "a", "[red]b[/red]", "x" * 60)], stream)
    assert "[red]b[/red]" in stream.getvalue()
    assert f"remedy: {'x' * 60}" in stream.getvalue()
    assert "\x1b[31m" in stream.getvalue()


def test_a_script_gets_a_row_each() -> None:
    """The keys of the contract and what they are made of."""
    assert Check("one", WARN, "more", "less", "add some").to_json() == {
        "name": "one", "ok": True, "result": "warn", "expected": "more", "found": "less",
        "detail": "less; expected more", "remedy": "add some",
    }  # fmt: skip
    assert Check("one", FAIL, "a", "b", "c").to_json()["ok"] is False
