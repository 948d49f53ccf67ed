"""A SuperLink and SuperNodes as processes: authenticated, killed and restarted, refused, overheard.

`make test-deploy`; some minutes.
"""

import contextlib
import json
import shlex
import sqlite3
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fl_privacy.flower._node_memory import NodeMemory
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import build_setup
from fl_privacy.site.deploy.certificates import make_authority, make_node_key
from fl_privacy.site.deploy.loopback import JOINED, START_SECONDS, LoopbackFederation, Secured, loopback_federation
from fl_privacy.site.deploy.writing import Deployment, write_deployment
from tests.deploy.proxy import RecordingProxy, requests, resend

pytestmark = pytest.mark.deploy

NODES, ROUNDS = 4, 10
VICTIM = 1
"""The node that is killed."""

RUN_SECONDS = 600.0
RUNS = {
    "spn": "defense=spn",
    "passports": "model=lenet5 defense=fdl_pp",
    "secagg": "defense=none secure_aggregation=secagg",
}
COMMON = (
    f"federation=fedavg federation.clients={NODES} federation.rounds={ROUNDS} federation.plan.batch_size=32"
    f" federation.plan.lr=0.01 evaluate_every={ROUNDS} attack=none baseline=false device=cpu"
)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder = tmp_path_factory.mktemp("deployment") / "out"
    write_deployment(folder, nodes=NODES, host="localhost", port=8000)
    return Deployment.read(folder)


@pytest.fixture(scope="module")
def federation(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackFederation]:
    """TLS, node authentication, encrypted state; the last node behind a proxy."""
    server = deployment.superlink
    secured = Secured(server / "ca.crt", server / "superlink.crt", server / "superlink.key")
    folder = tmp_path_factory.mktemp("secured")
    with loopback_federation(LoopbackFederation(folder, secured, {"OMP_NUM_THREADS": "1"})) as federation:
        federation.start_superlink()
        for number in range(NODES):
            federation.register(deployment.node(number) / "node.pub")
        yield federation


@pytest.fixture(scope="module")
def proxy(federation: LoopbackFederation) -> Iterator[RecordingProxy]:
    with RecordingProxy(federation.port) as proxy:
        yield proxy


def start(federation: LoopbackFederation, deployment: Deployment, number: int, superlink: str | None = None) -> None:
    config = {
        "partition-id": number,
        "num-partitions": NODES,
        "fl-privacy-state": str(federation.folder / f"state-{number}"),
        "fl-privacy-key": str(deployment.node(number) / "state.key"),
    }
    key = deployment.node(number) / "node.key"
    federation.start_node(f"node-{number}", config, key=key, superlink=superlink)


def rounds_of(out: Path) -> list[dict[str, Any]]:
    lines = [line for file in out.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if row.get("kind", "round") == "round" and "round" in row]


def memories(federation: LoopbackFederation, deployment: Deployment, number: int) -> dict[str, NodeMemory]:
    """Return what node ``number`` keeps, by the folder of the run."""
    key = (deployment.node(number) / "state.key").read_bytes()
    paths = (federation.folder / f"state-{number}").glob("run-*/*.state")
    return {path.parent.name: NodeMemory(path, key) for path in paths}


