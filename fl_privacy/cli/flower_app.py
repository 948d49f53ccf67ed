"""The Flower app: ``flwr run . --run-config 'overrides="defense=dp_noise attack=idlg"'``."""

import logging
import os
import shlex
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fl_privacy import checks
from fl_privacy.cli.backends import secure_backend_of, unattacked
from fl_privacy.cli.console import RichMonitor
from fl_privacy.cli.faults import Terminal
from fl_privacy.errors import UserError, say
from fl_privacy.federation import Client, Failure, Round, Server
from fl_privacy.federation.replies import attempt
from fl_privacy.flower import PrivacyClient, numpy_client_app, rounds_on_grid
from fl_privacy.flower._node_memory import SIMULATION_VARIABLE, is_simulation, node_memory, node_secret
from fl_privacy.flower.audit_protocol import is_training
from fl_privacy.flower.backends import NodeRules
from fl_privacy.flower.clients import MaskableClient
from fl_privacy.flower.grids import PromptGrid, in_simulation_engine
from fl_privacy.flower.records import CLIENT_RAISED, DATA_PATH, PARTITION, PARTITIONS
from fl_privacy.flower.reply_cache import in_actor
from fl_privacy.flower.strategy import MOST_NODES, Nodes, partitions_of
from fl_privacy.report.headline import PAGE, run_in_words
from fl_privacy.runs.build import clients_of
from fl_privacy.runs.config import RunSettings, compose_run
from fl_privacy.runs.config.building import plain_settings
from fl_privacy.runs.config.untrusted import expect_no_place, expect_plain
from fl_privacy.runs.ground_truth import sees_other_images
from fl_privacy.runs.privacy import calibrated
from fl_privacy.runs.run import run_baseline, run_experiment
from fl_privacy.runs.run_location import Backend, plain_loop
from fl_privacy.runs.setup import build_setup
from fl_privacy.runs.threat_model import ClientLocation
from fl_privacy.runs.weights import OpenSettingError, client_of_folder

TIMEOUT, RECONNECT = "round-timeout", "reconnect-timeout"
AUTHENTICATED, OWN_DATA_RUN = "authenticated-nodes", "own-data"  # keys of the run config
CLIENTS = "federation.clients"  # setting that by default equals the number of nodes
MOST_OF_OVERRIDES = 1 << 14  # largest number of letters of overrides, which the starter of a run sends to all nodes
TRUST_VARIABLE = "FL_PRIVACY_TRUST"
"""Environment variable of a node: unregistered models and defenses that it may run, like ``trust=``."""

SECAGG = "secagg"
logger: logging.Logger = logging.getLogger(__name__)
server_app = ServerApp()


