"""Follow a guide literally: run its bash blocks, in order, in bare Debian 12 roots (`.ci/guides`).

The words of a block say where it belongs: ``on=all`` once, in the root that every node begins with; ``on=each`` on each
node; ``on=node-2`` there. A node is a layer over that root, with its own processes and host name, on a network that has
the guide's addresses and nothing else. A guide without places is for one machine and a plain user; ``root`` blocks are
root's. Blocks of ``systemd`` are left out (it does not run in such a root), those ``without-systemd`` are run.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

from pages import DOCS, ROOT, Block, blocks

SOURCE = "/usr/src/refitd"
NODES = {"node-1": "10.0.0.1", "node-2": "10.0.0.2", "node-3": "10.0.0.3"}
WORDS = {"systemd", "without-systemd", "root", "on=all", "on=each", *(f"on={node}" for node in NODES)}
PACKAGES = "ca-certificates,systemd,procps"  # what every installed Debian has
BLOCK_SECONDS = 1200
OWN = "# of this node"
# Job control is on, as in a reader's shell. What blocks print goes to stderr; stdout says only that one is done.
_READER = """
set -m; exec 3>&1 1>&2 4<&0 0</dev/null
while IFS= read -r -d '' -u 4 block; do eval "$block"; echo done >&3; done
"""
_SCP = r"""#!/bin/sh
# scp -rp FILES root@ADDRESS:PATH, between folders
to=${3#root@}; exec cp -rp "$2" "/peers/${to%%:*}${to#*:}"
"""


def steps(guide: str) -> Iterator[tuple[str, str]]:
    """(place, commands) of each block to run: ``each`` gives one a node, with what is ``# of this node`` put in."""
    for block in blocks(DOCS / f"{guide}.md"):
        language, *words = block.info.split() or [""]
        if language != "bash" or "systemd" in words:
            continue
        default = "root" if "root" in words else "reader"
        place = next((word.removeprefix("on=") for word in words if word.startswith("on=")), default)
        for node in NODES if place == "each" else [place]:
            yield node, of_node(block, node)


def of_node(block: Block, node: str) -> str:
    """The block's commands with the name and address of ``node`` in lines that say so."""
    lines = block.text.splitlines(keepends=True)
    own = [line.replace("node-1", node).replace(NODES["node-1"], NODES.get(node, "")) for line in lines]
    return "".join(new if OWN in new else line for line, new in zip(lines, own, strict=True))


class Shell:
    """One shell of a reader: blocks go in, one after the other, and the first command that fails ends the run."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        shell = [*command, "bash", "-e", "-o", "pipefail", "-c", _READER]
        self._process = subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def follow(self, text: str) -> None:
        """Run a block. Raises SystemExit where a command of it fails, or nothing ends."""
        print(f"--- {self.name}\n{text}", end="", flush=True)
        assert self._process.stdin
        self._process.stdin.write(text + "\0")
        self._process.stdin.flush()
        deadline = time.monotonic() + BLOCK_SECONDS
        while not select.select([self._process.stdout], [], [], 0.5)[0]:  # what runs in the background keeps it open
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"--- {self.name}: failed in this block")
        assert self._process.stdout
        if self._process.stdout.readline() != "done\n":
            raise SystemExit(f"--- {self.name}: failed in this block")

    def end(self) -> None:
        """End it, and with it everything that was started in it: it is the first process of its own namespace."""
        self._process.kill()
        self._process.wait()


class Machines:
    """Roots below ``folder``: ``all``, and a layer over it for each node once one is asked for."""

    def __init__(self, folder: pathlib.Path, base: pathlib.Path, share: Sequence[str]) -> None:
        self._folder, self._base, self._share = folder, base, share
        self._shells: dict[str, Shell] = {}
        self._networks: dict[str, subprocess.Popen[bytes]] = {}  # a process that holds it, by place
        self._root = self._layer("all", str(base))
        self._furnish(self._root)

    def shell(self, place: str) -> Shell:
        """The shell of a place: ``all`` and ``root`` are root's, ``reader`` is a user's, others are a node's."""
        if place not in self._shells:
            if place in NODES and not self._networks:
                self._connect()
            self._shells[place] = self._open(place)
        return self._shells[place]

    def close(self) -> None:
        """End every process."""
        for shell in self._shells.values():
            shell.end()
        for holder in self._networks.values():
            holder.kill()
            holder.wait()

    def _open(self, place: str) -> Shell:
        root = self._folder / place / "root" if place in NODES else self._root
        pip = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"] if place == "reader" else []
        home = "/home/reader" if user else "/root"
        network = self._inside(place) if place in self._networks else []
        return Shell(
            place,
            [
                *network, "unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", f"--mount-proc={root}/proc",
                "sh", "-c", f'hostname {place} && exec chroot "$@"', "sh", str(root), "env", "-i", *user,
                "env", f"--chdir={SOURCE}", path, f"HOME={home}", "LANG=C.UTF-8", "SYSTEMD_OFFLINE=1", *pip,
            ],
        )  # fmt: skip

    def _connect(self) -> None:
        """A layer and a network of its own for each node, joined by a bridge; others' folders are below /peers.

        One network for all would not do: etcd looks whether a peer comes from the address in its certificate.
        """
        self._hold("switch")
        self._ip("switch", "link", "add", "bridge0", "type", "bridge")
        self._ip("switch", "link", "set", "bridge0", "up")
        roots = {node: self._layer(node, f"{self._folder}/all/changes:{self._base}") for node in NODES}
        for node, address in NODES.items():
            holder = str(self._hold(node).pid)
            self._ip("switch", "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", holder)
            self._ip("switch", "link", "set", node, "master", "bridge0", "up")
            self._ip(node, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                self._ip(node, "link", "set", link, "up")
            for other in NODES:
                peer = roots[other] / "peers" / address
                peer.mkdir(parents=True)
                run("mount", "--bind", str(roots[node]), str(peer))

    def _hold(self, place: str) -> subprocess.Popen[bytes]:
        holder = self._networks[place] = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        return holder

    def _inside(self, place: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._networks[place].pid}/ns/net"]

    def _ip(self, place: str, *arguments: str) -> None:
        run(*self._inside(place), "ip", *arguments)

    def _layer(self, name: str, below: str) -> pathlib.Path:
        parts = {part: self._folder / name / part for part in ("root", "changes", "work")}
        for part in parts.values():
            part.mkdir(parents=True)
        options = f"lowerdir={below},upperdir={parts['changes']},workdir={parts['work']}"
        run("mount", "-t", "overlay", "overlay", "-o", options, str(parts["root"]))
        run("mount", "--rbind", "/dev", f"{parts['root']}/dev")
        for path in self._share:
            target = parts["root"] / path.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            run("mount", "--bind", path, str(target))
            run("mount", "-o", "remount,bind,ro", str(target))
        return parts["root"]

    def _furnish(self, root: pathlib.Path) -> None:
        """This repository, a user, the host's resolver and authorities, and no services at installation."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            target = root / SOURCE.lstrip("/") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        for file in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):
            if os.path.exists(file):
                shutil.copy(file, root / file.lstrip("/"))
        for path, text in (("usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n"), ("usr/local/bin/scp", _SCP)):
            (root / path).write_text(text)
            (root / path).chmod(0o755)
        if not (root / "home/reader").exists():
            run("chroot", str(root), "useradd", "--create-home", "--uid", "1000", "reader")
        run("chown", "-R", "1000:1000", str(root) + SOURCE)


def remove(folder: pathlib.Path) -> None:
    """Delete the roots, never what is mounted in them. Raises SystemExit where something stays mounted."""
    for root in filter(pathlib.Path.is_mount, folder.glob("*/root")):  # a base has a folder of that name, too
        run("umount", "--recursive", "--lazy", str(root))
    if str(folder) in pathlib.Path("/proc/self/mountinfo").read_text():
        raise SystemExit(f"{folder} is left behind: something is still mounted there")
    shutil.rmtree(folder)


def run(*command: str) -> None:
    """Run a command to its end. Raises CalledProcessError."""
    subprocess.run(command, check=True)


def main() -> int:
    """Follow one guide; the exit status is 0 when every command of it succeeded."""
    parser = argparse.ArgumentParser(prog=".ci/guides", description=__doc__)
    parser.add_argument("guide", choices=["quickstart", "cluster"])
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where roots are made (3 GB)")
    parser.add_argument("--base", help="a Debian 12 that debootstrap has made; it is not changed")
    parser.add_argument(
        "--share", action="append", default=[], help="a folder to be seen inside: one that a PIP_ variable names"
    )
    parser.add_argument("--keep", action="store_true", help="leave the roots behind")
    arguments = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="refitd-guide-", dir=arguments.folder))
    base = pathlib.Path(arguments.base or folder / "base")
    if not arguments.base:
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(base))
    machines = Machines(folder, base, arguments.share)
    try:
        for place, text in steps(arguments.guide):
            machines.shell(place).follow(text)
    finally:
        machines.close()
        if not arguments.keep:
            remove(folder)
    print(f"docs/{arguments.guide}.md: every command succeeded")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
