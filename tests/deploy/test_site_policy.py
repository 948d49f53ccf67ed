"""Real nodes with TLS and keys, of which one site has a policy of its own; `make test-deploy`."""

import json
from pathlib import Path

import pytest

from fl_privacy.site.deploy.loopback import LoopbackFederation, Secured, loopback_federation
from fl_privacy.site.deploy.writing import Deployment, write_deployment
from fl_privacy.site.gate.ledger import Ledger
from fl_privacy.site.gate.policy import read_policy
from tests.deploy.policy_app import EXAMPLES, LOSS

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
ROUNDS, NODES = 2, 2
RUN_SECONDS = 600.0
APP = """\
[project]
name = "behind-a-policy"
version = "0.1.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "tests.deploy.policy_app:server"
clientapp = "tests.deploy.policy_app:client"

[tool.flwr.app.config]
rounds = 1
out = ""
"""
POLICY = f"""
version: 1
receives: {{records: {{arrays: [arrays], config: {{allow: [server-round]}}}}, run_config: any}}
sends:
  train:
    arrays: {{like: received, dtype: float32}}
    metrics: {{allow: {{num-examples: {{integer: true, at_least: 32, round_to: 32}}, train_loss: {{digits: 2}}}}}}
  evaluate: refuse
budget: {{ledger: ledger/ledger, anchor: anchor/anchor}}
app: {{reads: ["{ROOT}"]}}
"""


def test_a_site_with_a_policy_and_one_without_train_together(tmp_path: Path) -> None:
    deployment = Deployment.read(write_deployment(tmp_path / "keys", nodes=NODES, host="localhost", port=8000).parent)
    app, site = tmp_path / "app", tmp_path / "site"
    app.mkdir()
    site.mkdir(mode=0o700)
    (app / "pyproject.toml").write_text(APP)
    (site / "site.yaml").write_text(POLICY)
    (site / "site.yaml").chmod(0o600)
    server = deployment.superlink
    secured = Secured(server / "ca.crt", server / "superlink.crt", server / "superlink.key")
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with loopback_federation(LoopbackFederation(tmp_path / "run", secured, variables)) as federation:
        federation.start_superlink()
        for number in range(NODES):
            node = deployment.node(number)
            federation.register(node / "node.pub")
            extra = ("--app", "tests.deploy.policy_app:client")
            extra += ("--policy", str(site / "site.yaml")) if number == 0 else ()
            federation.start_node(f"node-{number}", {"partition-id": number}, key=node / "node.key", extra=extra)
            federation.wait_for_node(f"node-{number}")
        federation.run("run", app, {"rounds": ROUNDS, "out": str(tmp_path / "heard.json")})
        assert federation.wait("run", RUN_SECONDS) == 0, federation.said("run")[-2000:]
        log = " ".join(federation.said("node-0").split())

    found = json.loads((tmp_path / "heard.json").read_text())
    assert found["last"] == [float(ROUNDS)] * 16, "both sites trained"
    trained = [reply["metrics"] for reply in found["heard"] if reply["kind"] == "train"]
    by_policy = {"num-examples": 32 * round(EXAMPLES / 32), "train_loss": round(LOSS, 2)}
    by_itself = {"num-examples": EXAMPLES, "train_loss": LOSS}
    assert sorted(trained, key=str) == sorted(ROUNDS * [by_policy, by_itself], key=str)
    evaluated = [reply for reply in found["heard"] if reply["kind"] == "evaluate"]
    refused = [reply["error"] for reply in evaluated if "error" in reply]
    assert len(evaluated) == NODES * ROUNDS
    assert len(refused) == ROUNDS
    assert all("The site's policy lets no reply leave" in reason for reason in refused)
    assert "Refused, since" in log
    assert "Nothing bounds what the weights carry" in log
    budget = read_policy(site / "site.yaml").budget
    assert budget is not None
    entries = Ledger(budget.ledger, budget.anchor).entries()
    assert [entry.kind for entry in entries if entry.outcome == "sent"] == ["train"] * ROUNDS
