"""NeMo RL's tests of names, meshes and whole models, and the configurations that its checks turn down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch

from refitd import Layout, LayoutError, MismatchError, reshard
from refitd.layout import Box, Side
from refitd.layout.fronts.engine import Engine, engine, sglang, vllm
from refitd.layout.fronts.expert_maps import linear, physical, round_robin
from refitd.layout.fronts.megatron import Options, Parallel, megatron
from refitd.layout.fronts.places import Hosts
from refitd.layout.models import Block, Catalogue, Heads, Row, build
from refitd.layout.models.quant import check_blocks, quantised
from refitd.plan import plan_sides, topology
from refitd.plan.program import Program

HOSTS = Hosts(8, 8)
LAYER = "model.layers.0."


def model(
    experts: int = 8, layers: int = 4, hidden: int = 32, inner: int = 64, dense: bool = True, gated: bool = True,
    dtype: str = "int32",
) -> Catalogue:  # fmt: skip
    """A decoder with attention, norms, dense and routed feed-forward blocks, embedding and head."""
    rows = [
        Row("norm1", "input_layernorm.weight", (hidden,), dtype=dtype),
        Row("q", "self_attn.q_proj.weight", (hidden, hidden), "rows", dtype),
        Row("k", "self_attn.k_proj.weight", (16, hidden), "kv", dtype),
        Row("v", "self_attn.v_proj.weight", (16, hidden), "kv", dtype),
        Row("o", "self_attn.o_proj.weight", (hidden, hidden), "columns", dtype),
    ]
    if dense:
        rows += _block("", "mlp.", hidden, inner, 0, dtype, True)
    if experts:
        rows.append(Row("router", "mlp.gate.weight", (experts, hidden), dtype=dtype))
        rows += _block("expert_", "mlp.experts.{}.", hidden, inner, experts, dtype, gated)
    ends = [Row("embed", "model.embed_tokens.weight", (60, hidden), "vocab", dtype),
            Row("head", "lm_head.weight", (60, hidden), "vocab", dtype)]  # fmt: skip
    blocks = [Block("", (), ends), Block("model.layers.{}.", range(layers), rows)]
    return build("small", layers, 60, blocks, Heads(8, 4, hidden // 8, 4), experts)


def _block(role: str, name: str, hidden: int, inner: int, experts: int, dtype: str, gated: bool) -> list[Row]:
    parts = [("gate", "rows"), ("up", "rows")] if gated else [("up", "rows")]
    rows = [Row(role + p, f"{name}{p}_proj.weight", (inner, hidden), cut, dtype, experts=experts) for p, cut in parts]
    return [*rows, Row(f"{role}down", f"{name}down_proj.weight", (hidden, inner), "columns", dtype, experts=experts)]


def wholes(layouts: Iterable[Layout]) -> dict[str, torch.Tensor]:
    """Every tensor of the model; every element of the model has a number of its own."""
    facts = {name: fact for layout in layouts for name, fact in layout.tensors.items()}
    at, result = 1, {}
    for name, (shape, dtype) in sorted(facts.items()):
        count = int(np.prod(shape))
        result[name] = torch.arange(at, at + count, dtype=torch.int64).reshape(shape).to(getattr(torch, dtype))
        at += count
    return result


def filled(layout: Layout, whole: Mapping[str, torch.Tensor], background: int) -> dict[str, torch.Tensor]:
    """The storages of a rank; elements of no piece are ``background``."""
    made = {n: torch.full((c,), background, dtype=getattr(torch, d)) for n, (c, d) in layout.storages.items()}
    for piece in layout.pieces():
        inside = whole[piece.tensor][tuple(slice(a, b) for a, b in zip(*piece.box, strict=True))]
        made[piece.storage].as_strided(piece.box.shape, piece.strides, piece.offset).copy_(inside)
    return made


def delivered(source: Side, target: Side) -> list[dict[str, torch.Tensor]]:
    """Move a model and compare every storage of every destination; padding of the source must not arrive."""
    src = [source.layout(key) for key in source.ranks]
    dst = [target.layout(key) for key in target.ranks]
    whole = wholes(src)
    got = reshard(src, dst, [filled(layout, whole, -1) for layout in src])
    for layout, shard in zip(dst, got, strict=True):
        expected = filled(layout, whole, 0)
        assert {n: t.tolist() for n, t in shard.items()} == {n: t.tolist() for n, t in expected.items()}
    plan = plan_sides(source, target, topology("h100-nvl8"))
    assert plan.totals["network_bytes"] == plan.totals["network_bytes_min"]
    return got


@pytest.mark.parametrize(
    ("parallel", "shape", "replicas"),
    [
        pytest.param(Parallel(dp=8, ep=8), vllm(8), 1, id="DP8 to TP8"),
        pytest.param(Parallel(dp=8, ep=8, pp=2), vllm(8), 2, id="EP8 PP2 to TP8 DP2"),
        pytest.param(Parallel(dp=16, ep=8), vllm(2), 8, id="EP8 DP2 to TP2 DP8"),
        pytest.param(Parallel(tp=2, dp=4, ep=4, etp=1), vllm(4), 4, id="EP4 TP2 DP2 to TP4 DP4"),
        pytest.param(Parallel(tp=2, dp=2, ep=4, etp=1, pp=2), vllm(4), 4, id="EP4 TP2 PP2 to TP4 DP4"),
        pytest.param(Parallel(dp=8, ep=8, pp=2), vllm(2), 8, id="EP8 PP2 to TP2 DP8"),
        pytest.param(Parallel(tp=2, cp=2, dp=2, ep=8, etp=1), vllm(4), 4, id="TP2 CP2 EP8 to TP4 DP4"),
        pytest.param(Parallel(), vllm(1), 1, id="TP1 to TP1"),
    ],
)
def test_published_configurations(parallel: Parallel, shape: Engine, replicas: int) -> None:
    """The layouts of its published figures with every tensor resharded: the rival reshards feed-forward weights only
    and gathers and broadcasts attention, embeddings, norms and routers."""
    delivered(megatron(model(), parallel, HOSTS), engine(model(), shape, replicas, HOSTS))


@pytest.mark.parametrize(
    ("parallel", "shape"),
    [
        pytest.param(Parallel(tp=2, ep=2, etp=2, dp=2), vllm(4), id="expert TP 2"),
        pytest.param(Parallel(tp=4, ep=2, etp=2), vllm(2), id="expert TP 2 under TP 4"),
        pytest.param(Parallel(pp=2, vpp=2), vllm(2), id="VPP 2"),
        pytest.param(Parallel(tp=2, pp=2, vpp=2, dp=2, ep=2, etp=1), vllm(2, pp=2), id="VPP 2, TP 2, EP 2"),
        pytest.param(Parallel(pp=2, stage_layers=(1, 3)), vllm(2), id="custom pipeline layout"),
        pytest.param(Parallel(pp=3, stage_layers=(1, 2, 1)), vllm(2), id="embedding and loss count as layers"),
        pytest.param(Parallel(pp=4), vllm(2, pp=2), id="generation PP 2"),
        pytest.param(Parallel(tp=2), vllm(1, pp=3, stage_layers=(2, 1, 1)), id="generation PP 3, uneven"),
        pytest.param(Parallel(ep=2, dp=2), sglang(4, ep=2, experts=linear(8, 2)), id="generation EP neither 1 nor TP"),
        pytest.param(Parallel(ep=4, dp=4), vllm(2, dp=2, experts=round_robin(8, 4)), id="generation EP over DP"),
        pytest.param(Parallel(), vllm(2, experts=physical([0, 1, 2, 3, 4, 4, 5, 6, 7, 0], 2)), id="EPLB"),
        pytest.param(Parallel(tp=2), sglang(4), id="SGLang"),
        pytest.param(Parallel(tp=2), sglang(4, dp=2, transposed=True), id="SGLang, DP attention, transposed"),
    ],
)
def test_configurations_that_the_rival_turns_down(parallel: Parallel, shape: Engine) -> None:
    """Its check refuses expert TP above 1, VPP, pipeline layouts of one's own, generation PP, expert load balancing,
    generation EP other than 1 or TP, and SGLang; right is the model on every rank."""
    delivered(megatron(model(), parallel, HOSTS), engine(model(), shape, 1, HOSTS))


def test_interleaved_experts_and_a_vocabulary_of_two_paddings() -> None:
    """Gate and up in blocks of 8, a vocabulary of 60 padded to 256 and to 64: no padding of the trainer goes out."""
    options = Options(vocab_multiple=128, glu_interleave=8)
    source = megatron(model(), Parallel(tp=2, ep=2, dp=1, etp=1), HOSTS, options)
    delivered(source, engine(model(), vllm(4), 1, HOSTS))


@pytest.mark.parametrize(
    ("sizes", "grid", "outer", "inner"),
    [
        pytest.param(Parallel(tp=4, dp=2), (2, 4), "dp", "tp", id="8 of TP4: dp0 tp1"),
        pytest.param(Parallel(ep=4, dp=8), (2, 4), "edp", "ep", id="8 of EP4: dp0 ep1"),
        pytest.param(Parallel(tp=2, dp=4, ep=4, etp=2), (4, 2), "ep", "etp", id="8 of TP2 EP4: ep0 tp1"),
        pytest.param(Parallel(pp=2, dp=2), (2, 2), "pp", "dp", id="4 of PP2: pp0 dp1"),
        pytest.param(Parallel(dp=4), (1, 4), "pp", "dp", id="4 of DP4"),
        pytest.param(Parallel(tp=8), (1, 8), "pp", "tp", id="8 of TP8"),
        pytest.param(Parallel(), (1, 1), "pp", "tp", id="1 of 1"),
    ],
)
def test_mesh_of_ranks(sizes: Parallel, grid: tuple[int, int], outer: str, inner: str) -> None:
    """The rows of the rival's mesh builder: ranks row-major, tensor parallelism innermost."""
    expert = {outer, inner} & {"ep", "edp", "etp"}

    def rank(a: int, b: int) -> int:
        at = {outer: a, inner: b}
        return sizes.expert_rank(**{"etp": 0, "ep": 0, **at}) if expert else sizes.dense_rank(**{"tp": 0, **at})

    found = [[rank(a, b) for b in range(grid[1])] for a in range(grid[0])]
    assert found == np.arange(grid[0] * grid[1]).reshape(grid).tolist()
    assert sizes.world == grid[0] * grid[1]


