"""The sizes of an engine's replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError, LayoutError
from refitd.layout.fronts.expert_maps import ExpertMap

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Engine:
    """Sizes of one replica and how its parts are cut.

    ``width`` ranks a pipeline stage. Rank r of a stage has coordinate ``r % n`` in a part cut over n ranks:
    ``attention``, ``vocab``, ``dense`` (feed-forward blocks), ``shared`` (experts) and ``expert_tp`` (inside routed
    experts). ``experts``: the engine's own expert map, one for all layers or one a layer; None: every rank has all
    experts, cut over ``expert_tp``. ``pp`` stages of ``stage_layers``. ``flavour``: ``vllm`` or ``sglang``.
    ``dp_outer``: rank numbering is DP x PP x TP (vLLM), else PP x the rest. ``vocab_multiple``: padding of the
    vocabulary. ``transposed``: expert weights are stored [E, K, N]. ``up_first``: w13 has up before gate.
    ``expert_multiple``: an expert's share of its inner size is padded to a multiple of this in storage.
    """

    width: int
    attention: int
    vocab: int
    dense: int
    shared: int
    expert_tp: int
    experts: ExpertMap | Sequence[ExpertMap] | None = None
    pp: int = 1
    stage_layers: tuple[int, ...] | None = None
    flavour: str = "vllm"
    dp_outer: bool = False
    vocab_multiple: int = 64
    transposed: bool = False
    up_first: bool = False
    expert_multiple: int = 1

    @property
    def world(self) -> int:
        """Ranks of a replica."""
        return self.width * self.pp

    @property
    def ep(self) -> int:
        """EP ranks of a stage."""
        return self.width // self.expert_tp

    def check(self, replicas: int) -> None:
        """Raise LayoutError unless all sizes are at least 1 and every part's ranks divide the stage's."""
        parts = ("attention", "vocab", "dense", "shared", "expert_tp")
        sizes = {
            name: int(getattr(self, name)) for name in ("width", "pp", "vocab_multiple", "expert_multiple", *parts)
        }
        sizes["replicas"] = replicas
        bad = [InputError(f"engine sizes: {n}", "at least 1", str(size)) for n, size in sizes.items() if size < 1]
        if not bad:
            wrong = [name for name in parts if self.width % sizes[name]]
            expected = f"a number of ranks that divides the stage's {self.width}"
            bad = [InputError(f"engine sizes: {name}", expected, str(sizes[name])) for name in wrong]
        if self.flavour not in ("vllm", "sglang"):
            bad.append(InputError("engine flavour", "vllm or sglang", self.flavour))
        if bad:
            raise LayoutError(bad)

    def rank(self, pp: int, place: int) -> int:
        """The rank number in the replica of place ``place`` of stage ``pp``."""
        if not self.dp_outer:
            return pp * self.width + place
        dp, tp = divmod(place, self.attention)
        return (dp * self.pp + pp) * self.attention + tp

    def stage_of(self, layers: int) -> Ints:
        """The stage of each layer. Raises LayoutError when the stages do not add up."""
        sizes = self.stage_layers or ((layers // self.pp,) * self.pp if layers % self.pp == 0 else ())
        if len(sizes) != self.pp or sum(sizes) != layers:
            expected = f"{self.pp} stages with {layers} layers in all"
            raise LayoutError([InputError("stage_layers", expected, str(list(sizes)))])
        return np.repeat(np.arange(self.pp, dtype=np.int64), sizes)
