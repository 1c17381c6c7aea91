"""Tensor parallelism for Qwen3, plain: cut modules, partial sums exchanged over gloo and added in the order of ranks.

The cut, the storages and the layout are what an engine has: q, k and v in one storage, gate and up in another.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from refitd.layout import Layout, tp

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")  # of the weight
COLUMNS = ("o_proj", "down_proj")
FUSED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}


@dataclass
class Mates:
    """The ranks of one engine, in torch's default group."""

    rank: int
    world: int

    def parts(self, mine):
        """The tensor of every rank, in order, where ``mine`` is. By way of the host: bytes, so that nothing rounds."""
        host = mine.detach().cpu().contiguous().view(torch.uint8)
        found = [torch.empty_like(host) for _ in range(self.world)]
        dist.all_gather(found, host)
        return [part.view(mine.dtype).to(mine.device) for part in found]

    def sum(self, mine):
        first, *others = self.parts(mine)
        for other in others:
            first = first + other
        return first

    def tell(self, value):
        """What rank 0 has, on every rank."""
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


class RowCut(nn.Module):
    """Has some rows of a linear layer's weight; ``whole``: all ranks' outputs side by side, else its own."""

    def __init__(self, weight, mates, whole):
        super().__init__()
        self.weight, self._mates, self._whole = weight, mates, whole

    def forward(self, x):
        mine = functional.linear(x, self.weight)
        return torch.cat(self._mates.parts(mine), -1) if self._whole else mine


class ColumnCut(nn.Module):
    """Has some columns. Products are added in fp32, as inside of one whole product, and rounded once."""

    def __init__(self, weight, mates):
        super().__init__()
        self.weight, self._mates = weight, mates

    def forward(self, x):
        return self._mates.sum(functional.linear(x.float(), self.weight.float())).to(x.dtype)


class WordCut(nn.Module):
    """Has some words of an embedding; the others are zeros here."""

    def __init__(self, weight, mates):
        super().__init__()
        self.weight, self._mates = weight, mates

    def forward(self, ids):
        at = ids - self._mates.rank * len(self.weight)
        here = (at >= 0) & (at < len(self.weight))
        found = functional.embedding(at.clamp(0, len(self.weight) - 1), self.weight)
        return self._mates.sum(found * here[..., None])


def cut(model, mates):
    """Replace what is parallel in a whole model by this rank's share of it; the same arithmetic for whoever does so."""
    for name, module in list(model.named_modules()):
        parent, _dot, last = name.rpartition(".")
        if last not in ROWS + COLUMNS:
            continue
        with torch.no_grad():
            share = module.weight.chunk(mates.world, 1 if last in COLUMNS else 0)[mates.rank].clone().contiguous()
        weight = nn.Parameter(share, requires_grad=False)
        if last in COLUMNS:
            made = ColumnCut(weight, mates)
        else:
            made = WordCut(weight, mates) if last == "embed_tokens" else RowCut(weight, mates, last == "lm_head")
        setattr(model.get_submodule(parent), last, made)
    return model.requires_grad_(False)


def fuse(model):
    """Storage name -> tensor: parameters become views of fused storages where an engine has those."""
    storages = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in FUSED:
            mine = [getattr(module, part) for part in FUSED[last]]
            storages[f"{name}.fused"] = whole = torch.cat([part.weight.data for part in mine])
            for part, rows in zip(mine, whole.split([len(part.weight) for part in mine]), strict=True):
                part.weight.data = rows
    inside = {f"{name}.{part}.weight" for name, parts in _fused(model) for part in parts}
    storages |= {name: weight.data for name, weight in model.named_parameters() if name not in inside}
    return storages


def _fused(model):
    return [(name, FUSED[last]) for name, _m in model.named_modules() if (last := name.rpartition(".")[2]) in FUSED]


def layout(model, shapes, mates):
    """The geometry of a model that was cut and fused; ``shapes``: of the whole tensors, by name."""
    boxes = {name: _box(name, shape, mates) for name, shape in shapes.items()}
    pieces, storages = [], {}
    for name, parts in _fused(model):
        names = [f"{name}.{part}.weight" for part in parts]
        pieces += tp.fused(f"{name}.fused", *((part, boxes[part]) for part in names))
        storages[f"{name}.fused"] = tp.fused_elements(*(boxes.pop(part) for part in names)), "bfloat16"
    pieces += [tp.dense(name, box, name) for name, box in boxes.items()]
    storages |= {name: (box.volume, "bfloat16") for name, box in boxes.items()}
    return Layout.from_pieces({name: (shape, "bfloat16") for name, shape in shapes.items()}, storages, pieces)


def _box(name, shape, mates):
    module = name.split(".")[-2]
    if module in COLUMNS:
        return tp.row_parallel(shape, mates.rank, mates.world)
    return tp.column_parallel(shape, mates.rank, mates.world) if module in ROWS else tp.replicated(shape)
