"""Layouts over several cards, NVLink's counters by a fake NVML, and the cells that a command line means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refitd.bench.arguments import parse
from refitd.bench.cards import card, layouts, measure, nvlink, rivals
from refitd.bench.cards.contest import crossing
from refitd.bench.cards.layouts import SCENES, Scene
from refitd.bench.models import exact, fill
from refitd.layout import check_match, check_side
from refitd.plan.planner import make_plan
from refitd.plan.tables import Rank

SMALL = 1 << 16


def by_name(name: str) -> Scene:
    """One of the scenes."""
    return next(scene for scene in SCENES if scene.name == name)


def ranks(scene: Scene, model: layouts.Model, seats: tuple[layouts.Seat, ...]) -> list[Rank]:
    """For the planner, each simulated node a domain."""
    return [
        Rank(seat.key, f"n{scene.node(seat)}", f"n{scene.node(seat)}", layouts.layout(layouts.held(scene, model, seat)))
        for seat in seats
    ]


@pytest.mark.parametrize("row_bytes", [128, 512, layouts.CONTIGUOUS])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_both_sides_of_every_layout_fit(scene: Scene, row_bytes: int) -> None:
    """Each side holds every element, the engines need what the trainers have, and rows are as long as asked for."""
    model = layouts.model(scene, SMALL if row_bytes < layouts.CONTIGUOUS else 1 << 20, row_bytes)
    sides = [
        {seat.key: layouts.layout(layouts.held(scene, model, seat)) for seat in seats}
        for seats in (scene.trainers, *_replicas(scene))
    ]
    for side in sides:
        check_side(side)
        check_match(sides[0], side)
    part = layouts.held(scene, model, scene.engines[0])[0]
    assert part.shard.shape[1] * 2 == row_bytes
    trainer = layouts.held(scene, model, scene.trainers[0])
    assert sum(layouts.sizes(trainer).values()) * 2 * len(scene.trainers) in (
        model.nbytes,
        model.nbytes * len(scene.trainers),
    )


def _replicas(scene: Scene) -> list[tuple[layouts.Seat, ...]]:
    return [tuple(seat for seat in scene.engines if seat.group == name) for name in scene.replicas]


@pytest.mark.parametrize("name", ["one_to_one", "rows_to_cols", "tp2_to_tp2", "tp2_to_2xtp1", "ep4_to_tp2xdp2"])
def test_the_least_between_nodes_is_the_planner_s(name: str) -> None:
    """Counted from the geometry alone; a second replica of a node adds nothing."""
    scene = by_name(name)
    model = layouts.model(scene, SMALL, 512)
    first = ranks(scene, model, _replicas(scene)[0])
    plan = make_plan(ranks(scene, model, scene.trainers), first)
    assert layouts.network_bytes_min(scene, model) == plan.totals["network_bytes_min"]
    assert plan.totals["network_bytes_min"] == (model.nbytes // 2 if name == "rows_to_cols" else model.nbytes)


def test_shards_of_a_fused_storage_hold_values_of_their_own() -> None:
    """Two tensors side by side: neither writes over the other, and a wrong value is seen."""
    scene = by_name("one_to_one")
    model = layouts.model(scene, SMALL, 128)
    parts = layouts.held(scene, model, scene.trainers[0])
    assert (model.fused, len(parts)) == (2, 2)
    storage = torch.zeros(layouts.sizes(parts)["w0"], dtype=torch.bfloat16)
    for part in parts:
        fill(part.shard, 3, part.view(storage))
    assert [exact(part.shard, 3, part.view(storage)) for part in parts] == [True, True]
    assert not exact(parts[0].shard, 4, parts[0].view(storage))
    storage.view(torch.int16)[5] ^= 1
    assert [exact(part.shard, 3, part.view(storage)) for part in parts] == [False, True]


class FakeNvml:  # names are NVML's
    """Counts 7 KiB more with every look; ``fails``: what a field's look returns."""

    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.looks = fails, 0

    def nvmlInit(self) -> None:  # noqa: N802
        """There is one."""

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:  # noqa: N802
        return f"card{number}"

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return f"H of {handle}"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "1.2"

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[Any]:  # noqa: N802
        assert handle in ("card2", "card3")
        assert [scope for _field, scope in fields] == [0xFFFFFFFF] * 2
        self.looks += 1
        return [
            SimpleNamespace(fieldId=field, nvmlReturn=self.fails, value=SimpleNamespace(ullVal=self.looks * 7))
            for field, _scope in fields
        ]