def test_three_runs_outlive_a_node_that_is_killed(
    federation: LoopbackFederation, deployment: Deployment, proxy: RecordingProxy
) -> None:
    for number in range(NODES):
        start(federation, deployment, number, proxy.address if number == NODES - 1 else None)
    for number in range(NODES):
        federation.wait_for_node(f"node-{number}")
    for name, overrides in RUNS.items():
        asked = f"{COMMON} {overrides} out={federation.folder / name}"
        waits = {"round-timeout": 90, "reconnect-timeout": 150}
        federation.run(f"run-{name}", deployment.app, {"overrides": asked, "authenticated-nodes": True, **waits})

    private = ("spn", "passports")
    federation.wait_for(
        "run-spn",
        lambda: all(len(rounds_of(federation.folder / name)) >= 3 for name in private),
        "reach its third round",
        RUN_SECONDS,
    )
    federation.kill(f"node-{VICTIM}")
    time.sleep(2)  # its worker notices
    before = {run: memory.load().tensors for run, memory in memories(federation, deployment, VICTIM).items()}
    start(federation, deployment, VICTIM)
    for name in RUNS:
        federation.wait(f"run-{name}", RUN_SECONDS)

    for name in RUNS:
        rows = rounds_of(federation.folder / name)
        assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1)), federation.said(f"run-{name}")[-2000:]
        assert len(list((federation.folder / name).rglob("summary.json"))) == 1
        assert VICTIM in rows[-1]["clients"], "the node is back"
    after = memories(federation, deployment, VICTIM)
    others = memories(federation, deployment, 0)
    answered_above_chance = 0
    for run, old in before.items():
        new, foreign = after[run].load().tensors, others[run].load().tensors
        assert new.keys() == old.keys()
        for name, tensor in old.items():
            if tensor.numel() >= 500:  # smaller ones may lie together by chance
                answered_above_chance += 1
                assert distance(new[name], tensor) < 0.5 * distance(new[name], foreign[name]), (run, name)
    assert answered_above_chance == 4, "the head that SPN trains and its codes, and two passports"
    assert "CERTIFICATE_VERIFY_FAILED" not in federation.said("node-0")


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm())


def test_what_nodes_keep_is_sealed_and_their_own(federation: LoopbackFederation, deployment: Deployment) -> None:
    kept = [path for path in federation.folder.glob("state-*/**/*") if path.is_file()]

    assert len(kept) >= NODES * 3
    for path in kept:
        assert path.stat().st_mode & 0o077 == 0
        content = path.read_bytes()
        assert content.startswith(b"fl-privacy sealed 1\n") or (path.suffix == ".lock" and not content)


def test_strangers_are_refused(federation: LoopbackFederation, deployment: Deployment, tmp_path: Path) -> None:
    make_node_key(tmp_path / "stranger", tmp_path / "stranger.pub")
    make_authority(tmp_path / "other.crt", tmp_path / "other.key")
    once = ("--max-retries", "1", "--patience", "0")

    federation.start_node("unregistered", {}, key=tmp_path / "stranger", extra=once)
    known = deployment.node(0) / "node.key"
    federation.start_node("misled", {}, key=known, authority=tmp_path / "other.crt", extra=once)

    assert federation.wait("unregistered", 90) == 1
    assert "Failed to activate SuperNode" in federation.said("unregistered")
    assert federation.wait("misled", 90) == 1
    assert "CERTIFICATE_VERIFY_FAILED" in federation.said("misled")


