"""Configuration: frozen sections; defaults < TOML file < REFITD_* environment < flags. Unknown keys are refused.

A key is ``section.name`` in errors, ``[section] name`` in the file, ``REFITD_SECTION__NAME`` in the environment.
``REFITD_SOCKET`` is the default of ``hook.socket``. Secrets are never values here, only names of files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import socket
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refitd.errors import ConfigError

_PREFIX = "REFITD_"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Who this daemon is. ``domain``: the ranks joined by NVLink (empty: ``name``); ``state_dir``: its own folder.

    ``devices``: the devices that this daemon alone works with, by their ids, with commas between them.
    """

    name: str = ""
    domain: str = ""
    state_dir: str = ""
    devices: str = ""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The membership store. Times in seconds; ``password_file``, ``ca``, ``cert``, ``key`` are paths.

    ``listen``: the ``host:port`` where an etcd that this daemon spawned serves other daemons too.
    """

    url: str = "memory://"
    user: str = ""
    password_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    listen: str = ""
    lease_ttl: float = 10.0
    keepalive: float = 3.0
    request_timeout: float = 2.0


@dataclass(frozen=True, slots=True)
class HookConfig:
    """The socket for trainers and engines. Empty ``uids``: the daemon's own user and root."""

    socket: str = ""
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Where metrics are served, ``host:port``; empty turns them off, port 0 takes a free one."""

    listen: str = "127.0.0.1:9464"


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The data port. ``links = "network"`` treats each rank as a host of its own; ``bucket_bytes``: of one transfer.

    ``advertise``: the ``host:port`` that other nodes connect to, where it is not ``host`` and the port.
    ``transport``: between hosts; ``auto`` is nccl where all ranks of a lane can use it, else tcp.
    ``path``: who moves the memory of clients that leave it to the daemon, a ``child`` of it or a thread of the client
    (``library``); ``child`` also refuses clients that ask for a thread.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    secret_file: str = ""
    links: Literal["auto", "network"] = "auto"
    transport: Literal["auto", "nccl", "tcp"] = "auto"
    path: Literal["auto", "child", "library"] = "auto"
    bucket_bytes: int = 4 * 1024 * 1024
    verify: Literal["checksum", "reread"] = "checksum"


@dataclass(frozen=True, slots=True)
class TimeoutsConfig:
    """How long each thing may take, seconds."""

    offer: float = 2.0
    heartbeat: float = 1.0
    neighbour: float = 3.0
    progress: float = 3.0
    build: float = 15.0
    mover_ping: float = 2.0
    grace: float = 1.0


@dataclass(frozen=True, slots=True)
class JobConfig:
    """How a job is led. Counts, and times in seconds.

    ``max_dirty``: in_place replicas that may be without whole weights at once; 0 stands for all but one, at least one.
    ``max_lag``: publications that a ready replica may be behind. Joins are taken in once none has come for
    ``join_debounce``, at the latest after ``join_limit``. A node that joins ``flaps`` times within ``flap_window`` is
    parked until it has been quiet for ``park``. Lanes wait ``pause`` for an engine to lend before the next replica has
    its turn. A job without trainers and engines ends after ``ttl``.
    """

    max_dirty: int = 0
    max_lag: int = 1
    join_debounce: float = 0.5
    join_limit: float = 3.0
    flaps: int = 6
    flap_window: float = 60.0
    park: float = 30.0
    pause: float = 10.0
    ttl: float = 3600.0


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs to stderr. ``format = "auto"``: console on a terminal, else JSON."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


@dataclass(frozen=True, slots=True)
class Config:
    """All sections."""

    node: NodeConfig = field(default_factory=NodeConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    hook: HookConfig = field(default_factory=HookConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    job: JobConfig = field(default_factory=JobConfig)
    log: LogConfig = field(default_factory=LogConfig)


_SECTIONS: dict[str, type[Any]] = typing.get_type_hints(Config)
_HINTS: dict[str, dict[str, Any]] = {name: typing.get_type_hints(section) for name, section in _SECTIONS.items()}
_Values = dict[str, dict[str, Any]]


def load(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """The configuration of a TOML file, an environment (None: this process's) and flags (``{"store.url": ...}``).

    Overrides that are None are left out; their strings are read like the environment's. Raises ConfigError naming
    ``section.key``.
    """
    environ = os.environ if environ is None else environ
    values = _defaults(environ)
    if path is not None:
        _merge(values, _from_file(pathlib.Path(path)))
    _merge(values, _from_environ(environ))
    _merge(values, _from_overrides(overrides or {}))
    config = Config(**{name: section(**values[name]) for name, section in _SECTIONS.items()})
    config = dataclasses.replace(
        config, node=dataclasses.replace(config.node, domain=config.node.domain or config.node.name)
    )
    _check(config)
    return config


def show(config: Config) -> str:
    """The configuration as TOML that load() reads back. It holds no secrets: those are in files."""
    lines: list[str] = []
    for name in _SECTIONS:
        lines.append(f"[{name}]")
        section = dataclasses.asdict(getattr(config, name))
        lines += [f"{key} = {_toml(value)}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


def _defaults(environ: Mapping[str, str]) -> _Values:
    state, run = environ.get("XDG_STATE_HOME"), environ.get("XDG_RUNTIME_DIR")
    home_state = f"{environ['HOME']}/.local/state/refitd" if environ.get("HOME") else "/var/lib/refitd"
    system = "/var/lib/refitd" if os.geteuid() == 0 else home_state
    sock = environ.get("REFITD_SOCKET") or (f"{run}/refitd/hook.sock" if run else "/run/refitd/hook.sock")
    values = {name: dataclasses.asdict(section()) for name, section in _SECTIONS.items()}
    values["node"]["name"] = socket.gethostname()
    values["node"]["state_dir"] = f"{state}/refitd" if state else system
    values["hook"]["socket"] = sock
    return values


def _merge(values: _Values, more: Mapping[str, Mapping[str, object]]) -> None:
    for section, keys in more.items():
        values[section].update(keys)


def _from_file(path: pathlib.Path) -> _Values:
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError("config file", "a readable file", f"{path} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config file", "TOML", f"{path}: {error}") from error
    values: _Values = {}
    for section, keys in document.items():
        _known_section(section)
        if not isinstance(keys, dict):
            raise ConfigError(section, "a table", _describe(keys))
        values[section] = {key: _typed(f"{section}.{key}", _hint(section, key), value) for key, value in keys.items()}
    return values


def _from_environ(environ: Mapping[str, str]) -> _Values:
    values: _Values = {}
    for name, text in environ.items():
        section, separator, key = name.removeprefix(_PREFIX).partition("__")
        if not name.startswith(_PREFIX) or not separator:
            continue
        section, key = section.lower(), key.lower()
        values.setdefault(section, {})[key] = _parsed(f"{section}.{key}", _hint(section, key), text)
    return values


def _from_overrides(overrides: Mapping[str, object]) -> _Values:
    values: _Values = {}
    for name, value in overrides.items():
        if value is None:
            continue
        section, _, key = name.partition(".")
        hint = _hint(section, key)
        read = _parsed(name, hint, value) if isinstance(value, str) else _typed(name, hint, value)
        values.setdefault(section, {})[key] = read
    return values


def _known_section(section: str) -> None:
    if section not in _SECTIONS:
        raise ConfigError(section, f"one of the sections {', '.join(_SECTIONS)}", "an unknown section")


def _hint(section: str, key: str) -> Any:
    _known_section(section)
    hints = _HINTS[section]
    if key not in hints:
        raise ConfigError(f"{section}.{key}", f"one of the keys {', '.join(hints)}", "an unknown key")
    return hints[key]


def _parsed(name: str, hint: Any, text: str) -> object:
    """A value from the environment or a flag: text as it is, everything else as TOML or JSON would write it."""
    if hint is str or typing.get_origin(hint) is Literal:
        return _typed(name, hint, text)
    try:
        value = json.loads(text if text.strip() else '""')
    except ValueError:
        value = text
    if hint == tuple[int, ...] and type(value) is int:
        value = [value]
    return _typed(name, hint, value)


def _typed(name: str, hint: Any, value: object) -> object:
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value in choices and isinstance(value, str):
            return value
        raise ConfigError(name, " or ".join(f'"{choice}"' for choice in choices), _describe(value))
    if origin is tuple:
        if isinstance(value, list | tuple) and all(type(part) is int and part >= 0 for part in value):
            return tuple(value)
        raise ConfigError(name, "a list of whole numbers, 0 or more", _describe(value))
    if hint is float and type(value) in (int, float) and math.isfinite(typing.cast("float", value)):
        return float(typing.cast("float", value))
    if hint is not float and type(value) is hint:
        return value
    words = {str: "text", int: "a whole number", float: "a number"}
    raise ConfigError(name, words[hint], _describe(value))


def _describe(value: object) -> str:
    words = {
        str: "text",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        list: "a list",
        dict: "a table",
    }
    return f"{value!r} ({words.get(type(value), type(value).__name__)})"


def _check(config: Config) -> None:
    """Values that have the right type and no sense."""
    _check_times(config)
    _check_counts(config)
    store, data, sock = config.store, config.data, os.fsencode(config.hook.socket)
    if "@" in store.url:
        raise ConfigError("store.url", "no user or password (use store.user, store.password_file)", "one with '@'")
    if not store.url:
        raise ConfigError("store.url", "a URL", '""')
    if not config.node.state_dir:
        raise ConfigError("node.state_dir", "a path", '""')
    if not 0 <= data.port < 65536:
        raise ConfigError("data.port", "0 to 65535", str(data.port))
    if not 4096 <= data.bucket_bytes <= 1 << 30:
        raise ConfigError("data.bucket_bytes", "4096 to 1073741824", str(data.bucket_bytes))
    if not 1 <= len(sock) <= 107:
        raise ConfigError("hook.socket", "a path of 1 to 107 bytes", f"{len(sock)} bytes")
    if config.metrics.listen:
        split_listen(config.metrics.listen)
    if store.listen:
        split_listen(store.listen, "store.listen")
    if data.advertise:
        split_listen(data.advertise, "data.advertise")
    for key, name in (("name", config.node.name), ("domain", config.node.domain)):
        if not name or "/" in name:
            raise ConfigError(f"node.{key}", "a name without '/'", repr(name))


def _check_counts(config: Config) -> None:
    for key, least in (("max_dirty", 0), ("max_lag", 0), ("flaps", 2)):
        if getattr(config.job, key) < least:
            raise ConfigError(f"job.{key}", f"{least} or more", str(getattr(config.job, key)))


def _check_times(config: Config) -> None:
    for section in ("store", "timeouts", "job"):
        for key, value in dataclasses.asdict(getattr(config, section)).items():
            if isinstance(value, float) and value <= 0:
                raise ConfigError(f"{section}.{key}", "more than 0 seconds", str(value))
    store = config.store
    if store.keepalive + store.request_timeout >= store.lease_ttl:
        expected = f"with store.request_timeout less than store.lease_ttl ({store.lease_ttl:g} s)"
        raise ConfigError("store.keepalive", expected, f"{store.keepalive:g} s + {store.request_timeout:g} s")


def split_listen(text: str, name: str = "metrics.listen") -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as a pair. Raises ConfigError naming ``name``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(name, '"host:port" or ""', repr(text))
    return host.strip("[]"), int(port)


def _toml(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
