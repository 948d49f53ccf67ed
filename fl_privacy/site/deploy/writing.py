"""Writing of a deployment: a folder with the files for each machine."""

import ipaddress
import json
import re
import secrets
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from string import Template

from fl_privacy.checks import one_of, whole
from fl_privacy.errors import UserError
from fl_privacy.files import make_private_folder, write_private, write_whole
from fl_privacy.site.deploy.certificates import make_authority, make_node_key, make_server_certificate
from fl_privacy.site.gate import READY

KEY_BYTES = 32
FIRST_RUNTIME_PORT = 9100
"""Loopback port between the first SuperNode and its worker; each further node takes the next port."""

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST_HOST = 253


@dataclass(frozen=True)
class Deployment:
    """Settings of a deployment that :func:`write_deployment` wrote; nodes reach the SuperLink at ``host``."""

    folder: Path
    host: str
    port: int
    nodes: int

    @classmethod
    def read(cls, folder: Path) -> "Deployment":
        try:
            held = json.loads((folder / "deployment.json").read_text())
            return cls(folder.resolve(), str(held["host"]), int(held["port"]), int(held["nodes"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} is expected to be written by `fl-privacy deploy {folder}`, but holds no deployment.json;"
                " write it first."
            ) from error

    @property
    def authority(self) -> tuple[Path, Path]:
        return self.folder / "ca" / "ca.crt", self.folder / "ca" / "ca.key"

    @property
    def superlink(self) -> Path:
        return self.folder / "superlink"

    @property
    def app(self) -> Path:
        return self.folder / "app"

    def node(self, number: int) -> Path:
        return self.folder / f"node-{number}"


def write_deployment(folder: Path, *, nodes: int, host: str, port: int, policy: str = "") -> Path:
    """Write all that a Flower federation of one SuperLink and ``nodes`` SuperNodes needs; return the README's path.

    Keys, certificates, scripts, services and an app go into ``folder``, which only its owner may access; existing
    secrets are kept. ``host``, ``port``: address of the SuperLink. A ``policy``, one of ``site.gate.READY``, becomes
    the first site.yaml of each node, which limits what its app receives and sends. ``UserError`` if a value is out of
    range, or the folder was written for another host.
    """
    if policy:
        one_of("--policy", policy, READY)
    whole("--nodes", nodes, at_least=1, at_most=10_000, example=4)
    whole("--port", port, at_least=1, at_most=65535, example=8000)
    if not _is_host(host):
        raise UserError(f"--host is expected to be a name or an address, but got {host!r}; try localhost.")
    deployment = Deployment(folder.resolve(), host, port, nodes)
    if (folder / "deployment.json").exists() and (old := Deployment.read(folder)).host != host:
        raise UserError(f"{folder} is expected to be for {host}, but was written for {old.host}; take another folder.")
    make_private_folder(folder, folder)
    _write_keys(deployment)
    _write_texts(deployment)
    if policy:
        ready = (files("fl_privacy.site.gate") / "policies" / f"{policy}.yaml").read_text(encoding="utf-8")
        own = ready.replace("~/.local/share/fl_privacy/ledger", "ledger/ledger").replace("reads: []", "reads: [data]")
        for node in map(deployment.node, range(nodes)):
            make_private_folder(node / "data", node / "data")
            if not (node / "site.yaml").exists():
                write_private(node / "site.yaml", own)
    content = {key: value for key, value in asdict(deployment).items() if key != "folder"}
    write_whole(folder / "deployment.json", json.dumps(content, indent=1) + "\n")
    return folder / "README.md"


def _write_keys(deployment: Deployment) -> None:
    certificate, key = deployment.authority
    for room in (certificate.parent, deployment.superlink, *map(deployment.node, range(deployment.nodes))):
        make_private_folder(room, room)
    if not key.exists():
        make_authority(certificate, key)
    server = deployment.superlink / "superlink.crt", deployment.superlink / "superlink.key"
    if not server[1].exists():
        make_server_certificate(*server, host=deployment.host, authority=deployment.authority)
    for number in range(deployment.nodes):
        node = deployment.node(number)
        if not (node / "node.key").exists():
            make_node_key(node / "node.key", node / "node.pub")
        if not (node / "state.key").exists():
            write_private(node / "state.key", secrets.token_bytes(KEY_BYTES))
    for room in (deployment.superlink, *map(deployment.node, range(deployment.nodes))):
        shutil.copyfile(certificate, room / "ca.crt")


def _write_texts(deployment: Deployment) -> None:
    host = f"[{deployment.host}]" if ":" in deployment.host else deployment.host
    values = {"host": host, "port": deployment.port, "nodes": deployment.nodes}
    folder, last = deployment.folder, deployment.nodes - 1
    for name in ("README.md", "Dockerfile"):
        _write(folder / name, name, values | {"last": last})
    if not (folder / "constraints.txt").exists():
        write_whole(folder / "constraints.txt", "".join(f"{one}\n" for one in installed_versions()))
    _write(folder / "register.sh", "register.sh", values)
    _write(deployment.superlink / "start.sh", "superlink.sh", values)
    _write(deployment.superlink / "fl-privacy-superlink.service", "superlink.service", values)
    services = []
    for number in range(deployment.nodes):
        node, mine = deployment.node(number), values | {"number": number, "runtime": FIRST_RUNTIME_PORT + number}
        _write(node / "start.sh", "node.sh", mine)
        _write(node / f"fl-privacy-node-{number}.service", "node.service", mine)
        services.append(_text("compose-node.yaml", mine))
    _write(folder / "compose.yaml", "compose.yaml", values | {"node_services": "".join(services)})
    _write(folder / "flwr" / "config.toml", "config.toml", values | {"ca": json.dumps(str(deployment.authority[0]))})
    _write(folder / "app" / "pyproject.toml", "app.toml", values)


def installed_versions() -> list[str]:
    """Return ``name==version`` of this package and of its installed dependencies, for a container image."""
    found, waiting = dict[str, str](), ["fl-privacy"]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        try:
            about = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = about["Version"].partition("+")[0]  # torch's +cpu is from another index
        waiting += [line[0].lower() for line in map(_NAME.match, about.get_all("Requires-Dist", [])) if line]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _write(path: Path, template: str, values: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_whole(path, _text(template, values))
    if path.suffix == ".sh":
        path.chmod(0o755)


def _text(template: str, values: dict[str, object]) -> str:
    text = (files("fl_privacy.site.deploy") / "templates" / template).read_text(encoding="utf-8")
    return _Template(text).substitute(values)


class _Template(Template):
    delimiter = "@"  # ``${name}`` is of shell and compose files


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.split(".")
        named = len(text) <= _LONGEST_HOST and all(map(_LABEL.fullmatch, labels))
        return named and not labels[-1].isdigit()  # 1.2.3 and 1.2.3.400 are no addresses
    return "%" not in text
