"""`refitd plan`: what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from refitd.cli import main
from refitd.layout import Layout
from refitd.layout.presets import PRESETS, preset
from refitd.layout_file import save_layout
from refitd.planning.cases import preset_case
from refitd.planning.outcome import KEYS, LOSS_KEYS
from refitd.planning.picture import shade
from refitd.planning.text import seconds, size

SVG = "{http://www.w3.org/2000/svg}"

LONG = "x" * 300


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    """The object on the last line of stdout of a run that is good."""
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def one_layout(axis: int, rank: int) -> dict:
    """Half of a 4 x 4 tensor."""
    lo, hi = [0, 0], [4, 4]
    lo[axis], hi[axis] = 2 * rank, 2 * rank + 2
    return {
        "refitd_layout": 1,
        "tensors": {"w": {"shape": [4, 4], "dtype": "bfloat16"}},
        "storages": {"w": {"elements": 8, "dtype": "bfloat16"}},
        "pieces": [{"tensor": "w", "lo": lo, "hi": hi, "storage": "w", "offset": 0, "strides": [hi[1] - lo[1], 1]}],
    }


def write_sides(folder: Path) -> list[str]:
    """Side files of two trainers with rows and two engines with columns, in two domains; options that name them."""
    for side, axis, name in (("src", 0, "trainer/a"), ("dst", 1, "engine/r0")):
        ranks = {}
        for rank in range(2):
            document = one_layout(axis, rank)
            save_layout(Layout.from_json(document), folder / f"{side}{rank}.json")
            where = f"{side}{rank}.json" if rank else document
            ranks[f"{name}/{rank}"] = {"node": f"{side}-n", "domain": f"{side}-d", "layout": where}
        (folder / f"{side}.json").write_text(json.dumps({"refitd_side": 1, "ranks": ranks}))
    return ["--src", str(folder / "src.json"), "--dst", str(folder / "dst.json"), "--topology", "h100-nvl8"]


def test_json_has_the_keys_of_the_contract_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    """The object holds exactly the agreed keys; with --lose three more; with --links the matrix."""
    report = said(capsys, "--preset", "tiny")
    assert tuple(report) == KEYS
    assert (report["tensors"], report["ranks"], report["network_bytes"]) == (129, 8, 296_433_856)
    assert (report["coverage"], len(report["digest"])) == ("exact", 32)
    assert tuple(said(capsys, "--preset", "tiny", "--lose", "src:0-1")) == KEYS + LOSS_KEYS
    assert tuple(said(capsys, "--preset", "tiny", "--links")) == (*KEYS, "domains", "links")


def test_the_digest_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of one case agree, whatever is printed beside it."""
    first = said(capsys, "--preset", "qwen3-32b-h100")["digest"]
    assert said(capsys, "--preset", "qwen3-32b-h100", "--links")["digest"] == first


def test_links_add_up_to_the_network_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """The matrix names every domain and holds every byte that crosses the network."""
    report = said(capsys, "--preset", "tiny", "--links")
    assert report["domains"] == ["engine-d0", "engine-d1", "trainer-d0", "trainer-d1"]
    assert sum(map(sum, report["links"])) == report["network_bytes"]
    assert [row[:2] for row in report["links"][:2]] == [[0, 0], [0, 0]]


def test_a_loss_says_what_remains(capsys: pytest.CaptureFixture[str]) -> None:
    """All engines of a domain lost at the start leave the other domain's bytes; at the end nothing remains."""
    report = said(capsys, "--preset", "tiny", "--lose", "dst:0-1", "--at", "0")
    assert report["remaining_bytes"] == report["network_bytes"] // 2
    assert report["unrecoverable_bytes"] == 0
    assert said(capsys, "--preset", "tiny", "--lose", "dst:0,1", "--at", "1")["remaining_bytes"] == 0
    assert said(capsys, "--preset", "tiny", "--lose", "src:0-3", "--at", "0")["unrecoverable_bytes"] > 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there are lines with units, the links and the reasons."""
    assert main(["plan", "--preset", "tiny", "--links", "--lose", "src:0"]) == 0
    out = capsys.readouterr().out
    assert "over the network                296.434 MB (least: 296.434 MB)" in out
    assert "  129 tensors in 34 classes make 12 lines and 24 flows" in out
    assert "trainer-d0   74099232   74099232" in out
    assert "held by no rank that is left    0 B" in out


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["plan", "--preset", "tiny", "--links"], 0, b""),
        (["plan", "--preset", "tiny", "--topology", "nope", "--json"], 1, b"refitd plan: topology: expected one of "),
        (["config", "show"], 0, b""),
        (["config", "show", "--json"], 0, b""),
        (["config", "check", "--set", "nope=1", "--json"], 78, b"refitd: nope: expected "),
    ],
)
def test_a_reader_that_has_seen_enough_is_no_failure(argv: list[str], status: int, said: bytes) -> None:
    """`refitd plan | head` ends with status 0 and says nothing, also where the pipe was closed before anything came;
    what is wrong is said and counts all the same."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from refitd.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr[: len(said)], done.stderr.count(b"\n")) == (status, said, bool(said))


