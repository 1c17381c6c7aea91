"""The peer path between processes on one card: readers pull owners' memory straight into place, checksums on.

Owners cut matrices by rows and export their memory; readers hold them cut by columns. Only the readers' kernels copy.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from refitd.bench.party import BenchFailed
from refitd.bench.rows import Row
from refitd.hook.gpu.driver import Driver
from refitd.hook.gpu.export import Extent, export
from refitd.mover.cuda.imports import Imports
from refitd.mover.kernels import Launch, prepare, reread, through
from refitd.plan.program import PEER, Bucket, Program, StorageRef

START_SECONDS = 120
WARM_UPS = 3
# GB/s of NCCL M2N 0.1.0 (NCCL 2.30.7), one call at a time: on one H200 that its ranks shared, and between two.
M2N = {
    "pull_1GiB": 486.0, "pull_256MiB_2x2": 132.0, "pull_1MiB_nvlink": 5.9, "pull_16MiB_nvlink": 80.0,
    "pull_256MiB_nvlink": 221.0, "pull_1GiB_nvlink": 264.0, "pull_2GiB_nvlink": 276.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pull:
    """``tensors`` bfloat16 matrices of ``rows`` by ``cols``: cut by rows on ``owners``, by columns on ``readers``.

    ``across``: the readers are on the second card, and pull over NVLink.
    """

    name: str
    tensors: int
    rows: int
    cols: int
    owners: int = 1
    readers: int = 1
    across: bool = False

    @property
    def nbytes(self) -> int:
        return self.tensors * self.rows * self.cols * 2


PULLS = (
    Pull("pull_1GiB", 1, 16384, 32768),
    Pull("pull_256MiB_2x2", 1, 16384, 8192, 2, 2),
    Pull("pull_48GB", 48, 16384, 30720),
    Pull("pull_1MB", 24, 64, 340),
)
ACROSS = tuple(
    Pull(f"pull_{name}_nvlink", 1, rows, 32768, across=True)
    for name, rows in (("1MiB", 16), ("16MiB", 256), ("256MiB", 4096), ("1GiB", 16384), ("2GiB", 32768))
)


def pull_rows(pulls: Sequence[Pull], repeats: int, shrink: int) -> list[Row]:
    """From the readers' start to the last checksum in hand, by the clock: medians. Raises BenchFailed.

    ``<name>_moved`` has no checksums, ``<name>_reread`` sums also what was written; ``<name>_checksums_cost`` is
    what they take over that. The baseline is M2N's rate where it is known, else a plain copy in the same run.
    """
    rows: list[Row] = []
    for pull in pulls:
        pull = replace(pull, rows=max(pull.rows // shrink, 2))
        plain = 0.0
        for label, verify in (("_moved", "none"), ("", "sum"), ("_reread", "reread")):
            seconds, copied = _run(pull, repeats, verify)
            took = statistics.median(seconds)
            rate = pull.nbytes / took / 1e9
            baseline = M2N.get(pull.name, copied)
            rows.append(Row(pull.name + label, rate, "GB/s", baseline, rate / baseline))
            rows.append(Row(f"{pull.name}{label}_time", took * 1e3, "ms"))
            plain = plain or took
            if verify != "none":
                rows.append(Row(f"{pull.name}{label}_checksums_cost", 100 * (took / plain - 1), "%"))
        rows.append(Row(f"{pull.name}_plain_copy", copied, "GB/s"))
    return rows


def _run(pull: Pull, repeats: int, verify: str) -> tuple[list[float], float]:
    """Seconds of every repeat, and the plain copy's GB/s."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(pull.readers)
    pipes, children = [], []
    roles: list[tuple[Any, tuple[Any, ...]]] = [(_own, (pull, i)) for i in range(pull.owners)]
    roles += [(_read, (pull, i, repeats, verify, barrier)) for i in range(pull.readers)]
    try:
        for target, arguments in roles:
            ours, theirs = context.Pipe()
            child = context.Process(target=target, args=(theirs, *arguments), daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        return _conduct(pipes[: pull.owners], pipes[pull.owners :])
    finally:
        for child in children:
            child.kill()
            child.join()


def _conduct(owners: list[Connection], readers: list[Connection]) -> tuple[list[float], float]:
    exports = [_next(pipe, "owner") for pipe in owners]
    for pipe in readers:
        pipe.send(exports)
    found = [_next(pipe, "reader") for pipe in readers]
    steps = zip(*(spans for spans, _copied in found), strict=True)
    seconds = [max(end for _, end in step) - min(begin for begin, _ in step) for step in steps]
    return seconds, max(copied for _spans, copied in found)


def _next(pipe: Connection, who: str) -> Any:
    try:
        if pipe.poll(START_SECONDS):
            return pipe.recv()
    except EOFError:
        raise BenchFailed(f"a process of the peer path died: {who}; see stderr") from None
    raise BenchFailed(f"a process of the peer path said nothing for {START_SECONDS} s: {who}")


def _own(pipe: Connection, pull: Pull, index: int) -> None:
    part = _part(pull.rows, pull.owners, index)
    tensors = {f"w{i}": _values(pull, i)[part].clone() for i in range(pull.tensors)}
    torch.cuda.synchronize()
    driver = Driver(torch.cuda.current_device())
    extents = {name: Extent(tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors.items()}
    made = export(driver, extents)
    if made.refused or made.fds:
        raise BenchFailed(f"memory of cudaMalloc cannot be lent by handle: {made.refused}")
    pipe.send(made.message)
    pipe.recv()  # until we are killed


def _read(pipe: Connection, pull: Pull, index: int, repeats: int, verify: str, barrier: Any) -> None:
    torch.cuda.set_device(int(pull.across))
    driver = Driver(torch.cuda.current_device())
    if pull.across:
        driver.enable_peer(0)
    columns = _part(pull.cols, pull.readers, index)
    shape = pull.rows, columns.stop - columns.start
    mine = [torch.full(shape, 0.5, dtype=torch.bfloat16, device="cuda") for _ in range(pull.tensors)]
    exports = pipe.recv()  # from here on the owners are idle
    copied = _copy_rate()
    imports = Imports(driver)
    sources = {
        f"{name}/{owner}": address
        for owner, message in enumerate(exports)
        for name, address in imports.open(str(owner), message).items()
    }
    program = program_of(pull, columns)
    target = {f"w{i}": tensor.data_ptr() for i, tensor in enumerate(mine)}
    launches = [prepare(through(program, program.buckets, sources, target), "cuda")]
    if verify == "reread":
        launches.append(prepare(reread(program, program.buckets, target), "cuda"))
    step = partial(_step, launches, verify, barrier)
    spans = [step() for _ in range(WARM_UPS + repeats)][WARM_UPS:]
    if wrong := [i for i, tensor in enumerate(mine) if not torch.equal(tensor, _values(pull, i)[:, columns])]:
        raise BenchFailed(f"wrong bytes came by the peer path: tensors {wrong[:5]}")
    imports.close_all()
    pipe.send((spans, copied))
    pipe.recv()


def _step(launches: list[Launch], verify: str, barrier: Any) -> tuple[float, float]:
    torch.cuda.synchronize()
    barrier.wait(START_SECONDS)
    begin = time.monotonic()
    for launch in launches:
        launch.run(verify != "none")
    torch.cuda.synchronize()
    sums = [launch.checksums() for launch in launches if verify != "none"]
    if verify == "reread" and sums[0] != sums[1]:
        raise BenchFailed("what was written reads back differently")
    return begin, time.monotonic()


def _copy_rate(nbytes: int = 1 << 30) -> float:
    """GB/s of a plain copy from the first card to the current one."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda")
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    target.copy_(source)
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 10 * nbytes / float(begin.elapsed_time(end)) / 1e6


def _values(pull: Pull, number: int) -> torch.Tensor:
    """The same in every process; small integers, so that equality is equality of bits."""
    generator = torch.Generator("cuda").manual_seed(number)
    shape = pull.rows, pull.cols
    return torch.randint(0, 256, shape, generator=generator, device="cuda", dtype=torch.uint8).to(torch.bfloat16)


def _part(size: int, parts: int, index: int) -> slice:
    return slice(size * index // parts, size * (index + 1) // parts)


def program_of(pull: Pull, columns: slice) -> Program:
    """A reader's: a bucket from each owner, with a move a tensor. Sources are named ``<tensor>/<owner>``."""
    width, count = columns.stop - columns.start, pull.tensors
    parts = [_part(pull.rows, pull.owners, i) for i in range(pull.owners)]
    moves = [
        (owner * count + i, columns.start, pull.cols, 1,
         pull.owners * count + i, rows.start * width, width, 1, rows.stop - rows.start, width)
        for owner, rows in enumerate(parts)
        for i in range(count)
    ]  # fmt: skip
    storages = [
        StorageRef(f"o{owner}", f"w{i}/{owner}", "bfloat16", (rows.stop - rows.start) * pull.cols)
        for owner, rows in enumerate(parts)
        for i in range(count)
    ]
    storages += [StorageRef("r", f"w{i}", "bfloat16", pull.rows * width) for i in range(count)]
    buckets = tuple(
        Bucket(owner, f"o{owner}", "r", PEER, 0, count * (rows.stop - rows.start) * width * 2, owner * count,
               owner * count + count)
        for owner, rows in enumerate(parts)
    )  # fmt: skip
    return Program("r", pull.name, buckets, np.array(moves, np.int64), storages)
