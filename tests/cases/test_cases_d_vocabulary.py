"""Group D of the field cases: two paddings of a vocabulary, tied embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from case_values import filled, layouts_of, values_of

from refitd import reshard
from refitd.errors import LayoutError
from refitd.layout import Box, Layout, check_match, check_side, side_from_layouts
from refitd.layout.fronts.engine import Engine, engine, vllm
from refitd.layout.fronts.megatron import Options, Parallel, megatron
from refitd.layout.fronts.places import Hosts
from refitd.layout.models import Block, Catalogue, Row, build
from refitd.layout.tp import dense

HOSTS = Hosts(8, 8)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def vocabulary(rows: int, tied: bool = False, mtp: bool = False) -> Catalogue:
    ends = [Row("embed", EMBED, (rows, 1), "vocab", "float32")]
    if not tied:
        ends.append(Row("head", HEAD, (rows, 1), "vocab", "float32"))
    blocks = [
        Block("", (), ends),
        Block("model.layers.{}.", range(2), [Row("norm1", "n.weight", (3,), dtype="float32")]),
    ]
    if mtp:
        blocks.append(Block("mtp.", (), [Row("mtp_head", "lm_head.weight", (rows, 1), "vocab", "float32")], mtp=True))
    return build("vocabulary", 2, rows, blocks, tied={HEAD: EMBED} if tied else {})


def test_d1_two_paddings_of_one_vocabulary() -> None:
    """D1: 32008 rows, 32256 in the trainer and 32064 in the engine; padding (NaN) is never sent, 56 rows stay zero."""
    model = vocabulary(32008)
    sources = layouts_of(megatron(model, Parallel(tp=2), HOSTS))
    engines = layouts_of(engine(model, vllm(2), 1, HOSTS))
    name = "embedding.word_embeddings.weight"
    assert [layout.storages[name][0] for layout in sources.values()] == [16128, 16128]
    assert [layout.storages[EMBED][0] for layout in engines.values()] == [16032, 16032]
    values = values_of(sources.values())
    values[EMBED] = np.arange(1, 32009, dtype=np.float32).reshape(-1, 1)
    shards = [filled(layout, values) for layout in sources.values()]
    shards[1][name][15880:] = np.nan
    got = [shard[EMBED].numpy() for shard in reshard(list(sources.values()), list(engines.values()), shards)]
    first, second = (shard[name] for shard in shards)
    assert np.array_equal(got[0], first[:16032])
    assert np.array_equal(got[1], np.concatenate([first[16032:16128], second[:15880], np.zeros(56, np.float32)]))


def test_both_conventions_of_the_trainer_s_padding() -> None:
    """Qwen3's 151936 rows are 152576 with Megatron-LM at TP8, and unpadded with Megatron-Bridge, if TP divides."""
    model = vocabulary(151936)
    for multiple, rows in ((128, 152576), (0, 151936)):
        side = megatron(model, Parallel(tp=8), HOSTS, Options(vocab_multiple=multiple))
        assert side.layout("trainer/run/0").storages["embedding.word_embeddings.weight"] == (rows // 8, "float32")
    with pytest.raises(LayoutError) as caught:
        megatron(vocabulary(151937), Parallel(tp=8), HOSTS, Options(vocab_multiple=0))
    assert str(caught.value) == (
        "tensor model.embed_tokens.weight: expected a padded vocabulary of at least 151937 rows "
        "that 8 ranks divide, got 151937"
    )


def test_ranks_of_padding_alone_hold_nothing() -> None:
    """With 3 rows padded to 64 over 8 ranks, seven ranks know the embedding and hold no row of it."""
    shape = Engine(8, 8, 8, 8, 8, 8)
    side = layouts_of(engine(vocabulary(3), shape, 1, HOSTS))
    assert [len([p for p in layout.pieces() if p.tensor == EMBED]) for layout in side.values()] == [1] + [0] * 7
    assert all(layout.storages[EMBED] == (8, "float32") and EMBED in layout.tensors for layout in side.values())
    check_side(side)


@pytest.mark.parametrize("pp", [1, 2])
def test_d4_a_tied_head_is_one_write_and_the_untied_one_is_delivered(pp: int) -> None:
    """D4: the engine has one storage for embedding and head; the MTP head arrives by itself; nothing is missing."""
    model = vocabulary(8, tied=True, mtp=True)
    sources = layouts_of(megatron(model, Parallel(tp=1, pp=pp), HOSTS, Options(vocab_multiple=0)))
    target = layouts_of(engine(model, vllm(1), 1, HOSTS))
    draft = layouts_of(engine(model, vllm(1), 1, HOSTS, part="draft"))
    (layout,) = target.values()
    assert (dict(layout.tied), HEAD in layout.storages) == ({HEAD: EMBED}, False)
    check_match(sources, target)
    check_match(sources, draft)
    values = values_of(sources.values())
    shards = [filled(part, values) for part in sources.values()]
    assert reshard(list(sources.values()), [layout], shards)[0][EMBED][:8].tolist() == values[EMBED].ravel().tolist()
    (second,) = reshard(list(sources.values()), list(draft.values()), shards)
    assert second["mtp.lm_head.weight"][:8].tolist() == values["mtp.lm_head.weight"].ravel().tolist()


def test_d4_a_tied_source_fills_an_untied_engine() -> None:
    """D4: with tie off the engine's own head is filled from the trainer's tied embedding."""
    sources = layouts_of(megatron(vocabulary(8, tied=True), Parallel(), HOSTS, Options(vocab_multiple=0)))
    untied = Layout.from_pieces(
        {HEAD: ((8, 1), "float32")}, {HEAD: (8, "float32")}, [dense(HEAD, Box((0, 0), (8, 1)), HEAD)]
    )
    check_match(sources, {"engine/r0/0": untied})
    values = values_of(sources.values())
    (got,) = reshard(list(sources.values()), [untied], [filled(s, values) for s in sources.values()])
    assert got[HEAD].tolist() == values[EMBED].ravel().tolist()


def test_an_alias_with_two_meanings_is_refused_with_both() -> None:
    """Two ranks that tie one name to different tensors are a LayoutError naming alias, ranks and both tensors."""
    facts = {"a": ((1,), "float32"), "b": ((1,), "float32")}
    layouts = {
        f"trainer/x/{i}": Layout.from_pieces(facts, {}, [], tied={"head": name}) for i, name in enumerate(("a", "b"))
    }
    with pytest.raises(LayoutError, match="tied head: expected a as trainer/x/0 says, got b from trainer/x/1"):
        side_from_layouts(layouts, dict.fromkeys(layouts, ("n", "d")))
