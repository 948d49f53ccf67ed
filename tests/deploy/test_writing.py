"""What a deployment's folder holds, and that it is kept when it is written again."""

import os
import re
import shlex
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_public_key
from flwr.app import Context, RecordDict, UserConfig

from fl_privacy.errors import UserError
from fl_privacy.flower import node_memory
from fl_privacy.flower.reply_cache import Answers
from fl_privacy.site.deploy import write_deployment
from fl_privacy.site.deploy.certificates import (
    expect_valid,
    make_authority,
    make_server_certificate,
    read_certificate,
)
from fl_privacy.site.deploy.loopback import LoopbackFederation, _expect_sealed, loopback_federation
from fl_privacy.site.deploy.writing import Deployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder = tmp_path_factory.mktemp("deploy") / "out"
    write_deployment(folder, nodes=2, host="fl.example.org", port=9443)
    return Deployment.read(folder)


def test_private_keys_are_their_owner_s_alone(deployment: Deployment) -> None:
    keys = [*deployment.folder.rglob("*.key")]

    assert len(keys) == 2 + 2 * 2
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    rooms = {key.parent for key in keys} | {deployment.folder}
    assert {stat.S_IMODE(room.stat().st_mode) for room in rooms} == {0o700}


def test_node_keys_are_in_flower_s_formats_and_all_different(deployment: Deployment) -> None:
    seen = set()
    for number in range(2):
        node = deployment.node(number)
        private = load_ssh_private_key((node / "node.key").read_bytes(), None)
        public = (node / "node.pub").read_bytes()
        assert private.public_key() == load_ssh_public_key(public)  # type: ignore[union-attr]
        seen |= {public, (node / "state.key").read_bytes()}
        assert len((node / "state.key").read_bytes()) == 32
    assert len(seen) == 4


@pytest.mark.parametrize("host", ["fl.example.org", "localhost", "127.0.0.1"])
def test_the_certificate_is_for_the_host_and_for_loopback(deployment: Deployment, host: str) -> None:
    expect_valid(deployment.superlink / "superlink.crt", deployment.authority[0], host)


def test_wrong_certificates_are_told(deployment: Deployment, tmp_path: Path) -> None:
    certificate, other = deployment.superlink / "superlink.crt", (tmp_path / "ca.crt", tmp_path / "ca.key")
    make_authority(*other)

    with pytest.raises(UserError, match=r"expected to be for elsewhere, but is for fl\.example\.org, localhost"):
        expect_valid(certificate, deployment.authority[0], "elsewhere")
    with pytest.raises(UserError, match="expected to be signed by"):
        expect_valid(certificate, other[0], "localhost")
    with pytest.raises(UserError, match="expected to be a certificate"):
        read_certificate(deployment.authority[1])
    with pytest.raises(UserError, match="expected to be a private key"):
        make_server_certificate(tmp_path / "c", tmp_path / "k", host="h", authority=(other[0], other[0]))