@server_app.main()
def run_on_nodes(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config states, with the clients behind ``grid``; ``UserError`` if they can't."""
    try:
        overrides = _sized(_overrides(context), lambda: partitions_of(grid))
        config, monitor = calibrated(compose_run(overrides)), RichMonitor(Terminal(soft_wrap=True))
        clients = ClientLocation(
            simulated=is_simulation() or in_simulation_engine(grid),
            own_data=bool(context.run_config.get(OWN_DATA_RUN, False)),
        )
        asked = {
            f"attack={config.choices['attack']}": "_target_" in config.attack,
            f"inference={config.choices['inference']}": config.choices["inference"] != "none",
            "intercept.save=true": config.intercept.save,
            "baseline=true": config.compares,
            "privacy.epsilon": "privacy.epsilon" in str(context.run_config["overrides"]),
        }
        if clients.own_data and (wrong := [name for name, wanted in asked.items() if wanted]):
            raise UserError(
                f"With {OWN_DATA_RUN}=true nothing is expected that needs the clients' data, but got {wrong[0]}; use"
                " attack=none intercept.save=false baseline=false, and noise of a fixed strength."
            )
        if not clients.simulated:
            made = build_setup(config)
            plan, audit, defense = made.server.local_plan, made.audit, made.defense
            if audit.rounds and (audit.uploads == "update" or sees_other_images(defense, plan, audit.uploads)):
                raise UserError(
                    "The examples behind an attacked update are expected to be known, but deployed clients choose and"
                    " transform them by secrets of their own; use intercept.uploads=probe without a defense of the"
                    f" data, attack=none, or {SIMULATION_VARIABLE}=1 in the environment of simulated nodes and server."
                )
            # a simulation with these settings is another run
            config = replace(config, out=str(Path(config.out) / "deployed"))
        backend = _backend_on(PromptGrid(grid), config, context, clients)
        run_baseline(config, plain_loop, monitor)  # here, since the clients behind the grid defend themselves
        folder = run_experiment(config, backend, monitor, clients=clients).absolute()
        say(f"{run_in_words(folder)}\n{folder / PAGE}")
    except UserError as error:
        logger.error("%s", error)
        raise UserError(str(error)) from None


def _sized(overrides: list[str], partitions: Callable[[], int | None]) -> list[str]:
    if any(override.lstrip("+").startswith(f"{CLIENTS}=") for override in overrides):
        return overrides
    number = partitions()
    return overrides if number is None else [*overrides, f"{CLIENTS}={number}"]


def _backend_on(grid: Grid, config: RunSettings, context: Context, clients: ClientLocation) -> Backend:
    timeout = _seconds(context, TIMEOUT)
    rules = NodeRules(
        bound=bool(context.run_config[AUTHENTICATED]),
        simulated=clients.simulated,
        own_data=clients.own_data,
        reconnect=_seconds(context, RECONNECT),
    )
    secure_backend_of(config)  # refuses settings that SecAgg+ does not support
    name = config.secure_aggregation["name"]
    if name not in ("none", SECAGG):
        raise UserError(
            f"The Flower app is expected with secure_aggregation=none or {SECAGG}, but got {name}; use"
            " `fl-privacy run` with backend=loop."
        )

    def secured(server: Server, clients: Any, **settings: Any) -> Generator[Round, None, object]:
        from fl_privacy.flower.secagg import Masking, secure_rounds_on_grid  # noqa: PLC0415

        masking = Masking(**{key: v for key, v in plain_settings(config.secure_aggregation).items() if key != "name"})
        nodes = Nodes(server.clients, **asdict(rules))
        return secure_rounds_on_grid(grid, server, nodes=nodes, masking=masking, timeout=timeout, **settings)

    plain: Backend = lambda server, source, **given: rounds_on_grid(grid, server, timeout=timeout, rules=rules, **given)  # noqa: E731
    return partial(unattacked, secured) if name == SECAGG else plain


@lru_cache(maxsize=8)
def _composed(overrides: tuple[str, ...], trusted: tuple[str, ...], unread: frozenset[str] | None) -> RunSettings:
    """Compose the settings of ``overrides``, with a cache.

    Overrides come from the network: only registered or ``trusted`` classes are built, and paths are refused.
    ``unread``: settings that this node never uses, in which paths are allowed; ``None``: simulation, all paths are
    allowed.
    """
    expect_plain(
        list(overrides), list(trusted), where=f"A run started elsewhere (here {TRUST_VARIABLE} says what is trusted)"
    )
    if unread is not None:
        expect_no_place(list(overrides), where="A run started elsewhere", unread=unread)
    with _hiding_paths():
        return calibrated(compose_run(list(overrides)))


def _is_simulated() -> bool:
    return is_simulation() or in_actor()


def _settings(context: Context) -> RunSettings:
    given, total = _overrides(context), context.node_config.get(PARTITIONS)
    if isinstance(total, int) and 1 <= total <= MOST_NODES:
        given = _sized(given, lambda: total)
    unread = frozenset({"out", "name", *(("data.root",) if DATA_PATH in context.node_config else ())})
    trusted = os.environ.get(TRUST_VARIABLE, "").replace(",", " ").split()
    return _composed(tuple(given), tuple(trusted), None if _is_simulated() else unread)


@contextmanager
def _hiding_paths(*, own_folder: bool = False) -> Iterator[None]:
    """Keep a deployed node's paths from the server: log an error that names one, and raise another without details.

    ``own_folder``: ``True`` does so for every ``UserError``.
    """
    try:
        yield
    except OpenSettingError:
        raise
    except UserError as error:
        if _is_simulated() or not (own_folder or "/" in str(error)):
            raise
        logged, said = "The run asks for what this node can't do", "This node can't do what the run asks for"
        if own_folder:
            logged = said = "The node's data can't be used as the run asks"
        logger.error("%s: %s", logged, error)
        raise UserError(f"{said}; its own log says why.") from None


def make_client(context: Context) -> PrivacyClient:
    """Build the node's client; on a deployed node it is seeded with the node's secret and keeps its state in a file."""
    config = _settings(context)
    client, memory = _client(config, context), None if _is_simulated() else node_memory(context)
    if memory is not None:
        client = replace(client, seed=node_secret(context), audit_seed=config.seed)
    secure = config.secure_aggregation
    make = partial(MaskableClient, clip=secure["clip"]) if secure["name"] == SECAGG else PrivacyClient
    made: PrivacyClient = make(client, memory or context.state)
    made.last_round = config.federation.rounds
    return made


def _client(config: RunSettings, context: Context) -> Client:
    partition, number = int(context.node_config[PARTITION]), config.federation.clients
    if not 0 <= partition < number:
        raise UserError(
            f"Partitions 0..{number - 1} are expected on the nodes, but this one holds {partition};"
            " start as many SuperNodes as federation.clients says."
        )
    own_folder = DATA_PATH in context.node_config
    with _hiding_paths(own_folder=own_folder):
        if own_folder:
            return client_of_folder(config, str(context.node_config[DATA_PATH]), partition)
        return clients_of(config)[partition]


class _NodeApp(ClientApp):
    def __call__(self, message: Message, context: Context) -> Message:
        def answered() -> Message:
            app: ClientApp = _plain_app
            if is_training(message):  # in any spelling: train.default is train to Flower
                config = _settings(context)
                if config.secure_aggregation["name"] == SECAGG:
                    app = _masking_app("_target_" in config.guard)
            return app(message, context)

        reply = attempt(answered)
        return Message(Error(CLIENT_RAISED, reply.reason), reply_to=message) if isinstance(reply, Failure) else reply


@lru_cache(maxsize=2)
def _masking_app(guarded: bool) -> ClientApp:
    from fl_privacy.flower.mods.guard_mod import secagg_guard_mod  # noqa: PLC0415
    from fl_privacy.flower.secagg import masking_client_app  # noqa: PLC0415

    return masking_client_app(make_client, mods=[secagg_guard_mod] if guarded else [])


_plain_app = numpy_client_app(
    make_client,
    audited=lambda c: DATA_PATH not in c.node_config and _settings(c).secure_aggregation["name"] == "none",
    simulated=_is_simulated,
)
client_app = _NodeApp()


def _seconds(context: Context, key: str) -> float:
    value: Any = context.run_config.get(key, 0)
    bound: dict[str, Any] = {"above": 0, "example": 600} if key == TIMEOUT else {"at_least": 0, "example": 120}
    return float(checks.number(f"{key} in seconds", value, **bound))


def _overrides(context: Context) -> list[str]:
    text = str(context.run_config["overrides"])
    if len(text) > MOST_OF_OVERRIDES:
        raise UserError(
            f"At most {MOST_OF_OVERRIDES} letters of overrides are expected, but got {len(text)}; shorten them."
        )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"overrides are expected with closed quotes, but got {text[:200]!r}; close them.") from error
