"""README and docs as Markdown: pages, headings, links, blocks of code, and what their programs print."""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
Start = Callable[..., "subprocess.Popen[str]"]  # of a program, with its environment
_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?:[^][]|\[[^][]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


class Block(NamedTuple):
    """A block of code and the words after its fence: the language, and what a reader's program makes of it."""

    info: str
    text: str


def pages() -> list[pathlib.Path]:
    """README.md and everything below docs/, sorted."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: pathlib.Path) -> list[Block]:
    """All blocks of code, in order."""
    return [Block(found["info"], found["text"]) for found in _FENCE.finditer(page.read_text())]


def links(page: pathlib.Path) -> list[str]:
    """Targets of links outside of code, as written; those that lead to other sites left out."""
    prose = re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", page.read_text()))
    return [target for target in _LINK.findall(prose) if not target.startswith(("http://", "https://"))]


def anchors(page: pathlib.Path) -> list[str]:
    """What GitHub makes of the headings: lower case, without punctuation, hyphens for spaces, numbers for repeats."""
    found: list[str] = []
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        again = sum(bool(re.fullmatch(re.escape(slug) + r"(-\d+)?", earlier)) for earlier in found)
        found.append(f"{slug}-{again}" if again else slug)
    return found


def resolve(page: pathlib.Path, target: str) -> tuple[pathlib.Path, str]:
    """The file or folder that a link of ``page`` leads to, and the anchor in it (empty for none)."""
    path, _, anchor = target.partition("#")
    return ((page.parent / path).resolve() if path else page), anchor


def broken(page: pathlib.Path) -> Iterator[str]:
    """Links of ``page`` that lead nowhere."""
    for target in links(page):
        path, anchor = resolve(page, target)
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield f"{page.name}: {target}"


def lines(process: subprocess.Popen[str], seconds: float = 100.0) -> list[str]:
    """What a program has printed when it ends by itself with status 0."""
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, said
    return said.splitlines()
