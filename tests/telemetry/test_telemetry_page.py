"""What the status page shows: read by an HTML parser, and drawn by Chromium."""

from __future__ import annotations

import itertools
import pathlib
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pictures
import pytest

from refitd.telemetry.heat import SIDE, heat_map
from refitd.telemetry.page import faults, render, size

VOID = {"meta", "br", "link", "img", "input"}
LAPTOP = (1366, 900)


class Reader(HTMLParser):
    """Collects text and attributes, and insists that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], []):
            self.texts.append(data)


def read(document: str) -> Reader:
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader.open == []
    return reader


def test_a_healthy_daemon() -> None:
    """Nothing is wrong; node, store, members, replicas, versions, lanes and the last refits are there."""
    page = read(render(pictures.healthy()))
    words = " ".join(page.texts)
    for expected in (
        "refitd on c", "store etcd://10.0.0.9:2379 (answers)", "Nothing is wrong.", "leader a, generation 2", "2/41",
        "10.0.0.1:9465", "in_place", "committed", "every member verified it", "0.780", "24 MB network", "goes on",
    ):  # fmt: skip
        assert expected in words
    assert "What is wrong" not in words


def test_phases_are_bars() -> None:
    """A phase's width is its share of the longest refit, and its name and seconds can be read."""
    page = read(render(pictures.healthy()))
    bars = {title: style for style, title in _pairs(page, "i", "style", "title")}
    assert bars["transfer 0.610 s"] == f"width:{100 * 0.61 / 0.78:.2f}%"
    assert bars["prepare 0.200 s"] == f"width:{100 * 0.2 / 0.78:.2f}%"


def test_links_are_a_heat_map() -> None:
    """The busiest link is darkest; a cell says what came of what was planned; one that is late has a frame."""
    links = [pictures.link("s0", "d0", 12_000_000), pictures.link("s1", "d0", 3_000_000, 6_000_000, late=True)]
    page = read(heat_map(links))
    cells = _pairs(page, "td", "style", "title")
    assert cells == [
        ("background:rgb(var(--heat) / 0.65)", "network: 12000000 of 12000000 bytes"),
        ("background:rgb(var(--heat) / 0.38)", "network: 3000000 of 6000000 bytes"),
    ]
    assert [value for _tag, name, value in page.attributes if (name, value) == ("class", "late")] == ["late"]
    assert "12M 100%" in page.texts
    assert "6M 50%" in page.texts


def test_a_large_heat_map_shows_the_busiest() -> None:
    """At most 24 rows and columns; the rest is counted."""
    links = [pictures.link(f"s{n:03}", f"d{n:03}", 0, planned=n + 1) for n in range(100)]
    page = read(heat_map(links))
    assert page.texts.count("s099") == page.texts.count("d099") == 1
    assert "s000" not in page.texts
    assert len([tag for tag, *_ in page.attributes if tag == "td"]) == SIDE * 2  # style and title of the diagonal
    assert "and 76 more sources" in page.texts


def test_faults_name_rank_link_and_phase() -> None:
    """Everything that is wrong is a sentence with its reason, and the page begins with them."""
    found = list(faults(pictures.faulty()))
    assert found == [
        "the store does not answer: transfers under way finish, and nothing new is decided",
        "grpo: replica r0 has been in transfer for 8.2 s: trainer/run-1/0 -> engine/r0/1 over network, 3 MB of 12 MB",
        "grpo: replica r0 serves nothing that is new enough: c: engine/r0/1 made no progress for 3 s",
        "grpo: lane r0 does without engine/r0/1: its mover does not answer",
        "grpo: lane r0 is failed: c: no progress",
        "grpo: node b is parked: it joined 6 times within 60 s",
        "grpo: engine/r0/1 has no mover; one is being started",
        "grpo: the refit of r0 to 2/41 has failed once: in transfer: engine/r0/1: no progress",
    ]
    page = read(render(pictures.faulty()))
    assert [text for text in page.texts if text in found] == found
    assert "goes on, 1 failed before" in page.texts
    assert "the mover of engine/r0/1 was killed: it did not answer a ping in time" in page.texts


def test_a_leaderless_and_a_paused_job_say_so() -> None:
    """Nobody leads; an operator paused it, with or without a reason; the loop stands still."""
    picture = pictures.healthy()
    picture["problem"] = "job grpo has stood still for 12 s"
    picture["jobs"]["grpo"] |= {"leader": None, "paused": True}
    assert list(faults(picture)) == [
        "job grpo has stood still for 12 s",
        "grpo: nobody leads",
        "grpo: paused by an operator: no reason given",
    ]
    picture["jobs"]["grpo"] |= {"paused_reason": "a new switch"}
    assert "grpo: paused by an operator: a new switch" in faults(picture)


