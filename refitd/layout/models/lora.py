"""LoRA adapters as tensors of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from refitd.errors import InputError, MismatchError
from refitd.layout.layout import Layout
from refitd.layout.models.catalogue import Block, Catalogue, Row, build

_MARKS = (".lora_A.", ".lora_B.")


def with_lora(catalogue: Catalogue, roles: Collection[str], rank: int) -> Catalogue:
    """The catalogue with ``lora_A`` [rank, in] and ``lora_B`` [out, rank] beside each weight of ``roles``.

    Of a weight that is cut by rows B is cut by rows and A is whole; of one that is cut by columns it is the other way
    about.
    """
    for role in roles:
        catalogue.kind(role)
    blocks = [
        Block(k.prefix, k.layers, [k.row, *(_rows(k.row, rank) if k.role in roles else ())], k.mtp)
        for k in catalogue.kinds
    ]
    return build(
        catalogue.name, catalogue.layers, catalogue.vocab, blocks, catalogue.heads, catalogue.experts, catalogue.tied
    )


def _rows(row: Row, rank: int) -> Iterator[Row]:
    name = row.name.removesuffix(".weight")
    by_columns = row.cut == "columns"
    a, b = ("columns", "full") if by_columns else ("full", row.cut)
    yield Row(f"{row.role}_lora_a", f"{name}.lora_A.weight", (rank, row.shape[1]), a, row.dtype, (), row.experts)
    yield Row(
        f"{row.role}_lora_b", f"{name}.lora_B.weight", (row.shape[0], rank), b, row.dtype, row.segments, row.experts
    )


def is_adapter(tensor: str) -> bool:
    """Whether a tensor is a LoRA adapter, by its name."""
    return any(mark in tensor for mark in _MARKS)


def check_adapters(sources: Mapping[str, Layout], destinations: Mapping[str, Layout]) -> None:
    """Refuse an update that declares LoRA and would move no adapter. Raises MismatchError.

    Adapters move when the sources have them and a destination has pieces of them in storages that ``keep`` does not
    name.
    """
    offered = {name for layout in sources.values() for name in layout.tensors if is_adapter(name)}
    taken = {
        piece.tensor
        for layout in destinations.values()
        for piece in layout.pieces()
        if is_adapter(piece.tensor) and piece.storage not in layout.kept
    }
    bad = []
    if not offered & taken:
        got = f"none ({len(offered)} at the sources, {len(taken)} at the destinations)"
        bad.append(InputError("LoRA update", "at least one adapter tensor that moves", got))
    bad += [
        InputError(f"adapter {name}", "a destination that takes it", "none")
        for name in sorted(offered - taken)
        if taken
    ]
    if bad:
        raise MismatchError(bad)
