"""What is asked of GPUs, of NCCL, and of memory that processes share. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from refitd.daemon.devices import Device
from refitd.hook.executor import LIBRARY
from refitd.operate.doctor.check import Check, fail, good, skip, warn
from refitd.operate.doctor.facts import ANSWERS, Facts

NO_GPU = "no GPU"
_LEAST_SHARED = 5e8  # bytes a second of one process reading another's memory, with every page new to it


def driver(facts: Facts) -> Check:
    """The driver is loaded and NVML answers."""
    gpus, expected = facts.gpus, "an NVIDIA driver that answers"
    if gpus.present:
        return good("driver", expected, f"{gpus.driver}, {len(gpus.present)} GPUs: {_names(gpus.present)}")
    if not gpus.cards and not gpus.driver:
        return skip("driver", expected, f"{NO_GPU} on this machine ({gpus.trouble or 'no NVIDIA device'})")
    found = f"{gpus.cards} NVIDIA devices on the bus, and {gpus.trouble or 'none that NVML shows'}"
    return fail(
        "driver", expected, found,
        "load the driver (modprobe nvidia; nvidia-smi says what is wrong) and run nvidia-persistenced; in a container "
        "pass the devices (--gpus all); under systemd see DeviceAllow= in refitd.service",
    )  # fmt: skip


def compute_mode(facts: Facts) -> Check:
    """Movers have a context of their own beside the trainer's."""
    expected = "compute mode default on every GPU"
    if not facts.gpus.present:
        return skip("compute mode", expected, NO_GPU)
    bad = [card for card in facts.gpus.present if not card.sharable]
    if not bad:
        return good("compute mode", expected, "default")
    found = ", ".join(f"GPU {card.index}: {card.compute_mode}" for card in bad)
    which = ",".join(str(card.index) for card in bad)
    remedy = f"nvidia-smi -i {which} -c DEFAULT; else movers run as threads of their clients, and nobody can kill them"
    return warn("compute mode", expected, found, remedy)


def nvlink(facts: Facts) -> Check:
    """GPUs of one host reach each other by NVLink, all by as many links."""
    cards, expected = facts.gpus.present, "the same number of NVLinks up on every GPU"
    if len(cards) < 2:
        return skip("NVLink", expected, "one GPU" if cards else NO_GPU)
    counts = {card.index: card.nvlinks for card in cards}
    most = max(counts.values())
    short = [index for index, count in counts.items() if count < most]
    fabric = sorted({card.fabric for card in cards if card.fabric})
    found = f"{most} links each" + (f", NVLink domain {', '.join(fabric)}" if fabric else "")
    if not most:
        return warn(
            "NVLink", expected, "no NVLink is up: GPUs reach each other over PCIe",
            "where the machine has NVLink: nvidia-smi nvlink -s, and start nvidia-fabricmanager; else nothing",
        )  # fmt: skip
    if short:
        found = ", ".join(f"GPU {index}: {counts[index]} of {most}" for index in short)
        remedy = "nvidia-smi nvlink -e shows the errors of each link; reset the GPU, or have the board replaced"
        return warn("NVLink", expected, found, remedy)
    return good("NVLink", expected, found)


def nccl(facts: Facts) -> Check:
    """NCCL is there; every node of a job needs the same version."""
    expected, version = "NCCL of torch for CUDA, the same version on every node", facts.gpus.versions.get("nccl", "")
    if version:
        return good("NCCL", expected, version)
    if not facts.gpus.present:
        return skip("NCCL", expected, f"none, and {NO_GPU}")
    torch = facts.gpus.versions.get("torch") or "none"
    return warn(
        "NCCL", expected, f"none (torch {torch})",
        "pip install torch for CUDA beside refitd; without it bytes between nodes go over TCP only",
    )  # fmt: skip


def processes(facts: Facts) -> Check:
    """One process can lend another its memory: by descriptor on the host, by CUDA on every card."""
    name, expected = "IPC between processes", "memory of one process read by another, on the host and on every GPU"
    if facts.sharing.trouble:
        return fail(
            name, expected, f"on the host: {facts.sharing.trouble}",
            "memfd_create, SCM_RIGHTS and mmap must be allowed: look at the seccomp profile of the container or unit",
        )  # fmt: skip
    bad = {card.index: why for card in facts.gpus.present if (why := facts.gpus.ipc.get(card.uuid))}
    if bad:
        return fail(
            name, expected, ", ".join(f"GPU {index}: {why}" for index, why in bad.items()),
            "both processes need the same PID and IPC namespace, the same user, and torch for CUDA with cuda-bindings; "
            "memory pools made without shareable handles are staged on the host",
        )  # fmt: skip
    untried = [card for card in facts.gpus.present if card.uuid not in facts.gpus.ipc]
    if untried:
        found = f"the host's works; not tried: {_names(untried)}"
        return warn(name, expected, found, "install torch for CUDA and cuda-bindings beside refitd, and run this again")
    cards = f", and on {len(facts.gpus.present)} GPUs" if facts.gpus.present else ""
    return good(name, expected, f"on the host{cards}")


def containers(facts: Facts) -> Check:
    """Daemon and clients see each other's processes: descriptors of processes and CUDA's handles need it."""
    name, expected = (
        "IPC across containers",
        "daemon and clients in one PID namespace, with GPUs also one IPC namespace",
    )
    daemon, share = (
        facts.daemon,
        "shareProcessNamespace: true (Kubernetes) or --pid=container:NAME --ipc=container:NAME",
    )
    if daemon.contact != ANSWERS:
        return skip(name, expected, "no daemon to compare with")
    unseen = sorted(rank["key"] for rank in facts.ranks() if not rank["pid"] and rank.get("path") != LIBRARY)
    if not daemon.pid or unseen:
        found = f"the daemon does not see {', '.join(unseen)}" if unseen else "this container does not see the daemon"
        return fail(name, expected, found, share)
    if facts.gpus.present and "ipc" in daemon.strangers:
        return warn(name, expected, "the daemon has another IPC namespace, where CUDA's handles may not open", share)
    others = f" (other namespaces: {', '.join(daemon.strangers)})" if daemon.strangers else ""
    return good(name, expected, f"this process and every client see the daemon{others}")


def shared_rate(facts: Facts) -> Check:
    """Memory of the host is read at a sane speed."""
    name, expected = "shared memory", f"at least {_LEAST_SHARED / 1e9:g} GB/s from process to process"
    if facts.sharing.trouble:
        return skip(name, expected, "cannot be shared")
    found = f"{facts.sharing.rate / 1e9:.2f} GB/s"
    if facts.sharing.rate >= _LEAST_SHARED:
        return good(name, expected, found)
    return warn(
        name, expected, found, "look for a busy or small CPU quota, swap, and a memory limit that is nearly reached"
    )


def _names(cards: Iterable[Device]) -> str:
    names = [card.name for card in cards]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
