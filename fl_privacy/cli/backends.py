"""Backends of a federation by their names in ``backend=`` and ``secure_aggregation=``, imported on demand."""

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_privacy.checks.packages import expect_package
from fl_privacy.cli.supernode import OWN_APP
from fl_privacy.errors import UserError, say
from fl_privacy.federation import Audit, ClientSource, Round, Server
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.parallel import expect_answer
from fl_privacy.runs.build import build_inferences
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.config.building import check_arguments, plain_settings
from fl_privacy.runs.destination import Backend, plain_loop
from fl_privacy.runs.server_attack import build_server_attack


def backend_of(config: RunSettings) -> Backend:
    """Build the backend that ``config.backend`` and ``config.secure_aggregation`` describe."""
    if secure := secure_backend_of(config):
        return secure
    settings = plain_settings(config.backend)
    name = settings.pop("name", None)
    if name in ("flower", "ray"):
        expect_package("flwr", f"backend={name}")
    if name == "ray":
        from fl_privacy.flower.backends import rounds_on_ray  # noqa: PLC0415
        from fl_privacy.flower.ray_nodes import check_request  # noqa: PLC0415

        check_arguments(rounds_on_ray, settings, "backend")
        check_request(**{key: value for key, value in settings.items() if key in ("num_cpus", "num_gpus", "actors")})
        expect_answer()
        return partial(rounds_on_ray, **settings)
    if settings:
        raise UserError(f"Unknown key backend.{next(iter(settings))}; backend={name} has no settings.")
    if name == "flower":
        from fl_privacy.flower.backends import rounds_in_process  # noqa: PLC0415

        return rounds_in_process
    if name == "loop":
        return plain_loop
    raise UserError(f"backend.name is expected to be loop, flower or ray, but got {name!r}.")


def secure_backend_of(config: RunSettings) -> Backend | None:
    """Build the backend of ``config.secure_aggregation``, in this process; ``None`` for ``none``.

    Raises:
        UserError: the run asks for something that is impossible with it.
    """
    settings = plain_settings(config.secure_aggregation)
    name = settings.pop("name", None)
    if name == "none":
        return None
    if config.backend["name"] != "loop":
        raise UserError(
            f"secure_aggregation={name} is expected to run in this process, but got backend={config.backend['name']};"
            " use backend=loop."
        )
    attack = build_server_attack(config.server)
    reads_sum = name == "secagg" and attack is not None and attack.reads_sum
    if not reads_sum and ("_target_" in config.attack or config.intercept.save or build_inferences(config.inference)):
        raise UserError(
            f"With secure_aggregation={name} the server sees no single update that could be attacked;"
            " use attack=none, inference=none and intercept.save=false, or server=loki or inconsistent with"
            " secure_aggregation=secagg."
        )
    rounds_of: Any
    if name == "secagg":
        expect_package("flwr", "secure_aggregation=secagg")
        from fl_privacy.flower.secagg import secure_rounds as rounds_of  # noqa: PLC0415
    else:
        from fl_privacy.federation.ckks import encrypted_rounds as rounds_of  # noqa: PLC0415
    check_arguments(rounds_of, settings, "secure_aggregation")
    return partial(unattacked, partial(rounds_of, **settings))


def unattacked(
    rounds_of: Any, server: Server, source: ClientSource, *, audit: Audit, interceptor: Interceptor, **settings: Any
) -> Generator[Round, None, object]:
    """Turn the rounds of ``rounds_of`` into a backend without interception."""
    rounds: Generator[Round, None, object] = rounds_of(server, source(), **settings)
    return rounds


def supernode(
    context: typer.Context,
    client_app: Annotated[
        str, typer.Option("--app", metavar="MODULE:NAME", help="The installed ClientApp that answers.")
    ] = OWN_APP,
    patience: Annotated[
        float, typer.Option("--patience", help="Seconds to try again where the SuperLink does not admit the node.")
    ] = 90.0,
    policy: Annotated[
        str, typer.Option("--policy", metavar="SITE.YAML", help="What may come in and leave, whatever the app says.")
    ] = "",
) -> None:
    """Flower's SuperNode, with one process that answers all messages instead of a new one for each.

    Options are those of `flower-supernode`: `--superlink HOST:PORT --root-certificates ca.crt
    --auth-supernode-private-key KEY --node-config 'partition-id=0 num-partitions=4'`. Of the bundle that a run brings
    nothing is executed: what answers is installed here.

    With --policy (a file, or strict, research or dp) the app runs in a process without network, key or ledger, and a
    gate lets out what the policy names: `fl-privacy policy check SITE.YAML` says it in plain sentences.
    """
    from fl_privacy.cli.supernode import run_node  # noqa: PLC0415

    raise typer.Exit(run_node(context.args, app=client_app, patience=patience, policy=policy))


def deploy(  # noqa: PLR0917
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, or to check.")],
    nodes: Annotated[int, typer.Option("--nodes", help="Number of SuperNodes.")] = 4,
    host: Annotated[str, typer.Option("--host", help="Name or address of the SuperLink for the nodes.")] = "localhost",
    port: Annotated[int, typer.Option("--port", help="Port of the SuperLink.")] = 8000,
    check: Annotated[bool, typer.Option("--check", help="Try what is in OUT on this machine's loopback.")] = False,
    policy: Annotated[
        str, typer.Option("--policy", help="Begin each node's site.yaml as strict, research or dp, and run behind it.")
    ] = "",
) -> None:
    """Write what real nodes need: keys, certificates, commands, systemd units, Docker files, Flower's config entry.

    A folder that is there already keeps its keys and certificates; --nodes may add nodes. Private keys and the folders
    around them are readable by their owner only; OUT/README.md says who gets which.
    """
    from fl_privacy.site.deploy import check_deployment, write_deployment  # noqa: PLC0415

    if check:
        raise typer.Exit(check_deployment(out, say=print))
    say(write_deployment(out, nodes=nodes, host=host, port=port, policy=policy))


def node_cost(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs that finished, or sweeps over such.")],
    memory: Annotated[int, typer.Option("--memory", help="MiB that the node has.")] = 1024,
    core: Annotated[int | None, typer.Option("--core", help="Number of the core it has; the first there is.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Rounds; the figure is their median.")] = 3,
    trust: Annotated[
        list[str] | None, typer.Option("--trust", help="An import path that the runs may name, as pkg.Net.")
    ] = None,
) -> None:
    """Measure a client's round on one core with little memory; the runs' pages then show CPU time, memory, energy.

    A memory cgroup holds the process where this user may make one, else its parent looks and ends it.
    """
    from fl_privacy.site.deploy.device import MIB, measure_nodes  # noqa: PLC0415

    for line in measure_nodes(runs, memory=memory * MIB, core=core, repeats=repeats, trust=trust or ()):
        say(line)
