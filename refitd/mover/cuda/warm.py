"""Compile and load the kernels of a program before it runs: a compilation takes as long as many refits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from refitd.errors import InputError
from refitd.mover.cuda.device import Device, device_errors
from refitd.mover.cuda.groups import by_rank, groups, rank_name
from refitd.mover.kernels import Table, reread, through
from refitd.plan.program import SENT, Program

_ANYWHERE = 1 << 40  # an address, aligned as allocators align; nothing is read or written


def warm(device: Device, program: Program) -> None:
    """Compile for all buckets that ``program`` reads from other memory of this host, as if it were aligned as usual.

    Weights that begin at odder places than allocators give need other kernels, which are compiled when they are mounted
    and first moved. Raises DeviceError.
    """
    device.activate()
    for table in tables(program):
        launch = device.prepare(replace(table, rows=table.rows[:0], tiles=table.tiles[:0]), kinds=table.kinds)
        with device_errors("compile a kernel"):
            launch.run()
            launch.checksums()
    device.touch([])


def tables(program: Program) -> Iterator[Table]:
    """What will be run, but for the addresses: to move, and to sum what was written."""
    places = {rank_name(ref.rank, ref.name): _ANYWHERE for ref in program.storages}
    program = by_rank(program)
    buckets = [bucket for bucket in program.receives() if bucket.link not in SENT]
    for group in groups(program, buckets, sum(bucket.nbytes for bucket in buckets)):
        try:
            yield through(program, group, places, places)
            yield reread(program, group, places)
        except InputError:
            continue  # it will say so when it is run
