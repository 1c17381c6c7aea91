"""How the demo cuts the model, and the oracle that judges refits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import refitd
from refitd.demo import shards, text, weights
from refitd.demo.ledger import Ledger, Oracle
from refitd.demo.model import Training
from refitd.layout import check_match, check_side

SPEC = weights.Spec(vocab=121, positions=32, hidden=8, intermediate=16, layers=1, heads=2)
QKV = "encoder.layer.0.attention.self.qkv.weight"


def test_engine_storages_hold_the_slices_that_tensor_parallelism_needs() -> None:
    """q, k, v rows lie below each other, row-parallel weights are cut in columns, the vocabulary unevenly in rows."""
    full = weights.make(SPEC)
    first, second = (shards.expected_storages(full, SPEC, rank) for rank in (0, 1))
    layer = "encoder.layer.0"
    query, key, value = (full[f"{layer}.attention.self.{part}.weight"] for part in ("query", "key", "value"))
    assert torch.equal(second[QKV], torch.cat([query[4:], key[4:], value[4:]]).bfloat16().flatten())
    down = full[f"{layer}.output.dense.weight"]
    assert torch.equal(first[f"{layer}.output.dense.weight"], down[:, :8].bfloat16().flatten())
    out = full[f"{layer}.attention.output.dense.weight"]
    assert torch.equal(second[f"{layer}.attention.output.dense.weight"], out[:, 4:].bfloat16().flatten())
    assert first["embeddings.word_embeddings.weight"].shape == (61 * 8,)
    assert second["embeddings.word_embeddings.weight"].shape == (60 * 8,)
    bias = f"{layer}.output.dense.bias"
    assert torch.equal(first[bias], second[bias])
    assert first["embeddings.position_ids"].tolist() == list(range(32))


def test_gathered_storages_are_the_full_weights() -> None:
    """Both ranks together hold every element of the model."""
    full = weights.make(SPEC)
    held = {rank: shards.expected_storages(full, SPEC, rank) for rank in (0, 1)}
    gathered = shards.gather(held, SPEC)
    assert all(torch.equal(gathered[name], full[name].to(shards.engine_dtype(name))) for name in full)


def test_both_sides_describe_the_same_model() -> None:
    """refitd finds nothing wrong with the layouts, and its reference reshard agrees with the oracle's slicing."""
    full = weights.make(SPEC)
    sources = [refitd.Layout.from_tensors(full)]
    destinations = [shards.engine_layout(SPEC, rank) for rank in (0, 1)]
    check_side({f"engine/r0/{rank}": layout for rank, layout in enumerate(destinations)})
    check_match({"trainer/run/0": sources[0]}, {f"engine/r0/{r}": layout for r, layout in enumerate(destinations)})
    moved = refitd.reshard(sources, destinations, [{name: w.flatten() for name, w in full.items()}])
    for rank, storages in enumerate(moved):
        expected = shards.expected_storages(full, SPEC, rank)
        assert all(torch.equal(torch.as_tensor(storages[n]).flatten(), expected[n]) for n in expected)


@pytest.fixture
def oracle() -> Oracle:
    ids, mask = text.encode(text.SENTENCES, None, SPEC.vocab)
    return Oracle(SPEC, Training(weights.make(SPEC), SPEC, ids), ids, mask)


def dump(storages: dict[str, torch.Tensor], path: Path) -> Path:
    path.write_bytes(b"".join(bytes(shards.raw(storages[name])) for name in sorted(storages)))
    return path


def test_equal_dumps_pass_and_one_wrong_bit_is_named(oracle: Oracle, tmp_path: Path) -> None:
    """The comparison names the storage that differs, and notices that the embedding does."""
    oracle.advance(1)
    held = [shards.expected_storages(oracle.training.weights, SPEC, rank) for rank in (0, 1)]
    paths = {rank: dump(held[rank], tmp_path / str(rank)) for rank in (0, 1)}
    assert oracle.compare(paths) == []
    held[1][QKV].view(torch.int16)[5] ^= 1 << 9
    dump(held[1], paths[1])
    assert oracle.compare(paths) == [f"rank 1: {QKV} differs", "a sentence embedding differs"]


def test_digests_differ_by_step_and_rank(oracle: Oracle) -> None:
    """Each step gives each rank weights of its own."""
    oracle.advance(1)
    oracle.advance(2)
    assert len({d for ranks in oracle.digests.values() for d in ranks}) == 4


def test_the_ledger_counts_only_what_must_not_be_seen() -> None:
    """Right weights at one step are fine; wrong bytes, a wrong label and two steps at once are torn."""
    ledger = Ledger({1: ["a1", "b1"], 2: ["a2", "b2"]})
    ledger.served("r0", 0, 1, "a1")
    ledger.served("r0", 1, 1, "b1")
    ledger.hold("r0")
    ledger.served("r0", 1, 2, "b2")
    assert ledger.torn == []
    ledger.served("r0", 0, 1, "a1")
    assert ledger.torn == ["r0 served steps [1, 2] at once"]
    ledger.hold("r0")
    ledger.served("r0", 0, 2, "zz")
    ledger.served("r0", 1, 2, "b1")
    assert ledger.torn[1:] == [
        "r0/0 has as step 2 weights that are those of no step",
        "r0/1 has as step 2 weights that are those of step 1",
    ]
