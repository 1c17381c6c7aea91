"""Writes the man page, and the completion of bash, zsh and fish, below a prefix: all made from the parsers themselves.

``python docs/manual/build.py PREFIX`` is what ``make install`` runs. Needs shtab and argparse-manpage, of the dev
extra.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from refitd.cli import whole_parser
from refitd.telemetry.metrics import version

SHELLS = {
    "bash": "share/bash-completion/completions/refitd",
    "zsh": "share/zsh/site-functions/_refitd",
    "fish": "share/fish/vendor_completions.d/refitd.fish",
}
MAN = "share/man/man1/refitd.1"
_PATHS = {
    "FILE": shtab.FILE,
    "PATH": shtab.FILE,
    "FILE.svg": shtab.FILE,
    "NAME|FILE": shtab.FILE,
    "DIR": shtab.DIRECTORY,
}
_SECTIONS = (
    ("EXIT STATUS", "0 good; 1 the work failed; 2 usage; 78 bad configuration, which is not worth trying again."),
    (
        "ENVIRONMENT",
        (
            ".TP\n.B REFITD_SOCKET\nthe hook socket; else $XDG_RUNTIME_DIR/refitd/hook.sock or /run/refitd/hook.sock\n"
            ".TP\n.B REFITD_SECTION__KEY\noverrides a key of the configuration, as in REFITD_STORE__URL"
        ),
    ),
    (
        "FILES",
        (
            ".TP\n.I /etc/refitd/refitd.toml\nthe configuration that refitd.service reads\n"
            ".TP\n.I /run/refitd/hook.sock\nwhere trainers, engines and operators connect"
        ),
    ),
)


def files() -> dict[str, str]:
    """Text of each file by its path below the prefix."""
    made = {path: shtab.complete(completable(whole_parser()), shell) for shell, path in SHELLS.items()}
    return {**made, MAN: man_page()}


def completable(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, with the arguments that name a file or folder marked as such."""
    for each in parsers(parser):
        for action in each._actions:
            if isinstance(action.metavar, str) and action.metavar in _PATHS:
                action.complete = _PATHS[action.metavar]  # type: ignore[attr-defined]
    return parser


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of all its commands, in order."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def man_page() -> str:
    """``refitd(1)``: a part for each command."""
    data = {
        "project_name": "refitd", "version": version(), "manual_title": "refitd",
        "description": "moves policy weights from the GPUs that train to the GPUs that generate",
    }  # fmt: skip
    page = Manpage(whole_parser(), data, format="single-commands-section")
    for heading, content in _SECTIONS:
        page.add_section(heading, "=", content)
        page.parser._manpage[-1]["heading"] = heading
    return str(page)


def main(arguments: list[str]) -> int:
    """Write all files below the prefix."""
    (prefix,) = arguments
    for name, text in files().items():
        path = Path(prefix) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
