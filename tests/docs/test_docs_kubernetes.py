"""The manifests for Kubernetes are YAML, fit together, and hold a configuration that loads."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from pages import DOCS, ROOT

from refitd import cli
from refitd.config import Config, load

FOLDER = DOCS / "examples" / "kubernetes"
JOB, ENGINE, CONTAINERFILE = FOLDER / "job.yaml", FOLDER / "engine.yaml", FOLDER / "Containerfile"
POD = yaml.safe_load(ENGINE.read_text())["spec"]["template"]["spec"]
[SIDECAR], [MAIN] = POD["initContainers"], POD["containers"]
MAP = yaml.safe_load(JOB.read_text())


def environ(container: dict[str, Any]) -> dict[str, str]:
    """The container's variables as the kubelet fills them in."""
    fields = {"metadata.name": "engine-0", "status.podIP": "10.1.2.3"}
    found: dict[str, str] = {}
    for entry in container["env"]:
        value = entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    return found


@pytest.fixture
def config(tmp_path: Any) -> Config:
    """What the sidecar's daemon reads."""
    path = tmp_path / "refitd.toml"
    path.write_text(MAP["data"]["refitd.toml"])
    return load(path, environ(SIDECAR))


def mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_configuration_loads_and_names_the_pod(config: Config) -> None:
    """Every key is one of ours; name and address are the pod's own."""
    assert set(tomllib.loads(MAP["data"]["refitd.toml"])) <= set(Config.__slots__)
    assert (config.node.name, config.data.advertise) == ("engine-0", f"10.1.2.3:{config.data.port}")


def test_the_containers_share_what_they_must(config: Config) -> None:
    """The socket's folder, the PID namespace and the user; and the hook lets that user in."""
    assert POD["shareProcessNamespace"] is True
    assert mounts(SIDECAR)["socket"] == mounts(MAIN)["socket"]
    assert config.hook.socket.startswith(mounts(MAIN)["socket"] + "/")
    assert environ(MAIN)["REFITD_SOCKET"] == config.hook.socket
    assert (POD["securityContext"]["runAsUser"],) == config.hook.uids
    assert f"USER {config.hook.uids[0]}\n" in CONTAINERFILE.read_text()


def test_volumes_ports_and_names_fit_together(config: Config) -> None:
    """Mounts name volumes, volumes name what job.yaml and its command make, probes name ports."""
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(mounts(SIDECAR)) == set(volumes) >= set(mounts(MAIN))
    assert (
        volumes["config"]["configMap"]["name"] == MAP["metadata"]["name"] == volumes["secret"]["secret"]["secretName"]
    )
    ports = {port["name"]: port["containerPort"] for port in SIDECAR["ports"]}
    assert f"0.0.0.0:{ports['metrics']}" == config.metrics.listen
    assert ports["data"] == config.data.port
    assert MAIN["readinessProbe"]["httpGet"]["port"] == ports["metrics"]
    assert volumes["secret"]["secret"]["defaultMode"] & 0o007 == 0  # the daemon refuses what everybody may read


def test_the_secret_has_every_file_that_the_configuration_names(config: Config) -> None:
    """The command above the manifest, and that of the guide, make each file."""
    store, folder = config.store, mounts(SIDECAR)["secret"] + "/"
    named = {store.ca, store.cert, store.key, store.password_file, config.data.secret_file}
    for text in (JOB.read_text(), (DOCS / "kubernetes.md").read_text()):
        command = text.partition(f"kubectl create secret generic {MAP['metadata']['name']}")[2]
        assert {folder + name for name in re.findall(r"--from-file=(\S+)", command)} == named


def test_every_command_is_one_of_ours() -> None:
    """Arguments of the daemon, probe and hook parse; the image begins with the program."""
    commands = [SIDECAR["args"], SIDECAR["startupProbe"]["exec"]["command"][1:]]
    commands.append(SIDECAR["lifecycle"]["preStop"]["exec"]["command"][1:])
    for arguments in commands:
        assert cli._parser().parse_args(arguments).command
    assert 'ENTRYPOINT ["refitd"]' in CONTAINERFILE.read_text()


def test_the_image_copies_what_is_there() -> None:
    """Sources of COPY exist, and the guide names the file."""
    sources = [
        word
        for line in re.findall(r"^COPY (.*) \S+$", CONTAINERFILE.read_text(), re.MULTILINE)
        for word in line.split()
    ]
    assert len(sources) == 5
    assert [name for name in sources if not (ROOT / name).exists()] == []