def test_sizes_that_do_not_fit_are_told() -> None:
    """8 ranks of TP 3 end in a bare assertion there; right is an error that names the sizes."""
    with pytest.raises(
        LayoutError, match=r"parallel sizes: expected experts that divide the 3 ranks of a stage, got ETP 1"
    ):
        megatron(model(), Parallel(tp=3, ep=2, etp=1), HOSTS)
    with pytest.raises(LayoutError, match="linear_qkv: expected rows that 3 ranks divide, got 64"):
        megatron(model(experts=0), Parallel(tp=3), HOSTS)


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("mlp.gate_proj.weight", Box((16, 0), (32, 32))),
        ("mlp.up_proj.weight", Box((16, 0), (32, 32))),
        ("mlp.down_proj.weight", Box((0, 16), (32, 32))),
        ("mlp.experts.5.gate_proj.weight", Box((16, 0), (32, 32))),
        ("mlp.experts.5.down_proj.weight", Box((0, 16), (32, 32))),
        ("self_attn.q_proj.weight", Box((8, 0), (16, 32))),
        ("self_attn.k_proj.weight", Box((4, 0), (8, 32))),
        ("mlp.gate.weight", Box((0, 0), (8, 32))),
        ("input_layernorm.weight", Box((0,), (32,))),
    ],
)
def test_placements(name: str, box: Box) -> None:
    """Rank 1 of TP 4: gate and up by rows, down by columns, norms and router whole; q, k and v are cut here as well,
    where the rival has them replicated and broadcasts them."""
    layout = engine(model(), vllm(4), 1, HOSTS).layout("engine/r0/1")
    (found,) = [piece.box for piece in layout.pieces() if piece.tensor == LAYER + name]
    assert found == box