def test_a_broken_pipe_elsewhere_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that ends by one must not end with status 0: nobody would start it again."""

    def load(*_arguments: object, **_options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("refitd.config.load", load)
    with pytest.raises(BrokenPipeError):
        main(["run"])


def test_side_files_are_planned_like_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layouts named or written out in side files make a plan: two trainers' rows to two engines' columns."""
    report = said(capsys, *write_sides(tmp_path), "--links")
    assert (report["tensors"], report["ranks"], report["network_bytes"]) == (1, 4, 32)
    assert (report["domains"], report["links"]) == (["dst-d", "src-d"], [[0, 0], [32, 0]])


def test_a_topology_file_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half the bandwidth doubles the bound; ranks are placed in the file's domains."""
    link = {"bandwidth": 25_000_000_000, "latency": 30_000}
    file = tmp_path / "slow.json"
    file.write_text(json.dumps({"name": "slow", "network": link, "fabric": link, "peer": link, "node": 2, "domain": 2}))
    slow = said(capsys, "--preset", "tiny", "--topology", str(file))
    assert slow["bound_seconds"] == 2 * said(capsys, "--preset", "tiny")["bound_seconds"]


def test_the_picture_has_a_cell_for_every_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The heat map is well-formed SVG on white, with a title, named cells, and a scale that ends at the most."""
    file = tmp_path / "traffic.svg"
    said(capsys, "--preset", "tiny", "--picture", str(file))
    root = ET.fromstring(file.read_text())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[0] == "tiny: traffic between domains"
    assert {"engine-d0", "engine-d1", "trainer-d0", "trainer-d1", "74.118 MB", "0 B"} <= set(texts)
    assert sorted(element.text or "" for element in root.iter(f"{SVG}title")) == [
        f"trainer-d{i} to engine-d{j}: {nbytes}" for i, nbytes in enumerate(["74.099 MB", "74.118 MB"])
        for j in range(2)
    ]  # fmt: skip
    assert next(root.iter(f"{SVG}rect")).get("fill") == "#ffffff"


def test_shades_and_units() -> None:
    """White is nothing and dark red the most; sizes and times have the unit that fits."""
    assert [shade(0, 9), shade(9, 9), shade(0, 0)] == ["#ffffff", "#bd0026", "#ffffff"]
    assert [size(999), size(1_500), size(2_000_000), size(3 * 10**9), size(4 * 10**12)] == [
        "999 B", "1.500 kB", "2.000 MB", "3.000 GB", "4.000 TB",
    ]  # fmt: skip
    assert [seconds(1.5), seconds(0.0012)] == ["1.500 s", "1.20 ms"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--preset", "nope"], ", ".join(PRESETS)),
        ([], "either --preset, or --src and --dst"),
        (["--preset", "tiny", "--src", "a"], "either --preset, or --src and --dst"),
        (["--src", "a", "--dst", "b"], "--src, --dst and --topology belong together"),
        (["--preset", "tiny", "--at", "0.5"], "--at: needs --lose"),
        (["--preset", "tiny", "--lose", "all"], "expected src: or dst: and numbers like 0-7 or 0-7,12, got all"),
        (["--preset", "tiny", "--lose", "src:3-1"], "expected the lower number first, got 3-1"),
        (["--preset", "tiny", "--lose", "src:0-99999999"], "expected at most 1048576 ranks, got 0-99999999"),
        (["--preset", "tiny", "--lose", "src:0", "--at", "2"], "expected a number from 0 to 1, got 2"),
        (["--preset", "tiny", "--lose", "src:0", "--at", "x"], "expected a number from 0 to 1, got x"),
    ],
)
def test_wrong_usage_is_refused(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that makes no sense ends with status 2 and says what was expected."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", *argv])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "field", "got"),
    [
        (["--topology", "nope"], "topology", "nope"),
        (["--lose", "dst:4"], "--lose", "4"),
        (["--picture", "/nowhere/x.svg"], "--picture", "/nowhere/x.svg: No such file or directory"),
        (["--topology", "/"], "topology file /", "[Errno 21] Is a directory: '/'"),
        (["--topology", LONG], f"topology file {LONG}", f"[Errno 36] File name too long: '{LONG}'"[:80]),
    ],
)
def test_what_cannot_be_done_ends_with_one(
    argv: list[str], field: str, got: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown topologies, ranks that are not there and files that cannot be written end with status 1, in JSON too."""
    assert main(["plan", "--preset", "tiny", *argv, "--json"]) == 1
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (out["ok"], out["field"], out["got"]) == (False, field, got)


