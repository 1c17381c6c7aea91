"""Pictures of a daemon, healthy and with faults, as the status page gets them."""

from __future__ import annotations

from typing import Any

Facts = dict[str, Any]


def replica(name: str, ready: bool = True, why: str = "") -> Facts:
    return {
        "name": name, "publication": [2, 41], "step": 70, "lag": 0 if ready else 3, "ready": ready, "why": why,
        "mode": "in_place",
    }  # fmt: skip


def lane(name: str, stage: str = "committed", why: str = "every member verified it", **excluded: str) -> Facts:
    gone = [{"rank": rank.replace("_", "/"), "reason": reason} for rank, reason in excluded.items()]
    return {
        "replica": name, "token": 17, "stage": stage, "why": why, "turned": "the replica is whole", "members": [],
        "sources": [], "neighbours": [], "excluded": gone,
    }  # fmt: skip


def link(src: str, dst: str, moved: int, planned: int = 12_000_000, late: bool = False) -> Facts:
    return {"src": src, "dst": dst, "link": "network", "planned": planned, "moved": moved, "late": late}


def refit(replica: str, revision: int, outcome: str, why: str = "", **phases: float) -> Facts:
    return {
        "job": "grpo", "replica": replica, "publication": [2, revision], "began_at": 1_700_000_000.0 + revision,
        "phases": phases, "moved": {"network": 24_000_000}, "outcome": outcome, "failures": int(bool(why)), "why": why,
    }  # fmt: skip


def size(number: int) -> int:
    return 3_000_000 * (1 + number % 4)


def healthy() -> Facts:
    """Two replicas on two nodes, both at the newest publication."""
    job = {
        "leader": "a", "joined": True, "generation": 2, "publication": [2, 41], "paused": False, "paused_reason": "",
        "limit": None, "draining": [], "parked": [],
        "members": [{"node": node, "address": f"10.0.0.{n}:9465", "domain": node, "ranks": [{}, {}]}
                    for n, node in enumerate("abc")],
        "lanes": [lane("r0"), lane("r1")], "replicas": [replica("r0"), replica("r1")],
        "ranks": [{"key": "engine/r0/0", "pid": 7, "mover": 8, "life": 1}],
        "links": [link(f"trainer/run-1/{s}", f"engine/r0/{d}", size(s + d), size(s + d))
                  for s in range(4) for d in range(4)],
        "slow": [], "max_lag": 1,
    }  # fmt: skip
    return {
        "node": "c", "version": "0.1.0", "now": 1_700_000_100.0, "problem": "",
        "store": {"url": "etcd://10.0.0.9:2379", "local": False, "answers": True},
        "drain": {"wanted": False, "drained": False, "reason": ""},
        "refits": [
            refit("r0", 41, "ok", prepare=0.12, transfer=0.61, commit=0.05),
            refit("r1", 41, "", prepare=0.2),
            refit("r0", 38, "ok", prepare=0.1, transfer=0.5, commit=0.04),
        ],
        "jobs": {"grpo": job},
    }  # fmt: skip


def faulty() -> Facts:
    """A rank's mover stopped in the middle of a transfer, one edge crawls, a node is parked, the store is away."""
    picture = healthy()
    job = picture["jobs"]["grpo"]
    slow = "replica r0 has been in transfer for 8.2 s: trainer/run-1/0 -> engine/r0/1 over network, 3 MB of 12 MB"
    job["slow"] = [slow]
    job["links"][1] = link("trainer/run-1/0", "engine/r0/1", 3_000_000, late=True)
    job["replicas"] = [replica("r0", False, "c: engine/r0/1 made no progress for 3 s"), replica("r1")]
    job["lanes"] = [lane("r0", "failed", "c: no progress", engine_r0_1="its mover does not answer"), lane("r1")]
    job["ranks"] = [{"key": "engine/r0/1", "pid": 9, "mover": None, "life": 2}]
    job["parked"] = [{"node": "b", "reason": "it joined 6 times within 60 s"}]
    picture["store"]["answers"] = False
    killed = "the mover of engine/r0/1 was killed: it did not answer a ping in time"
    picture["faults"] = [{"at": 1_700_000_050.0, "job": "grpo", "what": killed}]
    picture["refits"][0] = refit("r0", 41, "", why="in transfer: engine/r0/1: no progress", prepare=0.1, transfer=8.2)
    return picture


def crowded() -> Facts:
    """A job of 64 nodes with long names and 40 replicas; 16 ranks hear from 24 sources; one lane tells much."""
    picture = faulty()
    job = picture["jobs"]["grpo"]
    nodes = [f"gpu-{n:03}.rack-{n // 8}.cluster-a.example.net" for n in range(64)]
    job["members"] = [{"node": node, "address": f"{node}:9465", "domain": node, "ranks": [{}] * 8} for node in nodes]
    job["replicas"] = [
        replica(f"rollout-{n:02}", n % 7 > 0, "no source has answered yet" * (n % 7 == 0)) for n in range(40)
    ]
    job["lanes"] = [lane(f"rollout-{n:02}") for n in range(40)]
    job["lanes"][3]["why"] = ", ".join(f"trainer/run-20261129/{n}: connection closed by peer" for n in range(24))
    job["links"] = [
        link(f"trainer/run-20261129/{s}", f"engine/rollout-03/{d}", size(s), size(s + d) + 9_000_000)
        for s in range(24)
        for d in range(16)
    ]
    for record in picture["refits"]:
        record |= {"replica": "rollout-03", "moved": {"network": 24_000_000, "peer": 8_000_000, "local": 1_000_000}}
    return picture