def test_every_name_is_moved() -> None:
    """Names that the rival leaves to its slow path (attention, norms, router, embedding, head) are all in the plan."""
    target = engine(model(), vllm(2), 1, HOSTS)
    moved = {piece.tensor for key in target.ranks for piece in target.layout(key).pieces()}
    assert moved == set(model().names)


def test_mapping_of_feed_forward_blocks() -> None:
    """TP 4 of 256 x 32 and of two experts: gate in rows 0:64 and up in 64:128 of gate_up and of w13, down direct."""
    catalogue = model(experts=2, layers=1, inner=256)
    layout = engine(catalogue, vllm(4), 1, HOSTS).layout("engine/r0/2")
    at = {p.tensor.removeprefix(f"{LAYER}mlp."): (p.storage.removeprefix(f"{LAYER}mlp."), p.offset, p.strides, p.box)
          for p in layout.pieces()}  # fmt: skip
    rows, columns = Box((128, 0), (192, 32)), Box((0, 128), (32, 192))
    assert at["gate_proj.weight"] == ("gate_up_proj.weight", 0, (32, 1), rows)
    assert at["up_proj.weight"] == ("gate_up_proj.weight", 64 * 32, (32, 1), rows)
    assert at["down_proj.weight"] == ("down_proj.weight", 0, (64, 1), columns)
    for e in range(2):
        w13, w2 = "experts.routed_experts.w13_weight", "experts.routed_experts.w2_weight"
        assert at[f"experts.{e}.gate_proj.weight"] == (w13, e * 128 * 32, (32, 1), rows)
        assert at[f"experts.{e}.up_proj.weight"] == (w13, e * 128 * 32 + 64 * 32, (32, 1), rows)
        assert at[f"experts.{e}.down_proj.weight"] == (w2, e * 32 * 64, (64, 1), columns)
    delivered(megatron(catalogue, Parallel(ep=2, dp=2), HOSTS), engine(catalogue, vllm(4), 1, HOSTS))


