"""``refitd bench pack``: its cases as programs, a short run on the CPU, and what it refuses."""

import json

import numpy as np
import pytest
import torch

from refitd.bench import main
from refitd.bench import pack_cases as cases
from refitd.bench.pull import PULLS, Pull, program_of
from refitd.plan import execute
from refitd.plan.program import Program

ROWS = {
    *(f"{case}_{what}" for case in ("slices_512B", "slices_cast", "slices_128B", "slices_odd", "slices_turned")
      for what in ("plain_copy", "pack", "pack_checked", "unpack", "unpack_checked", "through", "through_checked",
                   "reread_checked")),
    "small_tensors_pack_checked", "small_tensors_copy_loop", "small_tensors_cat",
}  # fmt: skip


def test_a_short_run_on_the_cpu(capsys, tmp_path):
    """Every row once, with its baseline; the file has what stdout's last line has."""
    out = tmp_path / "pack.json"
    assert main(["pack", "--shrink", "48", "--repeats", "1", "--json", "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert document["ok"]
    assert {row["name"] for row in document["rows"]} == ROWS
    assert document["command"] == "refitd bench pack --shrink 48 --repeats 1 --json"
    for row in document["rows"]:
        assert row["value"] > 0
        if row["unit"] == "GB/s" and row["baseline"]:
            assert row["ratio"] == pytest.approx(row["value"] / row["baseline"])


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--shrink", "0"], ["--only", "processes"], ["--device", "cuda"]])
def test_what_cannot_be_measured_is_refused(argv, capsys):
    """Status 2, also for a GPU where there is none."""
    if argv == ["--device", "cuda"] and torch.cuda.is_available():
        argv = ["--device", "cuda:none"]
    with pytest.raises(SystemExit) as exit_:
        main(["pack", *argv])
    assert exit_.value.code == 2
    assert "usage: refitd bench pack" in capsys.readouterr().err


@pytest.mark.parametrize("case", [cases.SLICES, cases.CAST, cases.NARROW, cases.ODD, cases.TURNED, cases.SMALL])
def test_cases_are_sound_programs(case):
    """They survive their own checks, and say how many bytes arrive."""
    program = cases.program_of(case.shrunk(96))
    assert Program.from_bytes(program.to_bytes()).buckets == program.buckets
    assert case.payload == {"slices_odd": 350_945_280, "small_tensors": 57_344_000}.get(case.name, 352_321_536)


@pytest.mark.parametrize("pull", PULLS, ids=lambda pull: pull.name)
def test_pulls_carry_rows_to_columns(pull):
    """The CPU's executor gives each reader its columns of each matrix."""
    small = Pull("small", min(pull.tensors, 3), 10, 12, pull.owners, pull.readers)
    whole = np.arange(small.tensors * 120, dtype=np.uint16).reshape(small.tensors, 10, 12)
    share = 10 // small.owners
    sources = {
        f"w{i}/{o}": whole[i, o * share : (o + 1) * share].reshape(-1)
        for o in range(small.owners) for i in range(small.tensors)
    }  # fmt: skip
    width = 12 // small.readers
    for reader in range(small.readers):
        columns = slice(reader * width, (reader + 1) * width)
        program = program_of(small, columns)
        assert Program.from_bytes(program.to_bytes()).buckets == program.buckets
        got = {f"w{i}": np.zeros(10 * width, np.uint16) for i in range(small.tensors)}
        for bucket in program.buckets:
            execute.copy(program, bucket, sources, got)
        for i in range(small.tensors):
            assert np.array_equal(got[f"w{i}"].reshape(10, width), whole[i][:, columns])
