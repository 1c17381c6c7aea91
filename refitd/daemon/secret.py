"""The job's secret: where it comes from, and what is shown of it. docs/security.md says who can read it.

It never travels. What a connection shows is a proof (HMAC-SHA256, RFC 2104) of what the connection is for; movers get
the proofs of their own edges and not the secret. Whoever reads a proof on the network can do no more with it than ask
for that document, or offer that edge while the lane still has that token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from typing import Any, NoReturn

from refitd.config import Config
from refitd.errors import ConfigError

FIELD = "data.secret_file"
LEAST_BYTES, MOST_BYTES = 16, 4096
_OTHERS = stat.S_IROTH | stat.S_IWOTH


class Secret:
    """Makes proofs, and checks those that strangers show."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def edge(self, job: str, lane: str, token: int, src: str) -> str:
        """Proof of a data connection from rank ``src`` to a rank of ``lane`` under ``token``."""
        return self._proof("edge", job, lane, str(token), src)

    def blob(self, digest: str) -> str:
        """Proof of a request for the document ``digest``."""
        return self._proof("blob", digest)

    def proves(self, hello: Mapping[str, Any]) -> bool:
        """Whether the first frame of a connection shows the proof of what it asks for; constant time."""
        fields = {name: str(hello.get(name)) for name in ("job", "lane", "token", "src", "digest", "secret")}
        if hello.get("kind") == "edge":
            wanted = self._proof("edge", fields["job"], fields["lane"], fields["token"], fields["src"])
        else:
            wanted = self._proof(str(hello.get("kind")), fields["digest"])
        return hmac.compare_digest(fields["secret"].encode(errors="replace"), wanted.encode())

    def _proof(self, *words: str) -> str:
        parts = [word.encode(errors="replace") for word in words]
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def load_secret(config: Config) -> Secret:
    """The secret of ``data.secret_file``. Raises ConfigError where the file is none, too short, or open to everybody.

    Without a file: a daemon whose store is its own (``memory://``) talks to itself only and draws one for this life;
    on a loopback address daemons share an empty one, which keeps out nobody; anywhere else a file is needed.
    """
    if config.data.secret_file:
        return Secret(_read(config.data.secret_file))
    if config.store.url == "memory://":
        return Secret(secrets.token_bytes(32))
    if not _is_loopback(config.data.host):
        _wrong("a file, since other machines can reach the data port", f"none, with data.host {config.data.host}")
    return Secret(b"")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MOST_BYTES + 1).strip()
    except OSError as error:
        _wrong("a readable file", f"{path} ({error.strerror})")
    if mode & _OTHERS:
        _wrong("a file that only its owner and group may read", f"{path} with mode {stat.S_IMODE(mode):04o}")
    if not LEAST_BYTES <= len(data) <= MOST_BYTES:
        _wrong(f"{LEAST_BYTES} to {MOST_BYTES} bytes", f"{len(data)} bytes in {path}")
    return data


def _wrong(expected: str, got: str) -> NoReturn:
    raise ConfigError(FIELD, expected, got)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