def test_experts_without_gate() -> None:
    """No gate_proj: up is all of w13 and down all of w2, expert after expert."""
    catalogue = model(experts=2, layers=1, gated=False, dense=False)
    layout = engine(catalogue, vllm(1), 1, HOSTS).layout("engine/r0/0")
    assert layout.storages[f"{LAYER}mlp.experts.routed_experts.w13_weight"] == (2 * 64 * 32, "int32")
    offsets = [p.offset for p in layout.pieces() if "up_proj" in p.tensor]
    assert offsets == [0, 64 * 32]
    delivered(megatron(catalogue, Parallel(ep=2, dp=2), HOSTS), engine(catalogue, vllm(2), 1, HOSTS))


def test_grouped_experts_of_table() -> None:
    """Two experts of 1536 x 4096: w13 is [2, 3072, 4096] and w2 [2, 4096, 1536], in order of the expert's number."""
    catalogue = model(experts=2, layers=1, hidden=4096, inner=1536, dense=False)
    layout = engine(catalogue, vllm(1), 1, HOSTS).layout("engine/r0/0")
    experts = f"{LAYER}mlp.experts."
    assert layout.storages[f"{experts}routed_experts.w13_weight"][0] == 2 * 3072 * 4096
    assert layout.storages[f"{experts}routed_experts.w2_weight"][0] == 2 * 4096 * 1536
    at = {p.tensor.removeprefix(experts): p.offset for p in layout.pieces() if p.tensor.startswith(experts)}
    assert [at[f"{e}.down_proj.weight"] for e in (0, 1)] == [0, 4096 * 1536]


def test_dense_model_of_table() -> None:
    """Inner size 64, hidden 32, TP 2 to TP 4, and the same over two pipeline stages."""
    for parallel in (Parallel(tp=2), Parallel(tp=2, pp=2)):
        catalogue = model(experts=0, layers=2)
        delivered(megatron(catalogue, parallel, HOSTS), engine(catalogue, vllm(4), 1, HOSTS))


def test_an_unmapped_name_is_refused() -> None:
    """A module that the trainer does not have: the rival raises without saying who needs it, ours names the rank."""
    target = Layout.from_tensors({"some_unknown_module.weight": torch.zeros(4)})
    source = Layout.from_tensors({"w": torch.ones(4)})
    with pytest.raises(MismatchError) as caught:
        reshard([source], [target], [{"w": torch.ones(4)}])
    field = "tensor some_unknown_module.weight"
    assert str(caught.value) == f"{field}: expected a source that has it, got none; engine/reshard/0 needs it"


