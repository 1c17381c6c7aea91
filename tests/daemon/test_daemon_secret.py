"""The job's secret: where it may come from, and what its proofs are good for."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.config import Config, load
from refitd.daemon.secret import Secret, load_secret
from refitd.errors import ConfigError

EDGE = {"kind": "edge", "job": "j", "lane": "r0", "token": 3, "src": "trainer/a/0"}


def config(**values: Any) -> Config:
    return load(
        None, {}, {"store.url": "etcd://127.0.0.1:1", **{key.replace("__", "."): v for key, v in values.items()}}
    )


def written(folder: Path, data: bytes = b"0123456789abcdef\n", mode: int = 0o640) -> str:
    path = folder / "secret"
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def test_a_proof_is_hmac_sha256_over_length_prefixed_words() -> None:
    """The format that other versions must keep."""
    words = [b"edge", b"j", b"r0", b"3", b"trainer/a/0"]
    message = b"".join(len(word).to_bytes(4, "big") + word for word in words)
    assert Secret(b"k" * 16).edge("j", "r0", 3, "trainer/a/0") == hmac.digest(b"k" * 16, message, hashlib.sha256).hex()


@given(st.binary(min_size=16, max_size=40), st.sampled_from(["job", "lane", "token", "src"]), st.text(max_size=9))
def test_a_proof_is_good_for_one_edge_only(key: bytes, field: str, other: str) -> None:
    """Right secret and right edge: let in. Any other secret, or any other edge: not."""
    secret = Secret(key)
    hello = {**EDGE, "secret": secret.edge("j", "r0", 3, "trainer/a/0")}
    assert secret.proves(hello)
    assert not Secret(key + b"x").proves(hello)
    assert secret.proves({**hello, field: other}) == (other == str(EDGE[field]))


def test_words_cannot_be_shifted_from_one_field_to_the_next() -> None:
    """("ab", "c") and ("a", "bc") have other proofs."""
    secret = Secret(b"k" * 16)
    assert secret.edge("ab", "c", 3, "s") != secret.edge("a", "bc", 3, "s")
    assert not secret.proves({"kind": "blob", "digest": "d", "secret": secret.edge("j", "r0", 3, "d")})
    assert secret.proves({"kind": "blob", "digest": "d", "secret": secret.blob("d")})


@pytest.mark.parametrize("shown", [None, 17, "", "ü", "\ud800", ["a"]])
def test_whatever_is_shown_as_a_proof_is_judged(shown: object) -> None:
    """Nothing that JSON can hold raises."""
    assert not Secret(b"k" * 16).proves({**EDGE, "secret": shown})


def test_the_file_is_the_secret_without_its_line_end(tmp_path: Path) -> None:
    """Daemons that read the same bytes understand each other."""
    ours = load_secret(config(data__secret_file=written(tmp_path)))
    assert ours.blob("d") == Secret(b"0123456789abcdef").blob("d")


@pytest.mark.parametrize(
    ("data", "mode", "got"),
    [(b"short\n", 0o600, "5 bytes in"), (b"", 0o600, "0 bytes in"), (b"x" * 5000, 0o600, "4097 bytes in"),
     (b"x" * 32, 0o644, "with mode 0644"), (b"x" * 32, 0o602, "with mode 0602")],
)  # fmt: skip
def test_a_secret_that_is_none_is_refused(tmp_path: Path, data: bytes, mode: int, got: str) -> None:
    """Too short, empty, too long, readable or writable by everybody."""
    with pytest.raises(ConfigError) as caught:
        load_secret(config(data__secret_file=written(tmp_path, data, mode)))
    assert caught.value.field == "data.secret_file"
    assert got in caught.value.got


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "node-1.example"])
def test_a_port_that_others_can_reach_needs_a_secret(host: str) -> None:
    """Without a file such a daemon does not start."""
    with pytest.raises(ConfigError) as caught:
        load_secret(config(data__host=host))
    assert (caught.value.field, caught.value.got) == ("data.secret_file", f"none, with data.host {host}")


def test_without_a_file_a_lone_daemon_draws_its_own_and_local_ones_share_an_empty_one() -> None:
    """memory:// is one daemon; on loopback several of a test or a demo find each other."""
    lone = {"store__url": "memory://", "data__host": "0.0.0.0"}
    assert load_secret(config(**lone)).blob("d") != load_secret(config(**lone)).blob("d")
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert load_secret(config(data__host=host)).blob("d") == Secret(b"").blob("d")
