"""Where a configuration comes from, and what it says when it is wrong."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import socket
from typing import Any

import pytest

from refitd.config import Config, StoreConfig, load, show, split_listen
from refitd.errors import ConfigError


def write(tmp_path: pathlib.Path, text: str) -> pathlib.Path:
    path = tmp_path / "refitd.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    """Without a file, an environment and flags the documented defaults hold."""
    config = load(None, {"HOME": "/home/u", "XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/run/user/1"})
    assert (config.node.name, config.node.domain) == (socket.gethostname(), socket.gethostname())
    assert config.node.state_dir == "/s/refitd"
    assert config.hook.socket == "/run/user/1/refitd/hook.sock"
    assert config.hook.uids == config.hook.gids == ()
    assert config.store == StoreConfig("memory://", "", "", "", "", "", "", 10.0, 3.0, 2.0)
    assert config.metrics.listen == "127.0.0.1:9464"
    assert dataclasses.astuple(config.data) == ("127.0.0.1", 0, "", "", "auto", "auto", "auto", 4194304, "checksum")
    assert dataclasses.astuple(config.timeouts) == (2.0, 1.0, 3.0, 3.0, 15.0, 2.0, 1.0)
    assert config.node.devices == ""
    assert dataclasses.astuple(config.job) == (0, 1, 0.5, 3.0, 6, 60.0, 30.0, 10.0, 3600.0)
    assert dataclasses.astuple(config.log) == ("info", "auto")


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"HOME": "/root"}, 0, "/var/lib/refitd"),
        ({"HOME": "/home/u"}, 7, "/home/u/.local/state/refitd"),
        ({}, 7, "/var/lib/refitd"),
        ({"HOME": "/root", "XDG_STATE_HOME": "/s"}, 0, "/s/refitd"),
    ],
)
def test_the_state_folder(environ: dict[str, str], uid: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """State goes where XDG says, else to /var/lib for root and below the home for others."""
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert load(None, environ).node.state_dir == expected


def test_the_socket() -> None:
    """REFITD_SOCKET goes before XDG_RUNTIME_DIR, a key of the configuration before both."""
    run = {"XDG_RUNTIME_DIR": "/x"}
    assert load(None, {}).hook.socket == "/run/refitd/hook.sock"
    assert load(None, run).hook.socket == "/x/refitd/hook.sock"
    assert load(None, run | {"REFITD_SOCKET": "/a"}).hook.socket == "/a"
    assert load(None, run | {"REFITD_SOCKET": "/a", "REFITD_HOOK__SOCKET": "/b"}).hook.socket == "/b"


def test_later_sources_win(tmp_path: pathlib.Path) -> None:
    """Defaults < file < environment < flags, key by key; flags that are None do not count."""
    path = write(tmp_path, '[timeouts]\noffer = 3\nbuild = 4.5\ngrace = 9\n[node]\nname = "file"\n')
    environ = {"REFITD_TIMEOUTS__BUILD": "5", "REFITD_TIMEOUTS__GRACE": "8", "REFITD_NODE__NAME": "env"}
    timeouts = load(path, environ, {"timeouts.grace": 7.0, "timeouts.build": None}).timeouts
    assert (timeouts.offer, timeouts.build, timeouts.grace, timeouts.progress) == (3.0, 5.0, 7.0, 3.0)
    assert load(path, environ).node.domain == "env"


def test_the_environment_is_read_by_type() -> None:
    """Text stays text, numbers and lists are read as in TOML."""
    environ = {
        "REFITD_HOOK__UIDS": "[1000, 1001]",
        "REFITD_HOOK__GIDS": "5",
        "REFITD_DATA__PORT": "9465",
        "REFITD_DATA__LINKS": "network",
        "REFITD_NODE__NAME": "12",
        "REFITD_METRICS__LISTEN": "",
        "REFITD_FAILPOINTS": "/some/socket",
        "OTHER__THING": "1",
    }
    config = load(None, environ)
    assert (config.hook.uids, config.hook.gids) == ((1000, 1001), (5,))
    assert (config.data.port, config.data.links, config.node.name, config.metrics.listen) == (9465, "network", "12", "")


def test_flags_may_be_text_or_values() -> None:
    """A flag's text is read like the environment's."""
    config = load(None, {}, {"data.port": "5", "timeouts.offer": 1, "hook.uids": [3], "log.level": "debug"})
    assert (config.data.port, config.timeouts.offer, config.hook.uids, config.log.level) == (5, 1.0, (3,), "debug")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[stor]\n", "stor: expected one of the sections node, store, .*, got an unknown section"),
        ("[store]\nurll = 1\n", r"store\.urll: expected one of the keys url, user, .*, got an unknown key"),
        ("store = 1\n", r"store: expected a table, got 1 \(a whole number\)"),
        ("[store]\nurl = 1\n", r"store\.url: expected text, got 1 \(a whole number\)"),
        ("[data]\nport = '1'\n", r"data\.port: expected a whole number, got '1' \(text\)"),
        ("[data]\nport = true\n", r"data\.port: expected a whole number, got True \(true or false\)"),
        ("[data]\nport = 65536\n", r"data\.port: expected 0 to 65535, got 65536"),
        ("[data]\nbucket_bytes = 1\n", r"data\.bucket_bytes: expected 4096 to 1073741824, got 1"),
        ("[data]\nlinks = 'wifi'\n", r"data\.links: expected \"auto\" or \"network\", got 'wifi' \(text\)"),
        ("[log]\nlevel = 3\n", r"log\.level: expected \"debug\" or .*, got 3 \(a whole number\)"),
        ("[timeouts]\noffer = '2s'\n", r"timeouts\.offer: expected a number, got '2s' \(text\)"),
        ("[timeouts]\noffer = false\n", r"timeouts\.offer: expected a number, got False \(true or false\)"),
        ("[timeouts]\noffer = nan\n", r"timeouts\.offer: expected a number, got nan \(a number\)"),
        ("[job]\nflaps = 1\n", r"job\.flaps: expected 2 or more, got 1"),
        ("[job]\nmax_dirty = -1\n", r"job\.max_dirty: expected 0 or more, got -1"),
        ("[timeouts]\noffer = 0\n", r"timeouts\.offer: expected more than 0 seconds, got 0\.0"),
        ("[hook]\nuids = [1, 'root']\n", r"hook\.uids: expected a list of whole numbers, 0 or more, got .*\(a list\)"),
        ("[hook]\nuids = [-1]\n", r"hook\.uids: expected a list of whole numbers, 0 or more"),
        ("[hook]\nsocket = ''\n", r"hook\.socket: expected a path of 1 to 107 bytes, got 0 bytes"),
        (f"[hook]\nsocket = '/{'x' * 107}'\n", r"hook\.socket: expected a path of 1 to 107 bytes, got 108 bytes"),
        ("[metrics]\nlisten = '9464'\n", r"metrics\.listen: expected \"host:port\" or \"\", got '9464'"),
        ("[store]\nlisten = '2379'\n", r"store\.listen: expected \"host:port\" or \"\", got '2379'"),
        ("[node]\nname = 'a/b'\n", r"node\.name: expected a name without '/', got 'a/b'"),
        ("[node]\nstate_dir = ''\n", r"node\.state_dir: expected a path"),
        ("[store]\nurl = ''\n", r"store\.url: expected a URL"),
        (
            "[store]\nlease_ttl = 5\n",
            r"store\.keepalive: expected with store\.request_timeout less than store\.lease_ttl \(5 s\)",
        ),
        ("[store\n", "config file: expected TOML, got .*refitd.toml"),
    ],
)
def test_a_bad_file_is_told_by_its_key(tmp_path: pathlib.Path, text: str, message: str) -> None:
    """Unknown keys, wrong types and senseless values name section.key, what was expected and what came."""
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, text), {})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"REFITD_STORE__URLL": "x"}, r"store\.urll: expected one of the keys"),
        ({"REFITD_STOR__URL": "x"}, "stor: expected one of the sections"),
        ({"REFITD_DATA__PORT": "http"}, r"data\.port: expected a whole number, got 'http' \(text\)"),
        ({"REFITD_DATA__PORT": ""}, r"data\.port: expected a whole number, got '' \(text\)"),
        ({"REFITD_TIMEOUTS__OFFER": "Infinity"}, r"timeouts\.offer: expected a number"),
    ],
)
def test_a_bad_environment_is_told_too(environ: dict[str, str], message: str) -> None:
    """Variables of ours that are wrong are refused like keys of the file."""
    with pytest.raises(ConfigError, match=message):
        load(None, environ)


def test_a_flag_for_an_unknown_key_is_refused() -> None:
    """An override must name a key that exists."""
    with pytest.raises(ConfigError, match=r"node\.colour: expected one of the keys name, domain, state_dir"):
        load(None, {}, {"node.colour": "red"})


def test_a_missing_file_is_told(tmp_path: pathlib.Path) -> None:
    """A file that cannot be read is a ConfigError with the reason."""
    with pytest.raises(ConfigError, match=r"config file: expected a readable file, got .*none\.toml \(No such file"):
        load(tmp_path / "none.toml", {})


def test_a_secret_in_the_url_is_refused_and_not_repeated() -> None:
    """Passwords belong in files; the error does not print them."""
    with pytest.raises(ConfigError) as caught:
        load(None, {"REFITD_STORE__URL": "etcd://refitd:hunter2@host:2379"})
    assert caught.value.field == "store.url"
    assert "hunter2" not in str(caught.value)


def test_show_is_a_file_that_loads_back(tmp_path: pathlib.Path) -> None:
    """show() prints every key as TOML, and loading that gives the same configuration."""
    config = load(None, {}, {"node.name": 'quo"te\\ü', "hook.uids": [1, 2], "timeouts.offer": 0.125})
    text = show(config)
    assert load(write(tmp_path, text), {}) == config
    assert "[timeouts]\noffer = 0.125\n" in text
    assert "uids = [1, 2]\n" in text


def test_every_key_is_documented() -> None:
    """docs/config.md has a row for each key with its default."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "config.md").read_text()
    for section in dataclasses.fields(Config):
        values: Any = getattr(Config(), section.name)
        for key in dataclasses.fields(values):
            row = re.search(rf"^\| `{section.name}\.{key.name}` \| (.*?) \|", page, re.MULTILINE)
            assert row, f"{section.name}.{key.name}"
            default = getattr(values, key.name)
            if default not in ("", ()):
                assert row[1] == f"`{default}`"


@pytest.mark.parametrize(("text", "expected"), [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::]:9464", ("::", 9464))])
def test_listen_addresses(text: str, expected: tuple[str, int]) -> None:
    """host:port and [v6]:port are read."""
    assert split_listen(text) == expected
