"""Every link leads somewhere, and every page can be found."""

from __future__ import annotations

import pathlib
import re

import pytest
from pages import DOCS, ROOT, anchors, broken, links, pages, resolve

RULES = ROOT / "dashboards" / "rules" / "refitd.yml"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_link_and_anchor_resolves(page: pathlib.Path) -> None:
    """Relative links of README and docs lead to files, folders and headings that are there."""
    assert list(broken(page)) == []


def test_a_broken_link_would_be_noticed(tmp_path: pathlib.Path) -> None:
    """A missing file, a missing heading and a heading of code are told; links in code and to other sites are not."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`: c\n## Again\n## Again\n[1](none.md) [2](#again-1) [3](#a-b-c) [4](page.md#nowhere) [5](#not)\n"
        "`[6](none.md)` [7](https://example.org/x) [[8]](gone.md)\n```sh\n# not\n[9](none.md)\n```\n"
    )
    assert anchors(page) == ["a-b-c", "again", "again-1"]
    assert list(broken(page)) == [
        "page.md: none.md", "page.md: page.md#nowhere", "page.md: #not", "page.md: gone.md",
    ]  # fmt: skip


def test_every_page_is_reachable_from_the_readme() -> None:
    """Following links from README.md one comes to each page; the index lists each page of docs/."""
    found, todo = set[pathlib.Path](), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        found.add(page)
        targets = {resolve(page, target)[0] for target in links(page)}
        todo += [path for path in targets - found if path.suffix == ".md" and path.is_relative_to(ROOT)]
    assert [page for page in pages() if page not in found] == []
    listed = {resolve(DOCS / "README.md", target)[0] for target in links(DOCS / "README.md")}
    assert [page for page in DOCS.glob("*.md") if page not in listed | {DOCS / "README.md"}] == []


def test_every_alert_leads_to_its_runbook() -> None:
    """An alert's runbook_url is a section of docs/operations.md with the alert's name, which says three things."""
    text, page = RULES.read_text(), DOCS / "operations.md"
    found = dict(re.findall(r"- alert: (\w+)\n.*?runbook_url: (\S+)", text, re.DOTALL))
    assert len(found) == text.count("- alert:") > 0
    sections = dict(re.findall(r"^### (Refitd\w+)\n(.*?)(?=^#|\Z)", page.read_text(), re.MULTILINE | re.DOTALL))
    for alert, url in found.items():
        assert url == f"docs/operations.md#{alert.lower()}"
        assert alert.lower() in anchors(page)
        assert re.findall(r"^- \*\*(\w+)\*\*: ", sections[alert], re.MULTILINE) == ["Means", "Look", "Do"]
    assert sorted(sections) == sorted(found)  # none is left of an alert that is gone
