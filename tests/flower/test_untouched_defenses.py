"""Flower's own mods, strategies and workflows in front of apps that are audited as they are."""

from pathlib import Path

import pytest

from tests.flower.untouched_apps import LISTED, PLAIN, SERVER, audited, rung
from tests.selection import few

STRATEGY = "from flwr.serverapp.strategy import FedAvg"


def mods(*, names: str, imported: str) -> str:
    """Put mods in front of the plain app."""
    made = f"from flwr.clientapp.mod import {imported}\napp = ClientApp(mods=[{names}])"
    return PLAIN.replace("app = ClientApp()", made)


def around(made: str) -> str:
    """Put a strategy of differential privacy around the plain one."""
    name = made.partition("(")[0]
    return SERVER.replace(STRATEGY, f"from flwr.serverapp.strategy import FedAvg, {name}").replace(
        "    result =", f"    strategy = {made}\n    result ="
    )


SECAGG = LISTED.replace(
    "app = ClientApp(client_fn)",
    "from flwr.client.mod import secaggplus_mod\napp = ClientApp(client_fn, mods=[secaggplus_mod])",
)

SECAGG_SERVER = """
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
import torch
from {name}.client import Net
app = ServerApp()
@app.main()
def main(grid, context):
    torch.manual_seed(0)
    initial = ndarrays_to_parameters([v.numpy() for v in Net().state_dict().values()])
    strategy = FedAvg(fraction_evaluate=0.0, min_fit_clients=3, min_available_clients=3, initial_parameters=initial)
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    legacy = LegacyContext(context=context, config=config, strategy=strategy)
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))(grid, legacy)
"""


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    ("name", "client", "server"),
    few(
        [
            (
                "app_fixed",
                mods(names="fixedclipping_mod", imported="fixedclipping_mod"),
                around("DifferentialPrivacyClientSideFixedClipping(strategy, 0.1, 5.0, 2)"),
            ),
            ("app_server_fixed", PLAIN, around("DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 5.0, 2)")),
            (
                "app_adaptive",
                mods(names="adaptiveclipping_mod", imported="adaptiveclipping_mod"),
                around("DifferentialPrivacyClientSideAdaptiveClipping(strategy, 0.1, 2)"),
            ),
            ("app_server_adaptive", PLAIN, around("DifferentialPrivacyServerSideAdaptiveClipping(strategy, 0.1, 2)")),
            ("app_local", mods(names="LocalDpMod(5.0, 5.0, 1e6, 1e-5)", imported="LocalDpMod"), SERVER),
        ],
        1,
        all_but_fuzz=2,
    ),
)
def test_flowers_own_protections_work_under_an_audit(tmp_path: Path, name: str, client: str, server: str) -> None:
    record = audited(tmp_path, name, client, server)
    assert not record["problems"]
    assert rung(record, "gradient")["counts"]["read"] == 2
    one = rung(record, "one")
    assert one["counts"] is not None, one["reason"]
    subjects = ("the clients' LocalDpMod: ", "the server's DifferentialPrivacy")
    assert any(note.startswith(subjects) and "recomputed" in note for note in record["notes"])


def test_masked_uploads_are_no_parameters(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_masked", SECAGG, SECAGG_SERVER, nodes=3)
    assert not record["problems"]
    assert rung(record, "gradient")["counts"]["read"] == 2
    assert rung(record, "one")["counts"] is None
    assert record["tone"] == "open"
    assert record["facts"]["What is uploaded"].startswith("none of the network's parameters")
    assert {finding["severity"] for finding in record["findings"]} == {"look"}
    assert all("one word" in finding["what"] or "key" in finding["what"] for finding in record["findings"])
