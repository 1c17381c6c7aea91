"""vLLM and SGLang: the sizes of a replica and how its parts are cut."""

from __future__ import annotations

from collections.abc import Sequence

from refitd.errors import InputError, LayoutError
from refitd.layout.fronts.engine_shape import Engine
from refitd.layout.fronts.engine_side import EngineSide
from refitd.layout.fronts.expert_maps import ExpertMap
from refitd.layout.fronts.places import Hosts, engine_keys, places
from refitd.layout.models import Catalogue
from refitd.layout.side import Side, SideBuilder

__all__ = ["Engine", "engine", "sglang", "vllm"]


def vllm(
    tp: int,
    dp: int = 1,
    pp: int = 1,
    experts: ExpertMap | Sequence[ExpertMap] | None = None,
    stage_layers: tuple[int, ...] | None = None,
    sequence_parallel_moe: bool = False,
) -> Engine:
    """A vLLM replica. ``experts``: with expert parallelism, the engine's map over its DP * TP ranks; else None."""
    width = tp * dp
    shared = 1 if sequence_parallel_moe else tp
    inner = 1 if experts is not None else width
    return Engine(width, tp, tp, tp, shared, inner, experts, pp, stage_layers, "vllm", dp_outer=True)


def sglang(
    tp: int,
    dp: int = 1,
    ep: int = 1,
    experts: ExpertMap | Sequence[ExpertMap] | None = None,
    transposed: bool = False,
    pp: int = 1,
    stage_layers: tuple[int, ...] | None = None,
) -> Engine:
    """An SGLang replica of ``pp`` stages of ``tp`` ranks. With DP attention (``dp`` > 1) attention is cut over tp / dp
    ranks; experts are cut over ep, and inside over tp / ep. ``experts``: the engine's map over ep ranks, needed when ep
    > 1.
    """
    if min(tp, dp, ep) < 1 or tp % dp or tp % ep:
        raise LayoutError([InputError("parallel sizes", f"DP and EP that divide TP {tp}", f"DP {dp}, EP {ep}")])
    if (ep > 1) != (experts is not None):
        raise LayoutError([InputError("experts", f"the engine's map for EP {ep}, or none for 1", str(experts)[:40])])
    inner = tp // ep
    return Engine(
        tp, tp // dp, tp, tp, tp, inner, experts, pp, stage_layers, flavour="sglang", transposed=transposed
    )  # fmt: skip


def engine(
    catalogue: Catalogue, shape: Engine, replicas: int, hosts: Hosts, name: str = "engine", part: str = "target"
) -> Side:
    """The side of ``replicas`` equal engines. ``part``: the ``target`` model, or the ``draft`` (MTP) model's own
    tensors.

    Raises LayoutError when the sizes do not fit the model.
    """
    if part not in ("target", "draft"):
        raise InputError("part", "target or draft", part)
    if part == "draft" and not any(kind.mtp for kind in catalogue.kinds):
        raise InputError("part", f"target, as {catalogue.name} was listed without multi-token prediction", part)
    shape.check(replicas)
    ranks = places(engine_keys(replicas, shape.world), name, hosts)
    return EngineSide(catalogue, shape, replicas, SideBuilder(ranks, catalogue.names)).side(part == "draft")
