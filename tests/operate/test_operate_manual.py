"""Man page and completion: made from the parsers, whole, and good in the eyes of those who read them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from refitd.cli import main, whole_parser

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "demo", "bench", "plan", "run", "config", "status", "top", "doctor", "pause", "resume", "limit", "drain",
}  # fmt: skip


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("manual_build", ROOT / "docs" / "manual" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files(build: ModuleType) -> dict[str, str]:
    found: dict[str, str] = build.files()
    return found


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))


def test_every_command_has_a_parser(build: ModuleType) -> None:
    """Those of the contract, and real ones in the place of those that parse for themselves."""
    parser = whole_parser()
    progs = [each.prog for each in build.parsers(parser)]
    assert {prog.split()[1] for prog in progs if " " in prog} == COMMANDS
    assert {"refitd bench refit", "refitd bench plan", "refitd bench pack"} < set(progs)
    by_prog = {each.prog: set(options(each)) for each in build.parsers(parser)}
    assert {"--kill", "--victim", "--plant", "--json"} < by_prog["refitd demo"]
    assert {"--preset", "--lose", "--picture"} < by_prog["refitd plan"]
    assert {"--once", "--interval", "--socket"} < by_prog["refitd top"]


def test_every_option_explains_itself(build: ModuleType) -> None:
    """No argument without a word of help."""
    mute = [
        f"{each.prog} {action.option_strings or action.dest}"
        for each in build.parsers(whole_parser())
        for action in each._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction) and not action.choices
    ]  # fmt: skip
    assert mute == []


def test_every_option_is_in_every_file(build: ModuleType, files: dict[str, str]) -> None:
    """Page and completions leave nothing out."""
    wanted = {option for each in build.parsers(whole_parser()) for option in options(each)} - {"--help"}
    for name, text in files.items():
        plain = text.replace("\\-", "-")
        missing = [
            option for option in wanted if option not in plain and not re.search(rf"-l {option[2:]}\b", plain)
        ]  # fmt: skip
        assert (name, missing) == (name, [])
        assert [command for command in COMMANDS if command not in plain] == []


@pytest.mark.parametrize(("shell", "check"), [("bash", ["-n"]), ("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_shells_take_their_completion(
    build: ModuleType, files: dict[str, str], shell: str, check: list[str], tmp_path: Path
) -> None:
    """Syntax, by the shell itself."""
    text = files[build.SHELLS[shell]]
    assert {
        "bash": "complete -o bashdefault -F _shtab_refitd refitd",
        "zsh": "#compdef refitd",
        "fish": "complete -c refitd",
    }[shell] in text
    if shutil.which(shell) is None:
        pytest.fail(f"no {shell} on PATH: apt-get install {shell}")
    (tmp_path / shell).write_text(text)
    done = subprocess.run([shell, *check, tmp_path / shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes(build: ModuleType, files: dict[str, str], tmp_path: Path) -> None:
    """Commands, options of a command, and the choices of an option, as a person at the keyboard would get them."""
    (tmp_path / "bash").write_text(files[build.SHELLS["bash"]])
    program = (
        'source "$1"; shift; function=$(complete -p refitd | sed "s/.*-F \\([^ ]*\\).*/\\1/");'
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); "$function" refitd "${COMP_WORDS[COMP_CWORD]}" "";'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )

    def complete(*words: str) -> set[str]:
        command = ["bash", "-c", program, "bash", str(tmp_path / "bash"), "refitd", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert complete("do") == {"doctor"}
    assert complete("dr") == {"drain"}
    assert complete("drain", "--c") == {"--config", "--cancel"}
    assert complete("config", "") >= {"check", "show"}
    assert complete("demo", "--signal", "") >= {"KILL", "STOP"}


def test_the_page_is_good_roff(build: ModuleType, files: dict[str, str], tmp_path: Path) -> None:
    """No error by groff; every command, and what every command shares, in what it prints."""
    page = tmp_path / "refitd.1"
    page.write_text(files[build.MAN])
    if shutil.which("groff") is None:
        pytest.fail("no groff on PATH: apt-get install groff-base")
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-c", "-P-b", "-P-u", page],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    errors = [line for line in done.stderr.splitlines() if "adjust line" not in line and "break line" not in line]
    assert errors == []
    for words in ("refitd doctor", "EXIT STATUS", "ENVIRONMENT", "/etc/refitd/refitd.toml", "78 bad configuration"):
        assert words in done.stdout


def test_make_puts_them_where_they_are_looked_for(build: ModuleType, tmp_path: Path) -> None:
    """Below DESTDIR and its prefix, for everybody to read; nothing else."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["make", "-s", "-C", str(ROOT), "install-manual", f"DESTDIR={tmp_path}", f"PY={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    installed = {str(file.relative_to(tmp_path / "usr")): file for file in tmp_path.rglob("*") if file.is_file()}
    assert set(installed) == {*build.SHELLS.values(), build.MAN}
    assert {stat.S_IMODE(file.stat().st_mode) for file in installed.values()} == {0o644}


def test_config_takes_flags_and_shows_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``config`` reads what ``run`` would; names of files are shown, what is in them never; 78 names the key."""
    (tmp_path / "password").write_text("hunter2-of-etcd")
    (tmp_path / "refitd.toml").write_text(
        f'[store]\nurl = "etcd://h:1"\nuser = "a"\npassword_file = "{tmp_path}/password"\n'
    )
    argv = ["--config", str(tmp_path / "refitd.toml"), "--set", "data.port=9465"]
    for how in ([], ["--json"]):
        assert main(["config", "show", *argv, *how]) == 0
        shown = capsys.readouterr().out
        assert "hunter2" not in shown
        assert "port = 9465" in shown
        assert "password_file" in shown
    assert main(["config", "check", *argv, "--set", "store.url=etcd://a:secret@h:1", "--json"]) == 78
    out, err = capsys.readouterr()
    assert "secret" not in out + err
    assert "store.url" in err
