"""The Flower app: ``flwr run . --run-config 'overrides="defense=dp_noise attack=idlg"'``."""

import os
import shlex
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from omegaconf import DictConfig
from rich.console import Console

from fl_privacy.cli.console import RichMonitor
from fl_privacy.config import compose, participants_of, to_yaml
from fl_privacy.config.check import expect_readable_updates
from fl_privacy.config.foreign import expect_plain
from fl_privacy.errors import UserError
from fl_privacy.federation import Server
from fl_privacy.flower import PrivacyClient, numpy_client_app, run_on_grid
from fl_privacy.flower.records import PARTITION
from fl_privacy.pipeline.backend import ParticipantSource, plain_loop
from fl_privacy.pipeline.calibrate import calibrated
from fl_privacy.pipeline.run import run_experiment, run_twin

TRUST_VARIABLE = "FL_PRIVACY_TRUST"
"""Environment variable of a node: import paths or modules of the models and defenses that it runs beside those that are
registered, as ``trust=`` on the command line."""

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config's ``overrides`` describe, training with the clients behind ``grid``."""
    config, monitor = _config(context), RichMonitor(Console(soft_wrap=True))
    expect_readable_updates(config, "The Flower app")

    def on_grid(server: Server, source: ParticipantSource, **settings: Any) -> None:
        run_on_grid(grid, server, **settings)

    run_twin(config, plain_loop, monitor)  # here: the clients behind the grid do defend themselves
    print(run_experiment(config, on_grid, monitor).absolute())


def make_client(context: Context) -> PrivacyClient:
    """The participant of the node's partition in the federation that ``overrides`` describe.

    They come over the network: the node builds only what is registered on it, or what its own environment trusts.
    """
    expect_plain(
        _overrides(context),
        _trusted_here(),
        where=f"A run started elsewhere (here {TRUST_VARIABLE} says what is trusted)",
    )
    participants = participants_of(to_yaml(_config(context)))
    partition = int(context.node_config[PARTITION])
    if partition not in participants:
        raise UserError(
            f"Partitions 0..{len(participants) - 1} are expected on the nodes, but this one holds {partition};"
            " start as many SuperNodes as federation.clients says."
        )
    return PrivacyClient(participants[partition], context.state)


client_app = numpy_client_app(make_client)


def _config(context: Context) -> DictConfig:
    return calibrated(compose(_overrides(context)))


def _overrides(context: Context) -> list[str]:
    text = str(context.run_config["overrides"])
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"overrides are expected as key=value with closed quotes, but got {text!r}.") from error


def _trusted_here() -> list[str]:
    return os.environ.get(TRUST_VARIABLE, "").replace(",", " ").split()
