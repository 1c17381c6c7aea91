"""The benchmark: its command line, its rows, its layouts, and a short run of it."""

import json
import statistics
import subprocess
import sys

import pytest
import torch

from refitd.bench import arguments, models, party, rows
from refitd.layout.sides import check_match, check_side
from refitd.plan import reshard

SMALL = models.model("small")
BIG = models.model("big")


def test_everything_is_measured_where_nothing_is_chosen():
    """No option stands for all transports, both models and more than ten repeats."""
    chosen = arguments.parse(["refit"])
    assert chosen.transports == ("peer", "tcp")
    assert chosen.models == ("big", "small")
    assert chosen.device == "cpu"
    assert chosen.repeats >= 10


def test_options_choose_one_of_each():
    """One transport, one model, and the number of repeats."""
    chosen = arguments.parse(["refit", "--transport", "tcp", "--model", "small", "--repeats", "12", "--json"])
    assert (chosen.transports, chosen.models, chosen.repeats, chosen.json) == (("tcp",), ("small",), 12, True)


@pytest.mark.parametrize(
    "argv",
    [[], ["mend"], ["refit", "--device", "cuda", "--transport", "tcp"], ["refit", "--model", "1GiB"],
     ["refit", "--transport", "nccl"],
     ["refit", "--repeats", "1"], ["refit", "--repeats", "many"]],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(argv, capsys):
    """Status 2 and a line that says what is possible."""
    with pytest.raises(SystemExit) as exit_:
        arguments.parse(argv)
    assert exit_.value.code == 2
    assert "usage: refitd bench" in capsys.readouterr().err


def test_rows_have_the_median_and_the_ratio_to_the_rivals_median():
    """Twice as fast is a ratio of 2, in ms as in GB/s."""
    time, throughput = rows.time_rows("peer", [0.3, 0.1, 0.2], 10**9, [0.5, 0.4, 0.3])
    assert time == rows.Row("peer_publish_to_commit", 200.0, "ms", 400.0, 2.0)
    assert (throughput.name, throughput.unit) == ("peer_throughput", "GB/s")
    assert (throughput.value, throughput.baseline, throughput.ratio) == (5.0, 2.5, 2.0)


def test_rows_without_a_rival_compare_nothing():
    """Baseline and ratio are None, and the line for people does not mention them."""
    median, slow = rows.small_rows("small", [0.001 * n for n in range(1, 11)])
    assert (median.value, median.baseline, median.ratio) == (pytest.approx(5.5), None, None)
    assert (slow.name, slow.value) == ("small_publish_to_commit_p90", pytest.approx(9.0))
    assert rows.peak_rows("tcp", {"daemon": 5_000_000}) == [rows.Row("tcp_peak_daemon", 5.0, "MB")]


def test_the_ninetieth_percentile_is_a_measured_value():
    """The smallest value that nine of ten do not exceed."""
    assert rows.percentile([5.0, 1.0], 0.9) == 5.0
    assert rows.percentile([float(n) for n in range(20, 0, -1)], 0.9) == 18.0


def test_the_models_have_the_sizes_that_their_names_promise():
    """134 MB in one matrix, and 1 MB in 24 of four shapes."""
    assert models.nbytes(BIG) == 8192 * 8192 * 2
    assert len(SMALL) == 24
    assert len({(matrix.rows, matrix.cols) for matrix in SMALL}) == 4
    assert models.nbytes(SMALL) == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("model", [SMALL, BIG], ids=["small", "big"])
def test_trainers_split_rows_and_engines_split_columns(model):
    """Both sides hold every element, and the two sides describe the same model."""
    sources = {f"trainer/run/{r}": models.layout(model, models.trainer_shards(model, r)) for r in range(2)}
    targets = {f"engine/r0/{r}": models.layout(model, models.engine_shards(model, r)) for r in range(2)}
    for side in (sources, targets):
        for layout in side.values():
            layout.check()
        check_side(side)
    check_match(sources, targets)
    matrix = model[0]
    assert models.trainer_shards(model, 1)[0].lo == (matrix.rows // 2, 0)
    assert models.engine_shards(model, 1)[0].lo == (0, matrix.cols // 2)


def test_a_resharded_step_is_exact_and_no_other_step_is():
    """What trainers fill is what engines check, and one wrong bit or an older step is seen."""
    shards = [models.trainer_shards(SMALL, r) for r in range(2)], [models.engine_shards(SMALL, r) for r in range(2)]
    source, target = [[models.layout(SMALL, s) for s in side] for side in shards]
    held = []
    for side in shards[0]:
        held.append({s.matrix.name: torch.empty(s.shape, dtype=torch.bfloat16) for s in side})
        for shard in side:
            models.fill(shard, 7, held[-1][shard.matrix.name])
    moved = reshard(source, target, held)
    for side, got in zip(shards[1], moved, strict=True):
        for shard in side:
            found = torch.as_tensor(got[shard.matrix.name]).view(torch.bfloat16).view(shard.shape)
            assert models.exact(shard, 7, found)
            assert not models.exact(shard, 6, found)
            found.view(torch.int16)[-1, -1] ^= 1
            assert not models.exact(shard, 7, found)


def test_shards_know_what_they_have_in_common():
    """A quarter of the matrix, as each of both indexes it; a shard and its neighbour share nothing."""
    (trainer,), (engine,) = models.trainer_shards(BIG, 1), models.engine_shards(BIG, 0)
    assert trainer.overlap(engine) == ((slice(0, 4096), slice(0, 4096)), (slice(4096, 8192), slice(0, 4096)))
    assert trainer.overlap(models.trainer_shards(BIG, 0)[0]) is None


def test_what_a_party_raises_reaches_the_parent():
    """The text of the error comes with the name of the party, and the process is gone after `end`."""

    def broken():
        raise ValueError("no such weights")

    process = party.Process("engine1", broken)
    try:
        process.ask("start")
        with pytest.raises(party.BenchFailed, match=r"(?s)engine1: .*no such weights"):
            process.answer()
    finally:
        process.end()
    assert party.peak_bytes(process.pid) == 0


# The benchmark forks, so it must not run in a process that has threads: not in this one.
RIVALS = """
import json
from refitd.bench import contest, models

found = {}
for name in ("gather_broadcast", "gloo_send_recv"):
    with contest.rival(models.model("small"), name) as one:
        found[name] = {"seconds": [one.round(step) for step in range(2)], "peaks": one.peaks()}
print(json.dumps(found))
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_a_short_run_says_what_it_measured(tmp_path):
    """The last line is the object, the same as in the file; the machine is printed too."""
    out = tmp_path / "run.json"
    argv = ["refit", "--model", "small", "--transport", "peer", "--repeats", "2", "--json", "--out", str(out)]
    done = _run("-m", "refitd.cli", "bench", *argv)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert [row["name"] for row in document["rows"]][:2] == ["small_publish_to_commit", "small_publish_to_commit_p90"]
    assert all(row["value"] > 0 for row in document["rows"])
    assert set(document["machine"]) == {"cpu", "cores", "memory_bytes", "load", "kernel", "python", "torch", "numpy"}
    assert document["command"].startswith("refitd bench refit --device cpu --transport peer --model small")
    assert "machine: cpu" in done.stderr


@pytest.mark.slow
def test_rivals_move_every_bit_too():
    """Both ways over gloo end with the values of the step on every engine."""
    done = _run("-c", RIVALS)
    assert done.returncode == 0, done.stderr
    for one in json.loads(done.stdout.splitlines()[-1]).values():
        assert statistics.median(one["seconds"]) > 0
        assert set(one["peaks"]) == {"trainer0", "trainer1", "engine0", "engine1"}
        assert min(one["peaks"].values()) > 10e6
