"""What `.ci/guides` follows literally is checked here for what can be checked in a moment."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
import yaml
from follow import NODES, WORDS, of_node, steps
from pages import DOCS, ROOT, Block, blocks, pages

from refitd.config import load

GUIDES = ("quickstart", "cluster")
EXAMPLES = DOCS / "examples"


def parses(text: str) -> str:
    """What bash says of a script without running it."""
    return subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30).stderr


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_parse(guide: str) -> None:
    """Every word after ``bash`` is known, and each block is a script, also those that are not run."""
    found = [block for block in blocks(DOCS / f"{guide}.md") if block.info.startswith("bash")]
    assert len(found) > 5
    assert {word for block in found for word in block.info.split()[1:]} <= WORDS
    assert [parses(block.text) for block in found] == [""] * len(found)


def test_every_block_has_a_place_and_a_twin() -> None:
    """In the cluster guide each block says where; what systemd does has its other way right after it."""
    found = [block.info.split()[1:] for block in blocks(DOCS / "cluster.md") if block.info.startswith("bash")]
    assert [words[0].startswith("on=") for words in found] == [True] * len(found)
    for words, after in zip(found, [*found[1:], []], strict=True):
        if "systemd" in words:
            assert after == [words[0], "without-systemd"]


def test_each_node_gets_its_own_name_and_address() -> None:
    """Only lines that say so are changed."""
    block = Block("bash on=each", "NAME=node-1 ADDRESS=10.0.0.1   # of this node\nping 10.0.0.1\n")
    assert of_node(block, "node-3") == "NAME=node-3 ADDRESS=10.0.0.3   # of this node\nping 10.0.0.1\n"
    places = [place for place, _text in steps("cluster")]
    assert set(places) == {"all", *NODES}
    assert min(map(places.count, NODES)) >= 5  # blocks for each node


def documents(folder: pathlib.Path) -> dict[str, str]:
    """The files that the cluster guide writes with cat, by path, with the shell's variables filled in."""
    text = "".join(block.text for block in blocks(DOCS / "cluster.md"))
    for variable, value in {"$NAME": "node-1", "$ADDRESS": "10.0.0.1"}.items():
        text = text.replace(variable, value)
    text = re.sub(r"\$\(getent[^)]*\)", "117", text)
    return dict(re.findall(r"^cat > (\S+) <<END\n(.*?)^END$", text, re.MULTILINE | re.DOTALL))


def test_the_files_of_the_cluster_guide_are_good(tmp_path: pathlib.Path) -> None:
    """The configuration loads with the paths of the unit; Prometheus and Grafana get YAML with what the boards need."""
    files = documents(tmp_path)
    (tmp_path / "refitd.toml").write_text(files["/etc/refitd/refitd.toml"])
    config = load(tmp_path / "refitd.toml", {})
    assert config.hook.socket in (ROOT / "systemd" / "refitd.socket").read_text()
    unit = (ROOT / "systemd" / "refitd.service").read_text()
    for path in (config.store.password_file, config.data.secret_file):
        assert path.startswith("/run/credentials/refitd.service/")
        assert f"LoadCredential={pathlib.Path(path).name}:" in unit
    scraped = yaml.safe_load(files["/etc/prometheus/prometheus.yml"])
    assert scraped["scrape_configs"][0]["job_name"] == "refitd"  # as rules and boards expect
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == [f"{ip}:9464" for ip in NODES.values()]
    [source] = yaml.safe_load(files["/etc/grafana/provisioning/datasources/refitd.yaml"])["datasources"]
    assert source["type"] == "prometheus"
    [provider] = yaml.safe_load(files["/etc/grafana/provisioning/dashboards/refitd.yaml"])["providers"]
    assert provider["options"]["path"] == "/usr/share/refitd/dashboards"  # where make install puts the boards
    variables = dict(line.split("=", 1) for line in files["/etc/default/etcd"].splitlines())
    assert variables["ETCD_INITIAL_CLUSTER"] == ",".join(f"{name}=https://{ip}:2380" for name, ip in NODES.items())


def test_excerpts_are_the_examples_words() -> None:
    """A block that names a file of docs/examples is a part of it, and every example is named by a page."""
    named = set()
    for page in pages():
        text = page.read_text()
        named |= {path.name for path in EXAMPLES.rglob("*") if path.name in text}
        for block in blocks(page):
            if match := re.search(r"file=(\S+)", block.info):
                assert block.text in (EXAMPLES / match[1]).read_text()
    assert {path.name for path in EXAMPLES.rglob("*.*")} - named <= {"toy.py"}


def test_scripts_parse() -> None:
    """The scripts of recipes are bash."""
    for script in EXAMPLES.glob("*.sh"):
        assert parses(script.read_text()) == ""
