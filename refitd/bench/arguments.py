"""The command line of the benchmark. Nothing heavy is imported to refuse it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

TRANSPORTS = ("peer", "tcp")
MODELS = ("big", "small")
CARD_SIZES = ("1MiB", "16MiB", "256MiB", "1GiB", "2GiB", "4GB", "16GB", "64GB")
ON_DEVICE = ("small", "big", "256MiB", "1GiB", "16GB", "48GB")
LEAST_REPEATS = 2


def make_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser, and that of ``refit`` in it. What comes after ``plan`` and ``pack`` is theirs."""
    parser = argparse.ArgumentParser(prog="refitd bench", description="Measure refitd on this machine.")
    subjects = parser.add_subparsers(title="what to measure", required=True, metavar="WHAT")
    refit = subjects.add_parser(
        "refit", help="publish to commit: two row-shard trainers to two column-shard engines, next to gloo"
    )
    subjects.add_parser("plan", help="how long the planner takes, and how that grows")
    subjects.add_parser("scrape", help="series and milliseconds of a scrape of a busy 8-GPU node")
    subjects.add_parser("pack", help="packing, casting and checksums, and pulls between processes on a GPU")
    subjects.add_parser("repair", help="how communicators are mended: shrink, grow, fresh init")
    subjects.add_parser("mover", help="what a mover costs a GPU: memory, its start, the slowdown of a busy trainer")
    subjects.add_parser("pause", help="how long an engine stands still for new weights, by mode")
    subjects.add_parser("gpu", help="all that is still to be measured on a machine with GPUs, step by step")
    refit.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the weights are (default: cpu)")
    refit.add_argument("--transport", choices=(*TRANSPORTS, "nccl", "all"), default="all", help="default: all")
    refit.add_argument(
        "--model",
        choices=(*ON_DEVICE, "all"),
        default="all",
        help="big: 134 MB; small: 1 MB; with --device cuda: 256MiB, 1GiB, 16GB, 48GB",
    )
    refit.add_argument("--gpus", metavar="N|all", help="with --device cuda: layouts over so many cards")
    refit.add_argument("--layout", nargs="+", metavar="NAME", help="with --gpus: these layouts")
    refit.add_argument("--size", nargs="+", choices=CARD_SIZES, default=["1GiB"], help="with --gpus: for each trainer")
    refit.add_argument(
        "--width", nargs="+", choices=("contiguous", "512", "128"), default=["contiguous"],
        help="with --gpus: bytes of a row",
    )  # fmt: skip
    refit.add_argument(
        "--per-card", type=int, default=1, metavar="N", help="with --gpus: so many of a layout's cards are one"
    )
    refit.add_argument("--rivals", choices=("all", "copies", "none"), default="all", help="with --gpus (default: all)")
    refit.add_argument("--repeats", type=int, default=15, metavar="N", help="timed repeats (default: %(default)s)")
    refit.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    refit.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    return parser, refit


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """``transports`` and ``models`` are tuples. Exits with status 2 where the command line makes no sense."""
    parser, refit = make_parsers()
    arguments = parser.parse_args(argv)
    if arguments.repeats < LEAST_REPEATS:
        refit.error(f"--repeats: at least {LEAST_REPEATS}")
    arguments.argv = list(argv or ())[1:]
    if arguments.gpus not in (None, "all") and not arguments.gpus.isdigit():
        refit.error("--gpus: a number, or all")
    if arguments.per_card < 1:
        refit.error("--per-card: at least 1")
    if arguments.per_card > 1 and arguments.rivals != "none":
        refit.error("--per-card: with --rivals none, which would need a card each")
    on_device = arguments.device == "cuda"
    if arguments.gpus and not on_device:
        refit.error("--gpus: with --device cuda")
    transports, models = (("peer", "nccl"), ON_DEVICE) if on_device else (TRANSPORTS, MODELS)
    if arguments.transport not in (*transports, "all") or arguments.model not in (*models, "all"):
        refit.error(f"--device {arguments.device}: --transport {', '.join(transports)}; --model {', '.join(models)}")
    usual = ("peer",) if on_device else TRANSPORTS
    arguments.transports = usual if arguments.transport == "all" else (arguments.transport,)
    arguments.models = models if arguments.model == "all" else (arguments.model,)
    return arguments