def test_openssl_agrees(deployment: Deployment) -> None:
    openssl = ["openssl", "verify", "-x509_strict", "-verify_hostname", "fl.example.org", "-CAfile"]
    try:
        done = subprocess.run(
            [*openssl, deployment.authority[0], deployment.superlink / "superlink.crt"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no openssl here")
    assert done.returncode == 0, done.stderr


def test_written_again_it_keeps_keys_and_adds_nodes(tmp_path: Path) -> None:
    write_deployment(tmp_path / "out", nodes=1, host="localhost", port=8000)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.key")}

    write_deployment(tmp_path / "out", nodes=2, host="localhost", port=8000)

    assert all(path.read_bytes() == content for path, content in before.items())
    assert (tmp_path / "out" / "node-1" / "node.key").exists()
    with pytest.raises(UserError, match="was written for localhost"):
        write_deployment(tmp_path / "out", nodes=2, host="other", port=8000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "--nodes is expected to be a whole number from 1"),
        ({"port": 0}, "--port is expected"),
        ({"host": "a b; rm"}, "--host is expected to be a name or an address"),
        ({"host": ""}, "--host is expected"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        write_deployment(tmp_path / "out", **{"nodes": 1, "host": "localhost", "port": 8000, **settings})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"holds no deployment\.json"):
        Deployment.read(tmp_path)


def test_scripts_start_what_they_say(deployment: Deployment, tmp_path: Path) -> None:
    """In a shell whose commands only tell how they were called."""
    for name in ("flower-superlink", "fl-privacy", "flwr"):
        fake = tmp_path / name
        fake.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        fake.chmod(0o755)

    def said(script: Path, **variables: str) -> list[str]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        done = subprocess.run([script, "--more"], env=environment, capture_output=True, text=True, check=True)
        return shlex.split(done.stdout)

    node = deployment.node(1)
    superlink = said(deployment.superlink / "start.sh")
    plain, own = said(node / "start.sh"), said(node / "start.sh", DATA="/data/my images")

    assert superlink[:5] == ["flower-superlink", "--host", "127.0.0.1", "--port", "9443"]
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation", "--more"} <= set(superlink)
    assert "--insecure" not in superlink + plain
    assert plain[:4] == ["fl-privacy", "supernode", "--superlink", "fl.example.org:9443"]
    assert f"fl-privacy-state={node}/state" in plain
    assert "data-path=/data/my images" in own
    assert "data-path" not in " ".join(plain)
    registered = said(deployment.folder / "register.sh")
    assert registered.count("register") == 2


def test_services_and_configuration_can_be_read(deployment: Deployment) -> None:
    compose = yaml.safe_load((deployment.folder / "compose.yaml").read_text())
    config = tomllib.loads((deployment.folder / "flwr" / "config.toml").read_text())["superlink"]["deployment"]

    assert set(compose["services"]) == {"superlink", "node-0", "node-1"}
    assert compose["services"]["superlink"]["ports"] == ["127.0.0.1:9443:9443"]
    assert config == {"address": "fl.example.org:9443", "root-certificates": str(deployment.authority[0])}
    for unit in deployment.folder.rglob("*.service"):
        assert f"ExecStart=/opt/fl-privacy/{unit.parent.name}/start.sh" in unit.read_text()
    written = [path.read_text() for path in deployment.folder.rglob("*") if path.suffix in (".sh", ".md", ".yaml")]
    assert not any("@{" in text for text in written)


NO_HOSTS = ("1.2.3.4:80", "a..b", "ex:ample", "-a", "a b", "1.2.3", "1.2.3.400", "", "fe80::1%eth0", "a" * 64)


@pytest.mark.parametrize("host", NO_HOSTS)
def test_what_is_no_host_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--host is expected"):
        write_deployment(tmp_path / "out", nodes=1, host=host, port=8000)


@pytest.mark.parametrize("host", ["::1", "2001:db8::7", "10.0.0.1", "localhost", "fl-1.example.org"])
def test_names_and_addresses_of_both_versions_are_taken(host: str, tmp_path: Path) -> None:
    write_deployment(tmp_path / "out", nodes=1, host=host, port=8000)
    assert Deployment.read(tmp_path / "out").host == host


def test_the_image_is_built_of_versions_that_are_known(deployment: Deployment) -> None:
    pinned = (deployment.folder / "constraints.txt").read_text().splitlines()
    assert all(line.count("==") == 1 and "+" not in line for line in pinned)
    assert {"torch", "flwr", "fl-privacy"} <= {line.partition("==")[0] for line in pinned}
    image = (deployment.folder / "Dockerfile").read_text()
    assert "--constraint constraints.txt" in image
    assert re.search(r"^ARG IMAGE=python:\d+\.\d+\.\d+-slim-\w+\nFROM \$\{IMAGE\}$", image, re.MULTILINE)


def _built(deployment: Deployment, folder: Path, *wheels: str) -> tuple[int, str]:
    """Run the commands of the image in ``folder``, in which pip, useradd and removal only tell how they were called."""
    for name in ("pip", "useradd", "rm"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (folder / name).chmod(0o755)
    for name in ("constraints.txt", "README.md"):
        (folder / name).write_text((deployment.folder / name).read_text())
    for wheel in wheels:
        (folder / wheel).touch()
    image = (deployment.folder / "Dockerfile").read_text().replace("\\\n", "")
    (command,) = re.findall(r"^RUN (.*)$", image, re.MULTILINE)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_image_is_built_of_the_wheel_that_is_there(deployment: Deployment, tmp_path: Path) -> None:
    status, said = _built(deployment, tmp_path, "fl_privacy-0.2.0-py3-none-any.whl", "other-1-py3-none-any.whl")
    wheel = tmp_path / "fl_privacy-0.2.0-py3-none-any.whl"
    assert status == 0, said
    assert f"pip install --no-cache-dir --constraint constraints.txt {wheel}[dp,crypto]\n" in said
    pinned = (tmp_path / "constraints.txt").read_text().splitlines()
    assert [line for line in pinned if line.startswith("fl-privacy")] == [f"fl-privacy @ file://{wheel}"]


@pytest.mark.parametrize("wheels", [(), ("other-1-py3-none-any.whl",), ("fl_privacy-1-a.whl", "fl_privacy-2-a.whl")])
def test_the_image_is_not_built_of_an_index_s_package(
    wheels: tuple[str, ...], deployment: Deployment, tmp_path: Path
) -> None:
    status, said = _built(deployment, tmp_path, *wheels)
    assert status == 1 and "pip" not in said.split("expected")[0]
    assert "One fl_privacy-*.whl is expected" in said
    for path in deployment.folder.rglob("*"):
        if path.is_file():
            assert not re.search(rb"pip install [^'/]*fl-privacy|dependencies = .*fl-privacy", path.read_bytes())


def test_the_check_takes_what_a_node_keeps_and_nothing_in_plain_text(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(os.urandom(32))
    (tmp_path / "key").chmod(0o600)
    places = {"fl-privacy-state": str(tmp_path / "state-0"), "fl-privacy-key": str(tmp_path / "key")}
    told = UserConfig({"partition-id": 0, "num-partitions": 1, **places})
    node = Context(5, 1, told, RecordDict(), UserConfig())
    memory = node_memory(node)
    memory.save(memory.load(), after=("train", 1))
    Answers(node).note(1, "train")
    assert _expect_sealed(tmp_path, 1) == "3 files"  # a client's state, its rounds and their lock

    (tmp_path / "state-0" / "notes").write_text("plain")
    (tmp_path / "state-0" / "notes").chmod(0o600)
    with pytest.raises(UserError, match="expected to be encrypted"):
        _expect_sealed(tmp_path, 1)


def test_what_is_late_tells_what_it_said_last_since_its_log_is_temporary(tmp_path: Path) -> None:
    with loopback_federation(LoopbackFederation(tmp_path)) as federation:
        federation.start("node", ["sh", "-c", "echo no key; exec sleep 60"])
        federation.wait_for("node", lambda: bool(federation.said("node")), "speak")
        with pytest.raises(UserError, match="node is expected to end in 0 s, but did not: no key"):
            federation.wait("node", 0.0)
