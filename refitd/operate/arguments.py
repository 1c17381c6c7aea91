"""The command lines of ``refitd status``, ``top``, ``doctor``, ``pause``, ``resume``, ``limit`` and ``drain``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from refitd.errors import InputError
from refitd.hook.messages import NAME, is_name
from refitd.operate import commands
from refitd.operate.rate import EXAMPLES, parse_rate

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DRAIN_SECONDS, TOP_SECONDS = 60.0, 1.0


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands; each sets ``command`` to the function that carries it out."""
    _add(subparsers, "status", "what the daemon of this node sees").set_defaults(command=commands.status)
    top = _add(subparsers, "top", "the same, live: members, replicas, refits, links, faults")
    top.add_argument("--once", action="store_true", help="one look, and end (--json looks once, too)")
    top.add_argument(
        "--interval", metavar="SECONDS", type=_pause_seconds, default=TOP_SECONDS, help=f"default {TOP_SECONDS:g}"
    )
    top.set_defaults(command=commands.top)
    words = "whether this node is fit for refits, and what to do where it is not"
    doctor = _add(subparsers, "doctor", words, why="whose store, socket and links are examined")
    doctor.add_argument("--strict", action="store_true", help="status 1 for warnings, too")
    doctor.set_defaults(command=commands.doctor)
    pause = _add(subparsers, "pause", "begin no new refit of a job; what runs ends, engines serve")
    pause.add_argument("job", metavar="JOB", type=_job, help="name of the job")
    pause.add_argument("--reason", metavar="TEXT", default="", help="told to trainers and shown by status")
    pause.set_defaults(command=commands.pause)
    resume = _add(subparsers, "resume", "undo a pause")
    resume.add_argument("job", metavar="JOB", type=_job, help="name of the job")
    resume.set_defaults(command=commands.resume)
    limit = _add(subparsers, "limit", "cap what each node sends over the network for a job")
    limit.add_argument("job", metavar="JOB", type=_job, help="name of the job")
    limit.add_argument("rate", metavar="RATE", type=_rate, help=EXAMPLES)
    limit.set_defaults(command=commands.limit)
    drain = _add(subparsers, "drain", "take this node out of every lane, then say so")
    drain.add_argument("--cancel", action="store_true", help="let lanes use the node again")
    drain.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, default=DRAIN_SECONDS,
        help=f"how long to wait until no lane needs the node (default {DRAIN_SECONDS:g}; 0: only ask)",
    )  # fmt: skip
    drain.set_defaults(command=commands.drain)


def _add(subparsers: Subparsers, name: str, words: str, why: str = "to find its socket") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
    parser.add_argument("--socket", metavar="PATH", help="hook socket (default: as the daemon's)")
    parser.add_argument("--config", metavar="FILE", help=f"the daemon's TOML file, {why}")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    return parser


def _job(text: str) -> str:
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"expected {NAME.expected}, got {text!r}")
    return text


def _rate(text: str) -> int | None:
    try:
        return parse_rate(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(f"expected {error.expected}, got {error.got}") from None


def _pause_seconds(text: str) -> float:
    if (value := _seconds(text)) < 0.1:
        raise argparse.ArgumentTypeError(f"expected 0.1 seconds or more, got {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return value
