"""The Flower app: ``flwr run . --run-config 'overrides="defense=dp_noise attack=idlg"'``."""

import math
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fl_privacy.cli.console import RichMonitor
from fl_privacy.config import RunSettings, compose_run, to_yaml
from fl_privacy.config.foreign import expect_plain
from fl_privacy.errors import UserError
from fl_privacy.experiment.build import build_federation, clients_of
from fl_privacy.experiment.calibration import calibrated
from fl_privacy.experiment.ground_truth import sees_other_images
from fl_privacy.experiment.protocols import plain_loop
from fl_privacy.experiment.run import run_baseline, run_experiment
from fl_privacy.experiment.threat_model import expect_readable_updates
from fl_privacy.federation import ClientSource, Server
from fl_privacy.flower import PrivacyClient, numpy_client_app, run_on_grid
from fl_privacy.flower.node_secrets import SIMULATION_VARIABLE, is_simulation, node_secret
from fl_privacy.flower.records import PARTITION

TIMEOUT = "round-timeout"
AUTHENTICATED = "authenticated-nodes"
"""Keys of the run config."""

DEPLOYED = "deployed"
"""Folder of the runs with deployed clients within ``out``."""

TRUST_VARIABLE = "FL_PRIVACY_TRUST"
"""Environment variable of a node: import paths or modules of the models and defenses that it runs beside those that are
registered, as ``trust=`` on the command line."""

server_app = ServerApp()


@server_app.main()
def run_on_nodes(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config's ``overrides`` describe, training with the clients behind ``grid``."""
    config, monitor = _config(context), RichMonitor(Console(soft_wrap=True))
    expect_readable_updates(config, "The Flower app")
    simulated = is_simulation()
    if not simulated:
        _expect_known_examples(config)
        config = replace(config, out=str(Path(config.out) / DEPLOYED))  # the same, simulated, is another run
    timeout, bound = _seconds(context), bool(context.run_config[AUTHENTICATED])

    def on_grid(server: Server, source: ClientSource, **settings: Any) -> None:
        run_on_grid(grid, server, timeout=timeout, bound=bound, simulated=simulated, **settings)

    run_baseline(config, plain_loop, monitor)  # here: the clients behind the grid do defend themselves
    print(run_experiment(config, on_grid, monitor, simulated=simulated).absolute())


def make_client(context: Context) -> PrivacyClient:
    """The client of the node's partition in the federation that ``overrides`` describe.

    They come over the network: the node builds only what is registered on it, or what its own environment trusts. The
    client draws from the node's own secret, unless the node's environment says that this is a simulation.
    """
    expect_plain(
        _overrides(context),
        _trusted_here(),
        where=f"A run started elsewhere (here {TRUST_VARIABLE} says what is trusted)",
    )
    config = _config(context)
    clients = clients_of(to_yaml(config))
    partition = int(context.node_config[PARTITION])
    if partition not in clients:
        raise UserError(
            f"Partitions 0..{len(clients) - 1} are expected on the nodes, but this one holds {partition};"
            " start as many SuperNodes as federation.clients says."
        )
    client = clients[partition]
    if not is_simulation():
        client = replace(client, seed=node_secret(context), audit_seed=config.seed)
    return PrivacyClient(client, context.state)


client_app = numpy_client_app(make_client, audited=True, simulated=is_simulation)


def _expect_known_examples(config: RunSettings) -> None:
    """Refuse attacks on deployed clients that nobody could judge: what these train on is known to them alone."""
    federation = build_federation(config)
    plan, audit, defense = federation.server.local_plan, federation.audit, federation.defense
    if audit.rounds and (audit.uploads == "update" or sees_other_images(defense, plan, audit.uploads)):
        raise UserError(
            "The examples behind an attacked update are expected to be known, but deployed clients choose and transform"
            " them by secrets of their own; use intercept.uploads=probe without a defense of the data, attack=none, or"
            f" {SIMULATION_VARIABLE}=1 in the environment of simulated nodes and server."
        )


def _seconds(context: Context) -> float:
    value = context.run_config[TIMEOUT]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{TIMEOUT} is expected to be seconds above 0, but got {value!r}; try 600.")
    return value


def _config(context: Context) -> RunSettings:
    return calibrated(compose_run(_overrides(context)))


def _overrides(context: Context) -> list[str]:
    text = str(context.run_config["overrides"])
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"overrides are expected as key=value with closed quotes, but got {text!r}.") from error


def _trusted_here() -> list[str]:
    return os.environ.get(TRUST_VARIABLE, "").replace(",", " ").split()
