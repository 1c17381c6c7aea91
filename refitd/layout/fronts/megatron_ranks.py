"""Megatron's parallel sizes, rank numbering and pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError, LayoutError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Parallel:
    """Parallel sizes. Ranks are numbered in the default order tp-cp-ep-dp-pp.

    ``etp``: tensor parallelism inside experts; None means ``tp``, as in Megatron. ``stage_layers``: layers of each
    stage, in the order of the model (stage ``v * pp + p`` is chunk v of rank group p); None cuts evenly. ``vpp``:
    chunks a rank. ``dp`` counts data-parallel ranks of the dense part; experts have tp * cp * dp / (etp * ep).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    etp: int | None = None
    vpp: int = 1
    stage_layers: tuple[int, ...] | None = None

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stage * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism inside experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Data parallelism of experts."""
        return self.stage // (self.expert_tp * self.ep)

    def check(self, experts: int) -> None:
        """Raise LayoutError unless the sizes fit each other and ``experts`` routed experts."""
        sizes = {n: getattr(self, n) for n in ("tp", "pp", "ep", "dp", "cp", "vpp")} | {"etp": self.expert_tp}
        bad = [InputError(f"parallel sizes: {n}", "at least 1", str(size)) for n, size in sizes.items() if size < 1]
        if bad:
            raise LayoutError(bad)
        if self.stage % (self.expert_tp * self.ep):
            got = f"ETP {self.expert_tp} x EP {self.ep}"
            bad.append(InputError("parallel sizes", f"experts that divide the {self.stage} ranks of a stage", got))
        if experts % self.ep:
            bad.append(InputError("parallel sizes", f"EP that divides {experts} experts", f"EP {self.ep}"))
        if bad:
            raise LayoutError(bad)

    def dense_rank(self, tp: int, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank with these coordinates in the dense grid."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def expert_rank(self, etp: int, ep: int, edp: int = 0, pp: int = 0) -> int:
        """The rank with these coordinates in the expert grid: the same processes, numbered otherwise."""
        return etp + self.expert_tp * (ep + self.ep * (edp + self.edp * pp))

    def stage_ranks(self, pp: int) -> range:
        """Ranks of rank group ``pp``."""
        return range(pp * self.stage, (pp + 1) * self.stage)

    def expert_ranks(self, ep: int, pp: int) -> list[int]:
        """Ranks with the experts of ``ep``, in rank order: edp outer, etp inner."""
        return [self.expert_rank(etp, ep, edp, pp) for edp in range(self.edp) for etp in range(self.expert_tp)]


@dataclass(frozen=True)
class Stages:
    """Which stage has a layer. ``stage`` and ``local`` (layers,): model-wide stage number, layer number inside it."""

    stage: Ints
    local: Ints
    count: int


def stages(parallel: Parallel, layers: int) -> Stages:
    """Stages of ``layers`` layers. Raises LayoutError when the given sizes do not add up."""
    count = parallel.pp * parallel.vpp
    sizes = parallel.stage_layers or _even(layers, count)
    if len(sizes) != count or sum(sizes) != layers:
        expected = f"{count} stages with {layers} layers in all"
        raise LayoutError([InputError("stage_layers", expected, f"{len(sizes)} with {sum(sizes)}")])
    stage = np.repeat(np.arange(count, dtype=np.int64), sizes)
    start = np.cumsum([0, *sizes[:-1]])
    return Stages(stage, np.arange(layers, dtype=np.int64) - start[stage], count)


def _even(layers: int, count: int) -> Sequence[int]:
    if layers % count:
        raise LayoutError(
            [InputError("stage_layers", f"given, as {count} stages do not divide the layers", str(layers))]
        )
    return (layers // count,) * count
