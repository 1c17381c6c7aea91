"""``refitd bench pack``: the kernels of the mover, next to a plain copy of the same bytes and to torch's own copies."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refitd.bench import outcome
from refitd.bench import pack_cases as cases
from refitd.bench.machine import commit, machine
from refitd.bench.pack_cases import Case, Scene, addresses, make_scene, mirror, wrong_parts
from refitd.bench.party import BenchFailed
from refitd.bench.pull import ACROSS, PULLS, pull_rows
from refitd.bench.rows import Row, show
from refitd.mover.kernels import Launch, Table, gather, prepare, reread, scatter, through, wire_offsets

WARM_UPS = 3
PARTS = ("kernels", "processes", "cards")
LOOPED = 3  # repeats of what takes a call a tensor
MATRICES = (cases.SLICES, cases.CAST, cases.NARROW, cases.ODD, cases.TURNED)


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status (0 good, 1 failed, 2 usage). Wrong bytes are a failure, slow ones are not."""
    arguments = _parse(argv)
    try:
        rows = _measure(arguments)
    except BenchFailed as error:
        return outcome.failed(error, arguments.json)
    where = {**machine(), **device_facts(arguments.device)}
    document = {
        "ok": True, "rows": [asdict(row) for row in rows], "machine": where, "repeats": arguments.repeats,
        "commit": commit(), "command": outcome.command("pack", argv),
    }  # fmt: skip
    show(rows, where, document["commit"], arguments.json)
    return outcome.finished(document, arguments)


def _measure(arguments: argparse.Namespace) -> list[Row]:
    """Without ``only``: what one device can show."""
    rows: list[Row] = []
    if arguments.only in (None, "kernels"):
        rows += measure(arguments.device, arguments.repeats, arguments.shrink)
    if arguments.device == "cuda" and arguments.only in (None, "processes"):
        rows += pull_rows(PULLS, arguments.repeats, arguments.shrink)
    if arguments.only == "cards":
        rows += pull_rows(ACROSS, arguments.repeats, arguments.shrink)
    return rows


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="refitd bench pack", description="Measure packing, casting and checksums.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="timed repeats (default: %(default)s)")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="1/N of the tensors and rows, to try it out")
    parser.add_argument("--only", choices=PARTS, help="kernels in one process; pulls between processes; between cards")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if min(arguments.repeats, arguments.shrink) < 1:
        parser.error("--repeats and --shrink: at least 1")
    if arguments.device != "cuda" and arguments.only in ("processes", "cards"):
        parser.error(f"--only {arguments.only}: with --device cuda")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if arguments.only == "cards" and torch.cuda.device_count() < 2:
        parser.error("--only cards: torch sees fewer than two CUDA devices here")
    return arguments


def device_facts(device: str) -> dict[str, Any]:
    """Card, driver's CUDA version and Triton; nothing for the CPU."""
    if device != "cuda":
        return {}
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name, "card_memory_bytes": properties.total_memory, "cuda": torch.version.cuda or "",
        "triton": triton.__version__,
    }  # fmt: skip


def measure(device: str, repeats: int, shrink: int) -> list[Row]:
    """All rows that one process can measure. Raises BenchFailed where bytes are wrong."""
    rows: list[Row] = []
    for case in MATRICES:
        rows += _matrix_rows(case if shrink == 1 else case.shrunk(shrink), device, repeats)
    small = cases.SMALL if shrink == 1 else cases.SMALL.shrunk(shrink)
    return rows + _small_rows(small, device, repeats)


def _matrix_rows(case: Case, device: str, repeats: int) -> list[Row]:
    scene = make_scene(case, device)
    wire = torch.full((wire_offsets(scene.program, scene.bucket)[1],), 0xA5, dtype=torch.uint8, device=device)
    tables = _tables(scene, wire)
    launches = {name: prepare(table, device) for name, table in tables.items()}
    _check(scene, launches)
    copied = _seconds(_plain_copy(case, device), device, repeats)
    bound = copied * case.traffic / (2 * case.payload)  # for the bytes that this case reads and writes
    rows = [Row(f"{case.name}_plain_copy", case.payload / copied / 1e9, "GB/s")]
    for name, launch in launches.items():
        for label, sums in ((name, False), (f"{name}_checked", True)):
            if name == "reread" and not sums:
                continue
            took = _seconds(partial(launch.run, sums), device, repeats)
            limit = copied / 2 if name == "reread" else copied if name == "unpack" else bound
            rows.append(_rate(f"{case.name}_{label}", case.payload, took, limit))
    return rows