def rank(text: str) -> str:
    """A side file with one rank."""
    return f'{{"refitd_side": 1, "ranks": {{"a": {text}}}}}'


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("[", "side file {}", "JSON in UTF-8"),
        ("[]", "side file {}", "an object with the keys ['ranks', 'refitd_side']"),
        ('{"refitd_side": 2, "ranks": {}}', "side file {} refitd_side", "1"),
        ('{"refitd_side": true, "ranks": {}}', "side file {} refitd_side", "1"),
        ('{"refitd_side": 1, "ranks": {"a": {}, "a": {}}}', "side file {}", "JSON in UTF-8"),
        ('{"refitd_side": 1, "ranks": {}}', "side file {} ranks", "an object with at least one rank key"),
        (rank("{}"), "side file {} a", "an object with the keys ['domain', 'layout', 'node']"),
        (rank('{"node": 1, "domain": "d", "layout": "x"}'), "side file {} a node", "a string"),
        (rank('{"node": "n", "domain": "d", "layout": 3}'), "side file {} a layout", "a string"),
    ],
)  # fmt: skip
def test_wrong_side_files_are_refused(
    text: str, field: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A side file that is not as documented ends with status 1, naming the field and what was expected."""
    options = write_sides(tmp_path)
    (tmp_path / "src.json").write_text(text)
    assert main(["plan", *options, "--json"]) == 1
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (out["field"], out["expected"]) == (field.format(tmp_path / "src.json"), expected)


def test_files_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing side file or layout file ends with status 1 and its path."""
    options = write_sides(tmp_path)
    (tmp_path / "src1.json").unlink()
    assert main(["plan", *options]) == 1
    assert f"layout file {tmp_path / 'src1.json'}: expected a readable file" in capsys.readouterr().err
    (tmp_path / "dst.json").unlink()
    (tmp_path / "src.json").unlink()
    assert main(["plan", *options]) == 1
    assert f"side file {tmp_path / 'src.json'}: expected a readable file" in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 1])
def test_a_layout_that_contradicts_itself_is_named(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A box outside of its tensor ends with status 1, naming the rank, written out in the side file or not."""
    options = write_sides(tmp_path)
    document = one_layout(0, number)
    document["tensors"]["w"]["shape"] = [4, 3]
    side = json.loads((tmp_path / "src.json").read_text())
    if number:
        (tmp_path / "src1.json").write_text(json.dumps(document))
    else:
        side["ranks"]["trainer/a/0"]["layout"] = document
    (tmp_path / "src.json").write_text(json.dumps(side))
    assert main(["plan", *options]) == 1
    assert f"trainer/a/{number}: piece of w in w: box: expected inside shape (4, 3)" in capsys.readouterr().err


def test_presets_keep_their_own_hosts_without_a_topology() -> None:
    """`tiny` has nodes of two; its links are those of H100."""
    sides, links = preset_case("tiny")
    assert (links.name, sides[0].nodes) == ("h100-nvl8", preset("tiny")[0].nodes)