def test_recorded_tls_is_no_use_to_who_sends_it_again(federation: LoopbackFederation, proxy: RecordingProxy) -> None:
    longest = max(proxy.connections, key=lambda connection: len(connection.said("node")))
    assert len(longest.said("node")) > 10_000

    port, _ = resend(federation.port, longest.said("node"))

    assert f"127.0.0.1:{port} " not in federation.said("superlink"), "no request was read"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of two nodes and of the server; a class is missing on one of them."""
    rng = np.random.default_rng(0)
    roots = [tmp_path_factory.mktemp(f"images-{number}") for number in range(3)]
    for number, root in enumerate(roots):
        for label, name in enumerate(("bird", "cat", "dog")):
            if number == 0 and name == "cat":
                continue
            (root / name).mkdir()
            for index in range(12):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                pixels[:, :, label] //= 4
                Image.fromarray(pixels).save(root / name / f"{index}.png")
    return roots


def test_nothing_private_is_on_the_wire_in_plain_text(
    deployment: Deployment, folders: list[Path], tmp_path: Path
) -> None:
    """Nodes with folders of their own; the proxy hears every byte between them and the SuperLink, and repeats some."""
    overrides = (
        "data=image_folder data.image_size=32 data.channels=3 data.classes=[bird,cat,dog] federation=fedavg"
        f" federation.clients=2 federation.rounds=3 federation.plan.batch_size=8 data.root={folders[2]} device=cpu"
        " attack=none baseline=false evaluate_every=3"
    )
    with loopback_federation(LoopbackFederation(tmp_path)) as federation, RecordingProxy(federation.port) as proxy:
        federation.start_superlink()
        for number in range(2):
            config = {
                "partition-id": number,
                "num-partitions": 2,
                "data-path": str(folders[number]),
                "fl-privacy-state": str(tmp_path / f"state-{number}"),
            }
            federation.start_node(f"node-{number}", config, superlink=proxy.address)
        for number in range(2):
            federation.wait_for_node(f"node-{number}")
        for name in ("spn", "passports"):
            config = {"overrides": f"{overrides} {RUNS[name]} out={tmp_path / name}", "own-data": True}
            federation.run(name, deployment.app, {**config, "authenticated-nodes": False, "round-timeout": 90})
        federation.wait_for("spn", lambda: bool(rounds_of(tmp_path / "spn")), "train a round", RUN_SECONDS)
        recorded = [c.said("node") for c in list(proxy.connections)]
        old = [request for said in recorded for request in requests(said, b"/v1/fleet/push-messages")]
        assert len(old) >= 4, "two nodes said who they are and replied in round 1"
        for request in old:
            resend(federation.port, request)
        for name in ("spn", "passports"):
            federation.wait(name, RUN_SECONDS)
            rows = rounds_of(tmp_path / name)
            assert [row["round"] for row in rows] == [1, 2, 3], federation.said(name)[-2000:]
            assert all(row["clients"] == [0, 1] and not row["excluded"] for row in rows), "old replies change nothing"
        wire = proxy.wire()

    for name in ("spn", "passports"):
        first = build_setup(compose_run(shlex.split(f"{overrides} {RUNS[name]}"))).server.state.parameters
        assert all(is_heard(wire, tensor) for tensor in first.values() if tensor.numel() >= 64), "what is sent is found"
    secrets = private_pieces(tmp_path, folders)
    assert len(secrets) > 100
    for what, piece in secrets:
        assert piece not in wire, what


def test_a_node_joins_again_when_the_superlink_s_database_was_locked(tmp_path: Path) -> None:
    """Flower ends the node's heartbeats, or its loop over messages, at the first reply of status 500."""
    with loopback_federation(LoopbackFederation(tmp_path)) as federation:
        federation.start_superlink()
        federation.start_node("node", {"partition-id": 0, "num-partitions": 1})
        federation.wait_for_node("node")
        with contextlib.closing(sqlite3.connect(tmp_path / "superlink.db", isolation_level=None)) as lock:
            lock.execute("BEGIN IMMEDIATE")
            said = partial(federation.said, "node")
            federation.wait_for("node", lambda: "gets no more messages" in said(), "notice it", 2 * START_SECONDS)
            lock.execute("ROLLBACK")
        federation.wait_for("node", lambda: said().count(JOINED) == 2, "join again", 2 * START_SECONDS)
        assert "database is locked" in federation.said("superlink")


def is_heard(wire: bytes, tensor: Tensor) -> bool:
    values = tensor.numpy().astype("<f4").tobytes()
    return values[:16] in wire


def private_pieces(folder: Path, images: list[Path]) -> list[tuple[str, bytes]]:
    """List what no message may hold: 16 bytes of each private tensor, secrets, files, and pixels."""
    pieces = []
    for path in folder.glob("state-*/**/*"):
        if path.suffix == ".state":
            for name, tensor in NodeMemory(path).load().tensors.items():
                if tensor.is_floating_point() and tensor.numel() >= 4:
                    values = tensor.to(torch.float32).flatten()
                    pieces += [
                        (f"{path}: {name}", values[i : i + 4].numpy().tobytes()) for i in range(0, len(values) - 3, 97)
                    ]
        elif path.is_file() and (content := path.read_bytes()):  # of a lock, nothing
            pieces.append((str(path), content))
    for root in images[:2]:
        for file in root.rglob("*.png"):
            pixels = np.asarray(Image.open(file))
            rows = [pixels[5].tobytes(), pixels[5, :, 0].tobytes()]
            rows += [(pixels[5, :4, 0].astype("<f4") / np.float32(255)).tobytes()]
            pieces += [(str(file), piece) for piece in [file.read_bytes()[-64:], *rows]]
    return pieces
