"""Each command asks the daemon of this node and prints its answer; errors pass to the caller."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from refitd.hook.admin import ask
from refitd.operate.text import print_status
from refitd.stdout import say

_POLL_SECONDS = 0.2


def status(arguments: argparse.Namespace) -> int:
    """Print what the daemon sees. 0 whenever it answers."""
    answer = ask("status", _socket(arguments))
    if arguments.json:
        _print_json({"ok": True, "reason": "", **answer})
    else:
        print_status(answer, sys.stdout)
    return 0


def top(arguments: argparse.Namespace) -> int:
    """Look again and again until interrupted; once with ``--once`` or ``--json``."""
    from refitd.operate.top import watch

    path = _socket(arguments)
    if arguments.json:
        _print_json({"ok": True, "reason": "", **ask("status", path)})
        return 0
    return watch(lambda: ask("status", path), sys.stdout, 0.0 if arguments.once else arguments.interval)


def doctor(arguments: argparse.Namespace) -> int:
    """Examine this node. 1 where a check fails; with ``--strict`` also for a warning."""
    from refitd.config import load
    from refitd.operate.doctor.check import FAIL, WARN, worst
    from refitd.operate.doctor.examine import examine
    from refitd.operate.doctor.gather import gather
    from refitd.operate.doctor.report import print_checks
    from refitd.operate.doctor.share import share_gpu, share_host

    config = load(arguments.config)
    checks = examine(gather(config, arguments.socket or config.hook.socket, share_gpu, share_host))
    bad = (FAIL, WARN) if arguments.strict else (FAIL,)
    wrong = ", ".join(check.name for check in checks if check.result in bad)
    if arguments.json:
        rows = [check.to_json() for check in checks]
        _print_json({"ok": not wrong, "reason": wrong, "result": worst(checks), "checks": rows})
    else:
        print_checks(checks, sys.stdout)
    return 1 if wrong else 0


def pause(arguments: argparse.Namespace) -> int:
    return _tell(arguments, ask("pause", _socket(arguments), job=arguments.job, reason=arguments.reason))


def resume(arguments: argparse.Namespace) -> int:
    return _tell(arguments, ask("resume", _socket(arguments), job=arguments.job))


def limit(arguments: argparse.Namespace) -> int:
    return _tell(arguments, ask("limit", _socket(arguments), job=arguments.job, rate=arguments.rate))


def drain(arguments: argparse.Namespace) -> int:
    """Ask until nothing needs the node any more. 1 where something still does at the timeout: the drain goes on."""
    path, deadline = _socket(arguments), time.monotonic() + arguments.timeout
    if arguments.cancel:
        return _tell(arguments, ask("drain", path, cancel=True))
    answer = ask("drain", path, cancel=False)
    while not answer["drained"] and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        answer = ask("drain", path, cancel=False)
    return _tell(arguments, answer, ok=answer["drained"])


def _tell(arguments: argparse.Namespace, answer: dict[str, Any], ok: bool = True) -> int:
    if arguments.json:
        _print_json({"ok": ok, **answer})
    else:
        print(answer["reason"], file=sys.stdout if ok else sys.stderr)
    return 0 if ok else 1


def _print_json(document: dict[str, Any]) -> None:
    say(json.dumps(document))


def _socket(arguments: argparse.Namespace) -> str | None:
    """Where to ask: as told, as the daemon's configuration says, or the default place (None). Raises ConfigError."""
    if arguments.socket is None and arguments.config is not None:
        from refitd.config import load

        return load(arguments.config).hook.socket
    path: str | None = arguments.socket
    return path
