"""Real nodes, of which two lie, and a real server that is after the updates of defended ones; `make test-deploy`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.flower import LocalGrid
from fl_privacy.site.deploy.loopback import LoopbackFederation, loopback_federation
from tests.deploy.hostile_app import (
    AUDITED,
    IMAGES,
    LIARS,
    MESSAGES,
    NODES,
    REPLIES_THAT_LIE,
    ROUNDS,
    fedavg,
    trained,
    under_audit,
)
from tests.flower.liars import about, honest_app, rows_of_honest

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 1500.0
APP = """\
[project]
name = "hostile"
version = "0.1.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "tests.deploy.hostile_app:app"
clientapp = "tests.deploy.hostile_app:defended"

[tool.flwr.app.config]
does = ""
out = ""
"""


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[LoopbackFederation]:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text(APP)
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with loopback_federation(LoopbackFederation(tmp_path, None, variables, database=None)) as federation:
        federation.start_superlink()
        yield federation


def start_nodes(federation: LoopbackFederation, app: str, again: str = "", nodes: int = NODES) -> None:
    for number in range(nodes):
        config = {
            "partition-id": number,
            "num-partitions": nodes,
            "fl-privacy-state": str(federation.folder / f"state-{number}"),
        }
        named = ("--app", f"tests.deploy.hostile_app:{app}")
        federation.start_node(f"node-{number}{again}", config, extra=named)
    for number in range(nodes):
        federation.wait_for_node(f"node-{number}{again}")


def start_run(federation: LoopbackFederation, does: str) -> Path:
    out = federation.folder / does
    federation.run(does, federation.folder / "app", {"does": does, "out": str(out)})
    return out


def ended(federation: LoopbackFederation, does: str, out: Path) -> dict[str, Any]:
    federation.wait(does, RUN_SECONDS)
    assert (out / "ended.json").exists(), federation.said(does)[-3000:]
    told = json.loads((out / "ended.json").read_text())
    print(does, told)
    return dict(told)


def test_four_hundred_replies_that_lie_change_nothing(federation: LoopbackFederation, tmp_path: Path) -> None:
    assert REPLIES_THAT_LIE == 400
    start_nodes(federation, "lying", nodes=AUDITED)
    out = start_run(federation, "audit")
    assert ended(federation, "audit", out)["failure"] == ""
    nobody_lies = LocalGrid(range(AUDITED), honest_app(IMAGES))
    alone = trained(fedavg(), nobody_lies)
    assert alone.arrays is not None
    with np.load(out / "weights.npz") as weights:
        assert {name: array.tobytes() for name, array in weights.items()} == {
            name: array.numpy().tobytes() for name, array in alone.arrays.items()
        }
    rows = rows_of_honest(out)
    assert trained(under_audit(tmp_path / "truthful"), nobody_lies).arrays is not None
    truthful = rows_of_honest(tmp_path / "truthful")
    assert len(truthful) == ROUNDS * IMAGES * (AUDITED - len(LIARS)), "each probe of the honest is attacked"
    assert rows.keys() == truthful.keys()
    for name, row in rows.items():
        assert row == {key: about(value) for key, value in truthful[name].items()}


def test_a_hundred_messages_of_a_hostile_server_get_nothing(federation: LoopbackFederation) -> None:
    start_nodes(federation, "defended")
    told = ended(federation, "ask", start_run(federation, "ask"))
    assert told["answered"] + told["refused"] > NODES * MESSAGES // 2 and told["refused"] > 0 and not told["silent"]
    assert told["honest"] >= NODES, "each node goes on"
    assert told["nodes"] == NODES and told["different"] == 1 and told["at once"] >= NODES


def test_nodes_that_are_started_again_give_the_same_bytes(federation: LoopbackFederation) -> None:
    start_nodes(federation, "defended")
    out = start_run(federation, "restart")
    federation.wait_for("restart", (out / "asked").exists, "ask", RUN_SECONDS)
    for number in range(NODES):
        federation.kill(f"node-{number}")
    start_nodes(federation, "defended", "-again")
    (out / "restarted").touch()
    told = ended(federation, "restart", out)
    assert told == {"answered": NODES, "same": True, "other": 0}
