"""The presets. docs/presets.md says why each is as it is."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.layout.fronts.engine import Engine, engine, vllm
from refitd.layout.fronts.expert_maps import linear
from refitd.layout.fronts.megatron import Options, Parallel, megatron
from refitd.layout.fronts.places import Hosts
from refitd.layout.models import Catalogue, catalogue
from refitd.layout.side import Side


@dataclass(frozen=True)
class Preset:
    """A model, a Megatron trainer, ``replicas`` engines, and hosts that both run on."""

    model: str
    trainer: Parallel
    engine: Engine
    replicas: int
    hosts: Hosts
    vocab_multiple: int = 128

    @property
    def catalogue(self) -> Catalogue:
        """The model's tensors."""
        return catalogue(self.model)

    def sides(self) -> tuple[Side, Side]:
        """Source and destination."""
        model = self.catalogue
        source = megatron(model, self.trainer, self.hosts, Options(vocab_multiple=self.vocab_multiple))
        return source, engine(model, self.engine, self.replicas, self.hosts)


H100 = Hosts(8, 8)
GB200 = Hosts(4, 64)  # trays of 4 GPUs; 64 of the 72 GPUs of a rack

_DEEPSEEK = Parallel(tp=1, pp=16, ep=16, dp=16, etp=1, stage_layers=(3, *(4,) * 14, 2))
_QWEN3 = Parallel(tp=4, pp=8, ep=16, dp=4, etp=1, stage_layers=(11, *(12,) * 6, 11))
_ULTRA = Parallel(tp=8, pp=2, ep=32, dp=4, etp=1)
_QWEN38 = Parallel(tp=4, pp=16, ep=64, dp=16, etp=1, stage_layers=(5, *(6,) * 14, 3))
_K3 = Parallel(tp=8, pp=16, ep=64, dp=8, etp=1, stage_layers=(5, *(6,) * 14, 4))


def _wide(parallel: Parallel) -> Parallel:
    """Twice the data-parallel ranks."""
    return Parallel(
        tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, dp=2 * parallel.dp, etp=1, stage_layers=parallel.stage_layers
    )


_QWEN38_ENGINE = vllm(tp=4, dp=16, experts=linear(512, 64))
_K3_ENGINE = vllm(tp=8, dp=8, experts=linear(896, 64))

PRESETS: dict[str, Preset] = {
    "qwen3-235b-h100": Preset("qwen3-235b", _QWEN3, vllm(tp=8), 16, H100),
    "deepseek-v3-h100": Preset("deepseek-v3", _DEEPSEEK, vllm(tp=32), 8, H100),
    "deepseek-v3-gb200": Preset("deepseek-v3", _DEEPSEEK, vllm(tp=32), 8, GB200),
    "nemotron-ultra-v3-gb200": Preset("nemotron-ultra", _ULTRA, vllm(tp=8), 8, GB200),
    "qwen3.8-2.4t-gb200": Preset("qwen3.8-2.4t", _QWEN38, _QWEN38_ENGINE, 16, GB200),
    "kimi-k3-gb200": Preset("kimi-k3", _K3, _K3_ENGINE, 16, GB200),
    "qwen3.8-2.4t-gb200-2048": Preset("qwen3.8-2.4t", _wide(_QWEN38), _QWEN38_ENGINE, 32, GB200),
    "kimi-k3-gb200-2048": Preset("kimi-k3", _wide(_K3), _K3_ENGINE, 32, GB200),
    "qwen3-32b-h100": Preset("qwen3-32b", Parallel(tp=4, pp=4, dp=2), vllm(tp=4), 8, H100),
    "tiny": Preset("tiny-wide", Parallel(tp=2, pp=2, ep=2, dp=1, etp=1), vllm(tp=2), 2, Hosts(2, 2), vocab_multiple=32),
}