def test_a_daemon_without_a_job_has_a_page() -> None:
    """Right after the start there is no job, and the store was not asked."""
    words = " ".join(
        read(
            render(
                {
                    **pictures.healthy(),
                    "jobs": {},
                    "refits": [],
                    "store": {"url": "memory://", "local": True, "answers": None},
                }
            )
        ).texts
    )
    assert "store memory:// (not asked yet, this node only)" in words
    assert "None yet in which this node took part." in words


def test_what_clients_say_is_text() -> None:
    """Names and reasons from outside never become markup."""
    picture = pictures.faulty()
    evil = "<script>alert('x')</script>&\"'"
    picture["node"] = evil
    picture["jobs"]["grpo"]["replicas"][0] |= {"name": evil, "why": evil}
    picture["jobs"]["grpo"]["links"][0] |= {"src": evil, "link": evil}
    picture["refits"][0] |= {"why": evil, "outcome": evil}
    picture["jobs"][evil] = picture["jobs"].pop("grpo")
    document = render(picture)
    page = read(document)
    assert "<script" not in document
    assert {tag for tag, *_ in page.attributes} <= {"html", "meta", "section", "i", "td", "th", "div", "span", "table"}
    assert any(evil in text for text in page.texts)


def test_nothing_is_loaded_from_elsewhere() -> None:
    """No element and no style names another address."""
    document = render(pictures.faulty())
    page = read(document)
    assert {name for _tag, name, _value in page.attributes} & {"src", "href", "onload", "onclick", "action"} == set()
    assert re.findall(r"url\(|@import|https?:", document) == []


def test_sizes_are_short() -> None:
    """Bytes in the largest unit that is not above them."""
    assert [size(n) for n in (0, 999, 1000, 24_000_000, 1.5e9, 2e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "24 MB",
        "1.5 GB",
        "2 TB",
    ]


MEASURE = """<script>
const sections = [...document.querySelectorAll('section')], boxes = [...document.querySelectorAll('.scroll')];
const high = cell => { const r = new Range(); r.selectNodeContents(cell); return r.getBoundingClientRect().height; };
document.body.setAttribute('data-found', [
  document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor, sections.length,
  Math.min(...sections.map(x => x.offsetHeight)), sections.filter(x => x.scrollWidth > x.clientWidth).length,
  boxes.filter(x => x.scrollWidth > x.clientWidth).length,
  [...document.querySelectorAll('th, table:not(.heat) td:not(.t)')].filter(x => high(x) > 24).length
].join(';'));</script>"""


@pytest.mark.parametrize(
    ("scheme", "background", "name", "wide"),
    [("1", "rgb(250, 250, 249)", "faulty", 0), ("0", "rgb(23, 20, 18)", "crowded", 1)],
)
def test_chromium_draws_it_at_laptop_width(
    tmp_path: pathlib.Path, scheme: str, background: str, name: str, wide: int
) -> None:
    """Light and dark. Nothing is wider than the window: links of many ranks scroll in a box of their own.

    Headings, times, names and numbers take one line each; every panel has a height; the picture is not empty.
    """
    program = shutil.which("chromium")
    if program is None:
        pytest.fail("no chromium on PATH: apt-get install chromium")
    file = tmp_path / "page.html"
    file.write_text(render(getattr(pictures, name)()).replace("</body>", MEASURE + "</body>"))
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--window-size={LAPTOP[0]},{LAPTOP[1]}", f"--user-data-dir={tmp_path}/profile",
        f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={tmp_path}/page.png", "--dump-dom",
        file.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r'data-found="([^"]*)"', result.stdout)
    assert found, result.stderr[-2000:]
    width, drawn, sections, lowest, cut, scrolling, broken = found[1].split(";")
    assert (int(width), drawn, int(sections), int(cut)) == (LAPTOP[0], background, 7, 0)
    assert (int(scrolling), int(broken)) == (wide, 0)
    assert int(lowest) > 40
    assert (tmp_path / "page.png").stat().st_size > 20_000


def _pairs(page: Reader, tag: str, one: str, two: str) -> list[tuple[str, str]]:
    """Values of two attributes that follow each other in elements of a kind."""
    found = page.attributes
    return [(a[2], b[2]) for a, b in itertools.pairwise(found) if (a[:2], b[:2]) == ((tag, one), (tag, two))]
