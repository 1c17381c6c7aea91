"""The command line of the demo."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from refitd.demo import text, weights
from refitd.demo.faults import PLANTS, VICTIMS, Fault
from refitd.demo.ledger import Oracle
from refitd.demo.model import Training, settle
from refitd.demo.nursery import Nursery
from refitd.demo.play import Play
from refitd.demo.report import Progress, Result
from refitd.demo.scene import client_body, keep_logs
from refitd.errors import InputError
from refitd.failpoints import PHASES


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="refitd demo", description="Refits end to end on this machine.")
    parser.add_argument("--refits", type=int, default=6, metavar="N", help="publications that must be committed")
    parser.add_argument("--kill", choices=PHASES, metavar="PHASE", help="phase of refit 2: " + ", ".join(PHASES))
    parser.add_argument("--victim", choices=VICTIMS, default="mover", help="who is hit (default: %(default)s)")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL", help="STOP ends after 15 s")
    parser.add_argument("--plant", choices=PLANTS, help="plant a fault that must be caught as torn")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="safetensors of a BERT encoder (default: small, made)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="copy all logs there")
    parser.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS", help="give up after this long")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 where it makes no sense."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.refits < 1:
        parser.error("--refits: at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status (0 good, 1 failed, 2 usage)."""
    arguments = parse(argv)
    try:
        spec, start, ids, mask = _model(arguments.weights)
    except InputError as error:
        print(f"refitd demo: {error}", file=sys.stderr)
        return 2
    settle()
    nursery = Nursery.start(client_body(spec, start, ids))
    folder = Path(tempfile.mkdtemp(prefix="refitd-demo-"))
    progress = Progress(as_json=arguments.json)
    oracle = Oracle(spec, Training({name: w.clone() for name, w in start.items()}, spec, ids), ids, mask)
    try:
        result = asyncio.run(_play(arguments, folder, nursery, oracle, progress))
        if arguments.keep_logs:
            keep_logs(folder, arguments.keep_logs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    progress.finish(result)
    if arguments.json:
        print(result.to_json())
    return 0 if result.ok else 1


def _model(path: Path | None) -> tuple[weights.Spec, weights.Weights, Tensor, Tensor]:
    if path is None:
        spec, values = weights.SMALL, weights.make(weights.SMALL)
        vocabulary = None
    else:
        (spec, values), vocabulary = weights.load(path), text.load_vocabulary(path)
    return spec, values, *text.encode(text.SENTENCES, vocabulary, spec.vocab)


async def _play(
    arguments: argparse.Namespace, folder: Path, nursery: Nursery, oracle: Oracle, progress: Progress
) -> Result:
    fault = Fault(arguments.kill or "", arguments.victim, arguments.signal, arguments.plant or "")
    return await Play(folder, nursery, oracle, fault, arguments.refits, progress).run(arguments.deadline)