def test_blockwise_fp8_goes_straight_through() -> None:
    """fp8 weights of 512 x 512 and their block scales, TP 2 to TP 4: bytes of both, where the rival sends the scales by
    another path than the weights; and a cut inside a block is refused."""
    rows = [Row("o", "o.weight", (512, 512), "columns"), Row("up", "up.weight", (512, 512), "rows")]
    catalogue = quantised(build("small", 1, 0, [Block("model.layers.{}.", range(1), rows)]), ["o", "up"])
    source, target = megatron(catalogue, Parallel(tp=2), HOSTS), engine(catalogue, vllm(4), 1, HOSTS)
    check_blocks(target)
    src, dst = ([side.layout(key) for key in side.ranks] for side in (source, target))
    generator = torch.Generator().manual_seed(3)
    whole = {}
    for name, (shape, dtype) in src[0].tensors.items():
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * (1 if "float8" in dtype else 4)), generator=generator)
        whole[name] = raw.to(torch.uint8).view(getattr(torch, dtype))
    got = reshard(src, dst, [filled(layout, whole, 0) for layout in src])
    for layout, shard in zip(dst, got, strict=True):
        for name, expected in filled(layout, whole, 0).items():
            assert torch.equal(shard[name].view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(LayoutError, match=r"shard edges of dimension \d at multiples of 128, the block of its scale"):
        check_blocks(_eighths(catalogue))


def _eighths(catalogue: Catalogue) -> Side:
    """The weights over eight ranks, and their scales whole."""
    rows = [kind.row._replace(cut="full", scale=None) if kind.row.scale else kind.row for kind in catalogue.kinds]
    return megatron(build("small", 1, 0, [Block("model.layers.{}.", range(1), rows)]), Parallel(tp=8), HOSTS)


def test_wire_dtype_that_differs_is_cast_or_refused() -> None:
    """The rival refuses fp32 on the wire into bf16 storage; right is torch's rounding, while bf16 into fp8 is refused
    (nothing is quantised on the way)."""
    layouts = {}
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        catalogue = model(experts=2, layers=1, dtype=dtype)
        layouts[dtype] = megatron(catalogue, Parallel(tp=2), HOSTS), engine(catalogue, vllm(4), 1, HOSTS)
    source, target = layouts["float32"][0], layouts["bfloat16"][1]
    src, dst = [source.layout(k) for k in source.ranks], [target.layout(k) for k in target.ranks]
    whole = {name: tensor / 3 for name, tensor in wholes(src).items()}
    got = reshard(src, dst, [filled(layout, whole, -1) for layout in src])
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in whole.items()}
    for layout, shard in zip(dst, got, strict=True):
        assert all(
            torch.equal(shard[n].view(torch.int16), t.view(torch.int16)) for n, t in filled(layout, rounded, 0).items()
        )
    with pytest.raises(
        MismatchError, match=r"expected a dtype that bfloat16 of trainer/run/0 may be cast to, got float8_e4m3fn"
    ):
        plan_sides(layouts["bfloat16"][0], layouts["float8_e4m3fn"][1], topology("h100-nvl8"))


def test_what_travels_between_processes_has_no_code() -> None:
    """The rival turns meshes and placements into dictionaries because a patched unpickler broke them; layouts and
    programs here are bytes without pickle, equal after the journey."""
    source, target = megatron(model(), Parallel(tp=2), HOSTS), engine(model(), vllm(4), 1, HOSTS)
    layout = target.layout("engine/r0/3")
    assert Layout.from_bytes(layout.to_bytes()) == layout
    program = plan_sides(source, target, topology("h100-nvl8")).program("engine/r0/3")
    again = Program.from_bytes(program.to_bytes())
    assert (again.rank, again.plan_digest, again.buckets) == (program.rank, program.plan_digest, program.buckets)
    assert again.moves.tolist() == program.moves.tolist()
    assert list(again.storages) == list(program.storages)
    assert b"torch" not in program.to_bytes() + layout.to_bytes()