def _tables(scene: Scene, wire: torch.Tensor) -> dict[str, Table]:
    """Packing, unpacking (into the matrices where dtypes allow, else into the dense parts), both at once, reading."""
    at, buckets, program = {scene.bucket.id: wire.data_ptr()}, [scene.bucket], scene.program
    sources, destinations = addresses(scene.whole), addresses(scene.parts)
    back = scene.case.dtype == scene.case.to
    unpacking = (mirror(program), buckets, at, sources) if back else (program, buckets, at, destinations)
    return {
        "pack": gather(program, buckets, sources, at),
        "unpack": scatter(*unpacking),
        "through": through(program, buckets, sources, destinations),
        "reread": reread(program, buckets, destinations),
    }


def _check(scene: Scene, launches: dict[str, Launch]) -> None:
    """Move straight; pack and unpack onto poison. Both must give torch's bytes, and all four the same checksum."""
    sums = set()
    for names in (("through", "reread", "pack"), ("unpack",)):
        for name in names:
            launches[name].run()
            sums.add(launches[name].checksums()[scene.bucket.id])
        if wrong := wrong_parts(scene):
            raise BenchFailed(f"{scene.case.name}: {'-'.join(names)} got slices {list(wrong)[:5]} wrong")
        if names == ("unpack",):
            break
        for part in (scene.whole if scene.case.dtype == scene.case.to else scene.parts).values():
            part.view(torch.uint8).fill_(0xA5)
    if len(sums) != 1:
        raise BenchFailed(f"{scene.case.name}: checksums differ: {sorted(sums)}")


def _small_rows(case: Case, device: str, repeats: int) -> list[Row]:
    """Many tensors into one buffer: a launch, next to a loop of ``copy_`` and to ``torch.cat``."""
    scene = make_scene(case, device)
    wire = torch.empty(wire_offsets(scene.program, scene.bucket)[1], dtype=torch.uint8, device=device)
    launch = prepare(_tables(scene, wire)["pack"], device)
    sources = list(scene.whole.values())
    joined = torch.empty(case.payload // 2, dtype=torch.bfloat16, device=device)
    pieces = joined.view(-1, case.cols).unbind()

    def loop() -> None:
        for source, piece in zip(sources, pieces, strict=True):
            piece.copy_(source)

    ours = _seconds(lambda: launch.run(True), device, repeats)
    if not torch.equal(wire.view(torch.bfloat16), torch.cat(sources)):
        raise BenchFailed(f"{case.name}: wrong bytes")
    looped = _seconds(loop, device, LOOPED)
    cat = _seconds(lambda: torch.cat(sources, out=joined), device, repeats)
    return [
        _time(f"{case.name}_pack_checked", ours, looped), _time(f"{case.name}_copy_loop", looped),
        _time(f"{case.name}_cat", cat, looped),
    ]  # fmt: skip


def _plain_copy(case: Case, device: str) -> Callable[[], object]:
    source = torch.randint(0, 256, (case.payload,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of ``work``: between events on the GPU, by the clock elsewhere."""
    for _ in range(WARM_UPS):
        work()
    return statistics.median((_events if device == "cuda" else _clock)(work, repeats))


def _events(work: Callable[[], object], repeats: int) -> list[float]:
    event: Any = torch.cuda.Event  # untyped in torch
    marks = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _clock(work: Callable[[], object], repeats: int) -> list[float]:
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return took


def _rate(name: str, payload: int, took: float, limit: float) -> Row:
    """Payload GB/s next to what the plain copy's rate allows for the bytes that must be read and written."""
    return Row(name, payload / took / 1e9, "GB/s", payload / limit / 1e9, limit / took)


def _time(name: str, took: float, rival: float | None = None) -> Row:
    return Row(name, took * 1e3, "ms", rival and rival * 1e3, rival and rival / took)
