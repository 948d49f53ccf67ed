"""``fl-privacy supernode`` and ``fl-privacy deploy``: a federation of real nodes."""

from pathlib import Path
from typing import Annotated

import typer

from fl_privacy.cli.supernode import OWN_APP
from fl_privacy.errors import say


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
