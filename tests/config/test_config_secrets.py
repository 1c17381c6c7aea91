"""No secret is ever shown: not in logs, metrics, pages and status, not by `config show`, not in the process's words.

The secrets: etcd's password, the data port's secret, and the TLS key. What the store shows when it is refused is in
`tests/store/test_store_security.py`.
"""

from __future__ import annotations

import json
import pathlib
import urllib.request
from collections.abc import Iterator

import pytest
import trustme

from refitd import cli
from refitd.hook.trainer import connect_trainer
from refitd.store.spawn import spawn_etcd
from refitd.testing import LocalDaemon, free_port, split_layout, wait_until

PASSWORD, SECRET = "correct-horse-battery", "c3RhcGxlLXN0YXBsZS1zdGFwbGU="
PATHS = ("/metrics", "/", "/healthz", "/readyz?job=job")


class Files:
    """Files with the secrets, and what must not be seen of them."""

    def __init__(self, folder: pathlib.Path) -> None:
        authority = trustme.CA()
        cert = authority.issue_cert("127.0.0.1")
        self.ca, self.cert, self.key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        authority.cert_pem.write_to_path(self.ca)
        cert.cert_chain_pems[0].write_to_path(self.cert)
        cert.private_key_pem.write_to_path(self.key)
        self.password, self.secret = str(folder / "password"), str(folder / "secret")
        pathlib.Path(self.password).write_text(PASSWORD + "\n")
        pathlib.Path(self.secret).write_text(SECRET + "\n")
        pathlib.Path(self.secret).chmod(0o600)
        body = cert.private_key_pem.bytes().decode().splitlines()[1:-1]
        self.secrets = (PASSWORD, SECRET, *body)

    def shown_in(self, text: str) -> list[str]:
        """The secrets that a text has, also as JSON or bytes would write them."""
        return [secret for secret in self.secrets if secret in text or secret.encode().hex() in text]


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def plain_etcd() -> Iterator[str]:
    """An etcd that has no users: it refuses every login."""
    process = spawn_etcd()
    yield process.url
    process.stop()


def everything(daemon: LocalDaemon, listen: str) -> str:
    """What a daemon shows: log, pages, status, command line and environment."""
    pages = [urllib.request.Request(f"http://{listen}{path}") for path in PATHS]
    seen = [daemon.log, json.dumps(daemon.status())]
    seen += [pathlib.Path(f"/proc/{daemon.pid}/{name}").read_text(errors="replace") for name in ("cmdline", "environ")]
    for page in pages:
        try:
            with urllib.request.urlopen(page, timeout=20) as answer:
                seen.append(answer.read().decode())
        except urllib.error.HTTPError as refusal:
            with refusal:
                seen.append(refusal.read().decode())
    return "\n".join(seen)


def busy(daemon: LocalDaemon, says: str) -> None:
    """Let a trainer register, so that the daemon uses its store and ``says`` so in its log."""
    with connect_trainer("job", "run", 0, 1, daemon.socket) as trainer:
        trainer.register(split_layout({"w": ((4,), "float32")}, 0, 1))
        wait_until(lambda: says in daemon.log, says, 60)


def test_a_daemon_with_a_password_and_a_secret_shows_neither(files: Files, plain_etcd: str) -> None:
    """Logins that are refused are told in the log, without the password."""
    listen = f"127.0.0.1:{free_port()}"
    config = {
        "store.url": plain_etcd, "store.user": "refitd", "store.password_file": files.password,
        "data.secret_file": files.secret, "metrics.listen": listen, "log.level": "debug",
    }  # fmt: skip
    with LocalDaemon(config=config) as daemon:
        busy(daemon, "authentication is not enabled")  # etcd's words: the password was sent
        seen = everything(daemon, listen)
    assert "refitd_build_info" in seen
    assert files.shown_in(seen + PASSWORD) == [PASSWORD]  # it would be found
    assert files.shown_in(seen) == []


def test_a_daemon_with_a_key_shows_nothing_of_it(files: Files) -> None:
    """An etcd of its own, by TLS: paths are shown, what is in the files is not."""
    listen = f"127.0.0.1:{free_port()}"
    config = {
        "store.url": "etcd+spawn://", "store.listen": f"127.0.0.1:{free_port()}", "store.ca": files.ca,
        "store.cert": files.cert, "store.key": files.key, "data.secret_file": files.secret,
        "metrics.listen": listen, "log.level": "debug",
    }  # fmt: skip
    with LocalDaemon(config=config) as daemon:
        busy(daemon, '"leads"')
        seen = everything(daemon, listen)
    assert files.shown_in(seen) == []


def test_config_show_names_files_and_not_what_is_in_them(
    files: Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`config show` and `config check`, for people and for programs."""
    path = tmp_path / "refitd.toml"
    path.write_text(
        f'[store]\nurl = "etcd://h:1"\nuser = "refitd"\npassword_file = "{files.password}"\nca = "{files.ca}"\n'
        f'cert = "{files.cert}"\nkey = "{files.key}"\n[data]\nsecret_file = "{files.secret}"\n'
    )
    for action in ("show", "check"):
        for more in ((), ("--json",)):
            assert cli.main(["config", action, "--config", str(path), *more]) == 0
    shown = capsys.readouterr()
    assert f'password_file = "{files.password}"' in shown.out
    assert files.shown_in(shown.out + shown.err) == []


@pytest.mark.parametrize(
    ("key", "name"), [("data.secret_file", "secret"), ("store.ca", "key"), ("store.cert", "password")]
)
def test_a_file_that_is_wrong_is_named_and_not_quoted(files: Files, key: str, name: str) -> None:
    """A secret in the wrong place, or open to everybody: the error names the key and the path."""
    pathlib.Path(files.secret).chmod(0o644)
    right = {"store.url": "etcd://127.0.0.1:1", "store.ca": files.ca, "store.cert": files.cert, "store.key": files.key}
    daemon = LocalDaemon(config={**right, key: getattr(files, name)})
    try:
        daemon.launch()
        assert daemon.wait(60) == 78
        said = daemon.log.splitlines()[-1]
        assert said.startswith(f"refitd: {key}: expected ")
        assert getattr(files, name) in said
        assert files.shown_in(daemon.log) == []
    finally:
        daemon.stop()