def test_nvlink_is_counted_on_the_cards_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, from begin to end, by card; NVML numbers all cards of the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    links = nvlink.Links(2, FakeNvml())
    links.begin()
    links.end()
    assert (links.between, links.why) == ([(14 * 1024, 14 * 1024)] * 2, "")
    assert links.facts() == {"cards": ["H of card2", "H of card3"], "driver": "1.2"}
    assert nvlink.count() == 2


def test_a_card_without_counters_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark goes on without them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    links = nvlink.Links(2, FakeNvml(fails=3))
    links.begin()
    links.end()
    assert (links.between, links.why) == ([], "OSError: NVML field 138: error 3")


def test_bytes_inside_a_card_cross_no_link() -> None:
    """What one card's trainer gives its own engine is nobody's traffic."""
    scene = by_name("rows_to_cols")
    edges = {
        ("trainer/run/0", "engine/r0/0", "peer"): 5, ("trainer/run/0", "engine/r0/1", "peer"): 7,
        ("trainer/run/1", "engine/r0/0", "peer"): 11,
    }  # fmt: skip
    assert crossing(scene, edges) == ([7, 11], [11, 7])
    assert rivals.pairs_of(scene, edges) == {(0, 1): 7, (1, 0): 11}


def test_layouts_go_by_the_number_of_cards() -> None:
    """The largest that there are enough cards for; sizes, widths and names as the command line says."""
    words = ["refit", "--device", "cuda", "--gpus", "2", "--size", "1GiB", "64GB", "--width", "512", "--repeats", "3"]
    found = measure.cells(2, parse([*words, "--transport", "nccl"]))
    assert [cell.name for cell in found] == [
        "one_to_one_nccl_1GiB_512", "one_to_one_nccl_64GB_512", "rows_to_cols_nccl_1GiB_512",
        "rows_to_cols_nccl_64GB_512",
    ]  # fmt: skip
    assert [cell.bucket_bytes() >> 20 for cell in found[:2]] == [64, 1024]
    assert [scene.name for scene in layouts.scenes(7)] == ["tp2_to_tp2", "tp2_to_2xtp1"]
    model = found[1].model()
    assert 63.9e9 < model.nbytes <= 64e9
    assert model.rows * model.cols * 2 * model.fused <= 1 << 30


def test_a_layout_of_other_cards_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with those that there are."""
    words = ["refit", "--device", "cuda", "--gpus", "2", "--layout", "tp2_to_tp2", "--json"]
    assert measure.run(parse(words)) == 1
    assert '"reason": "--layout: 2 cards have one_to_one, rows_to_cols"' in capsys.readouterr().out


def test_cards_of_a_layout_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of a layout for eight on two cards: the trainers' domain is one of them, the engines' the other."""
    monkeypatch.setenv(card.PER_CARD, "1")
    assert [card.real(number) for number in range(3)] == [0, 1, 2]
    card.share(4)
    assert [card.real(number) for number in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--per-card", "0"], "--per-card: at least 1"), (["--per-card", "4"], "--per-card: with --rivals none")],
)
def test_cards_that_are_one_have_no_rivals(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Baselines need a card for each rank."""
    with pytest.raises(SystemExit) as ended:
        parse(["refit", "--device", "cuda", "--gpus", "8", *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
