"""The machine and the code that a number belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch


def machine() -> dict[str, str | int | float]:
    """Processor, cores that we may use, memory in bytes, load of the last minute, kernel, and versions."""
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def commit() -> str:
    """The commit of the code that runs, with ``-dirty`` where it was changed; ``unknown`` outside of a checkout."""
    found = _git("rev-parse", "HEAD")
    if not found:
        return "unknown"
    return found + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no", "--", "refitd") else "")


def _git(*arguments: str) -> str:
    folder = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _first_value(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
