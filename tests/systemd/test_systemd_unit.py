"""The unit files fit the program and systemd."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import stat
import subprocess

import pytest

from refitd import config

FOLDER = pathlib.Path(__file__).parents[2] / "systemd"
UNIT, SOCKET = FOLDER / "refitd.service", FOLDER / "refitd.socket"


def test_the_units_are_clean() -> None:
    """systemd finds nothing to say about the units: it warns about unknown keys without failing."""
    result = run("systemd-analyze", "verify", "--man=no", str(UNIT), str(SOCKET))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_fault_in_the_unit_would_be_noticed(tmp_path: pathlib.Path) -> None:
    """A key that systemd does not know makes output, though not a failure: `make check` takes output for one."""
    bad = tmp_path / "refitd.service"
    bad.write_text(UNIT.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    check = UNIT.parents[1] / ".ci" / "check-unit"
    assert "WatchdogSecs" in run(str(check), str(bad)).stderr
    assert run(str(check), str(bad)).returncode == 1


def test_the_unit_is_confined() -> None:
    """systemd rates the unit's exposure at 2.0 or less."""
    result = run("systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT))
    assert result.returncode == 0, result.stdout[-200:]


def test_every_unusual_line_says_why() -> None:
    """A line of the unit stands below a comment, or is one that every unit has."""
    usual = re.compile(
        r"\[|#|(Description|Documentation|Wants|Type|NotifyAccess|Restart|RestartSec|User|Group|ExecStart|WantedBy|Also"
        r"|Timeout\w+|Limit\w+|StartLimit\w+|\w+Directory|\w+DirectoryMode)=|\w+=(yes|strict|native|)$"
    )
    for paragraph in UNIT.read_text().split("\n\n"):
        lines = paragraph.splitlines()
        said = next((index for index, line in enumerate(lines) if line.startswith("#")), len(lines))
        assert [line for line in lines[:said] if not usual.match(line)] == []


def test_the_socket_is_the_one_of_the_examples() -> None:
    """Unit and examples agree on the path, and the daemon asks for the name that the unit gives."""
    socket = dict(line.split("=", 1) for line in SOCKET.read_text().splitlines() if "=" in line and line[0] != "#")
    assert (socket["FileDescriptorName"], socket["SocketMode"], socket["SocketGroup"]) == ("hook", "0660", "refitd")
    for example in FOLDER.glob("*.toml"):
        assert config.load(example, {}, {"node.name": "n0"}).hook.socket == socket["ListenStream"]


def test_the_example_configuration_loads() -> None:
    """The example beside the unit is a valid configuration, with the paths that the unit makes."""
    loaded = config.load(FOLDER / "refitd.toml", {}, {"node.name": "n0"})
    assert loaded.hook.socket == "/run/refitd/hook.sock"
    credentials = re.findall(r"^LoadCredential=([\w-]+):", UNIT.read_text(), re.MULTILINE)
    folder = "/run/credentials/refitd.service/"
    assert [loaded.store.password_file, loaded.data.secret_file] == [folder + name for name in credentials]


def test_make_install_puts_everything_in_its_place(tmp_path: pathlib.Path) -> None:
    """Below DESTDIR; systemd makes user and folders of the snippets, the socket's folder for its group only."""
    result = run("make", "-s", "-C", str(FOLDER.parent), "install-files", f"DESTDIR={tmp_path}")
    assert (result.returncode, result.stderr) == (0, "")
    installed = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert installed == {
        "usr/lib/systemd/system/refitd.service", "usr/lib/systemd/system/refitd.socket",
        "usr/lib/sysusers.d/refitd.conf", "usr/lib/tmpfiles.d/refitd.conf",
        "usr/share/refitd/examples/refitd.toml", "usr/share/refitd/examples/refitd-one-node.toml",
        "usr/share/refitd/dashboards/fleet.json", "usr/share/refitd/dashboards/node.json",
        "usr/share/refitd/dashboards/refitd.yml",
    }  # fmt: skip
    (tmp_path / "etc").mkdir()
    for name, text in (("passwd", "root:x:0:0:root:/root:/bin/sh\n"), ("group", "root:x:0:\n")):
        (tmp_path / "etc" / name).write_text(text)
    assert run("systemd-sysusers", f"--root={tmp_path}", "refitd.conf").returncode == 0
    users = (tmp_path / "etc/passwd").read_text()
    user = re.search(r"^refitd:x:(\d+):(\d+):refitd:/var/lib/refitd:/usr/sbin/nologin$", users, re.MULTILINE)
    assert user
    if os.geteuid() != 0:
        return  # only root can give folders away
    made = run("systemd-tmpfiles", "--create", f"--root={tmp_path}", "refitd.conf")
    assert (made.returncode, made.stderr) == (0, "")
    folder, conf = (tmp_path / "run/refitd").stat(), (tmp_path / "etc/refitd").stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid, folder.st_gid) == (0o750, int(user[1]), int(user[2]))
    assert (stat.S_IMODE(conf.st_mode), conf.st_uid, conf.st_gid) == (0o750, 0, int(user[2]))


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(program) is None:
        pytest.fail(f"no {program} on PATH: apt-get install systemd make")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
