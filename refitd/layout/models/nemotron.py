"""Nemotron 3 Ultra: Mamba-2, attention and latent mixture of experts, one of them a layer."""

from __future__ import annotations

from typing import NamedTuple

from refitd.layout.models.catalogue import Block, Catalogue, Heads, Row, build
from refitd.layout.models.rows import gqa, norm, renamed

ULTRA_PATTERN = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
)


class Mamba(NamedTuple):
    """Sizes of a Mamba-2 mixer: heads of ``dim``, ``groups`` of ``state``."""

    heads: int
    dim: int
    groups: int
    state: int

    @property
    def projection(self) -> tuple[int, ...]:
        """Row segments of in_proj: z, x, B, C, dt."""
        return (*(self.heads * self.dim,) * 2, *(self.groups * self.state,) * 2, self.heads)

    @property
    def convolution(self) -> tuple[int, ...]:
        """Channel segments of conv1d: x, B, C."""
        return self.projection[1:4]


class Sizes(NamedTuple):
    """Sizes of a NemotronH model with latent experts."""

    pattern: str = ULTRA_PATTERN
    hidden: int = 8192
    mamba: Mamba = Mamba(256, 64, 8, 128)
    q: int = 64
    kv: int = 2
    dim: int = 128
    experts: int = 512
    inner: int = 5120
    latent: int = 2048
    shared: int = 10240
    vocab: int = 131072


def mamba_rows(hidden: int, m: Mamba) -> list[Row]:
    """The tensors of a Mamba-2 mixer."""
    inner, channels = m.heads * m.dim, sum(m.convolution)
    return [
        Row("m_in", "in_proj.weight", (sum(m.projection), hidden), "segments", segments=m.projection),
        Row("m_conv", "conv1d.weight", (channels, 1, 4), "segments", segments=m.convolution),
        Row("m_conv_bias", "conv1d.bias", (channels,), "segments", segments=m.convolution),
        *(Row(f"m_{name}", name, (m.heads,), "rows") for name in ("A_log", "D", "dt_bias")),
        Row("m_norm", "norm.weight", (inner,), "rows"),
        Row("m_out", "out_proj.weight", (hidden, inner), "columns"),
    ]


def catalogue(name: str, s: Sizes, mtp: bool = False) -> Catalogue:
    """A model of these sizes; with ``mtp``, its shared prediction layer (attention and experts)."""
    attention = gqa(s.hidden, s.q, s.kv, s.dim, False)
    prefix = "backbone.layers.{}."
    where = {letter: [i for i, c in enumerate(s.pattern) if c == letter] for letter in "M*E"}
    blocks = [
        Block("", (), _ends(s)),
        Block(prefix, range(len(s.pattern)), [norm("norm1", "norm", s.hidden)]),
        Block(prefix + "mixer.", where["M"], mamba_rows(s.hidden, s.mamba)),
        Block(prefix + "mixer.", where["*"], attention),
        Block(prefix + "mixer.", where["E"], _moe(s)),
    ]
    if mtp:
        blocks += _mtp(s, attention)
    return build(name, len(s.pattern), s.vocab, blocks, Heads(s.q, s.kv, s.dim, s.dim), s.experts)


def _ends(s: Sizes) -> list[Row]:
    return [
        Row("embed", "backbone.embeddings.weight", (s.vocab, s.hidden), "vocab"),
        norm("final_norm", "backbone.norm_f", s.hidden),
        Row("head", "lm_head.weight", (s.vocab, s.hidden), "vocab"),
    ]


def _moe(s: Sizes) -> list[Row]:
    return [
        Row("router", "gate.weight", (s.experts, s.hidden)),
        Row("router_bias", "gate.e_score_correction_bias", (s.experts,), dtype="float32", buffer=True),
        Row("latent_in", "fc1_latent_proj.weight", (s.latent, s.hidden)),
        Row("latent_out", "fc2_latent_proj.weight", (s.hidden, s.latent)),
        Row("expert_up", "experts.{}.up_proj.weight", (s.inner, s.latent), "rows", experts=s.experts),
        Row("expert_down", "experts.{}.down_proj.weight", (s.latent, s.inner), "columns", experts=s.experts),
        Row("shared_up", "shared_experts.up_proj.weight", (s.shared, s.hidden), "rows"),
        Row("shared_down", "shared_experts.down_proj.weight", (s.hidden, s.shared), "columns"),
    ]


def _mtp(s: Sizes, attention: list[Row]) -> list[Block]:
    first = [
        norm("enorm", "enorm", s.hidden),
        norm("hnorm", "hnorm", s.hidden),
        Row("eh_proj", "eh_proj.weight", (s.hidden, 2 * s.hidden), "rows"),
        norm("norm1", "norm", s.hidden),
        *renamed(attention, "mixer."),
    ]
    second = [
        norm("norm2", "norm", s.hidden),
        *renamed(_moe(s), "mixer."),
        norm("final_norm", "final_layernorm", s.hidden),
    ]
    return [Block("mtp.layers.{}.", (0,), first, mtp=True), Block("mtp.layers.{}.", (1,), second, mtp=True)]
