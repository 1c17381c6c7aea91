"""The unit files fit the program and systemd."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

from refitd import config

FOLDER = pathlib.Path(__file__).parents[2] / "systemd"
UNIT = FOLDER / "refitd.service"


def test_the_unit_is_clean() -> None:
    """systemd finds nothing to say about the unit: it warns about unknown keys without failing."""
    command = [_systemd_analyze(), "verify", "--man=no", str(UNIT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_unit_is_confined() -> None:
    """systemd rates the unit's exposure at 2.0 or less."""
    command = [_systemd_analyze(), "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stdout[-200:]


def test_the_example_configuration_loads() -> None:
    """The example beside the unit is a valid configuration, with the paths that the unit makes."""
    loaded = config.load(FOLDER / "refitd.toml", {}, {"node.name": "n0"})
    assert loaded.hook.socket == "/run/refitd/hook.sock"
    credentials = re.findall(r"^LoadCredential=([\w-]+):", UNIT.read_text(), re.MULTILINE)
    folder = "/run/credentials/refitd.service/"
    assert [loaded.store.password_file, loaded.data.secret_file] == [folder + name for name in credentials]


def _systemd_analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.fail("no systemd-analyze on PATH: apt-get install systemd")
    return program
