"""Which faults come, and in what order: a seed says it all."""

from __future__ import annotations

from itertools import chain

import pytest

from refitd.demo.chaos.schedule import KINDS, OLD_WAKE, Strike, touched, waves


def strikes(seed: int, count: int, only: str = "") -> list[Strike]:
    return list(chain.from_iterable(wave.strikes for wave in waves(seed, count, only)))


def test_a_seed_replays_the_same_faults_in_the_same_order() -> None:
    """The same seed gives the same waves, a longer run begins like a shorter one, another seed does not."""
    assert list(waves(7, 40)) == list(waves(7, 40))
    assert strikes(7, 100)[:40] == strikes(7, 40)
    assert strikes(8, 40) != strikes(7, 40)


def test_a_count_is_kept_and_every_kind_comes_before_any_comes_again() -> None:
    """N counts faults, whatever waves they come in."""
    drawn = strikes(3, 2 * len(KINDS))
    assert len(drawn) == 2 * len(KINDS)
    names = [strike.kind for strike in drawn]
    assert sorted(names[: len(KINDS)]) == sorted(names[len(KINDS) :]) == sorted(kind.name for kind in KINDS)


def test_faults_of_one_wave_hit_different_places() -> None:
    """Two faults of one place would hide each other, and bring one process back twice."""
    pairs = [wave.strikes for wave in waves(5, 600) if len(wave.strikes) == 2]
    assert len(pairs) > 60
    assert all(not touched(one) & touched(other) for one, other in pairs)


def test_only_chooses_kinds_by_name() -> None:
    """A part of the name is enough; one that no kind has is refused, with the names there are."""
    assert {strike.kind for strike in strikes(1, 12, "etcd quorum")} == {"etcd quorum lost"}
    with pytest.raises(ValueError, match="no kind of fault is called 'fire': kill trainer, "):
        next(waves(1, 1, "fire"))


def test_there_is_no_silence_where_a_new_run_must_publish() -> None:
    """Old trainers wake only after the new run has published, which silence would forbid."""
    drawn = [(wave.quiet, {strike.kind for strike in wave.strikes}) for wave in waves(21, 300)]
    assert not any(quiet and OLD_WAKE in kinds for quiet, kinds in drawn)
    assert any(quiet for quiet, _kinds in drawn)
