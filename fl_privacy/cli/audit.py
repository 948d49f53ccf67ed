"""Audit or review any unmodified Flower app: ``fl-privacy audit APP`` and ``fl-privacy review APP``."""

import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_privacy.checks import number, one_of, whole
from fl_privacy.cli.completion import AppPlace, Mirror, NodeConfig, OpenPage, RunConfig
from fl_privacy.cli.jobs import open_in_browser
from fl_privacy.cli.sandbox import Allowed, Sandbox, bounds_of
from fl_privacy.errors import UserError, say, visible
from fl_privacy.files.foreign import expanded

ALL_RIGHTS = (
    "The app runs with all rights of your user: files, network, terminal. --sandbox isolates it; `fl-privacy review`"
    " runs nothing of it."
)

StandIn = Annotated[bool, typer.Option("--stand-in", help="Replace missing data by random examples, and say so.")]
NetworkAlone = Annotated[
    str, typer.Option(metavar="FILE:NAME", help="Audit a network of the project alone, with --stand-in.")
]
Script = Annotated[Path | None, typer.Option(help="Script that starts the simulation, if there is no app format.")]
Clients = Annotated[
    list[Path] | None, typer.Option(help="A script that starts one client; may be given several times.")
]
ClientArgs = Annotated[
    str | None, typer.Option(help="Arguments of each client's script: '--id {partition} --of {nodes}'.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print audit.json; everything else goes to standard error.")]
WithDefense = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEFENSE", help="Run the app again with a defense on each reply: 'dp_noise defense.scale=0.1'."
    ),
]
Isolated = Annotated[
    bool, typer.Option("--sandbox", help="Isolate the app: no network, no files but its own and its data.")
]
Reads = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="Another folder that the sandboxed app may read.")
]
Environment = Annotated[list[str] | None, typer.Option(metavar="NAME", help="An environment variable for the sandbox.")]
OnlyCheck = Annotated[
    bool, typer.Option("--check", help="List what the app needs and what is missing; nothing is run.")
]
Limits = Annotated[str, typer.Option(help="Limits of the sandbox: 'memory_mib=8192 processes=128 seconds=14400'.")]


def audit(  # noqa: PLR0917
    app: AppPlace,
    nodes: Annotated[int | None, typer.Option(help="Clients; by default the app's own number, or 10.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of training; 0 takes the app's own number.")] = 1,
    run_config: RunConfig = None,
    node_config: NodeConfig = None,
    mirror: Mirror = None,
    stand_in: StandIn = False,
    network: NetworkAlone = "",
    with_defense: WithDefense = None,
    script: Script = None,
    server: Annotated[Path | None, typer.Option(help="The script that starts the server.")] = None,
    client: Clients = None,
    server_args: Annotated[str | None, typer.Option(help="Arguments of --script or --server: '--rounds 3'.")] = None,
    client_args: ClientArgs = None,
    out: Annotated[Path, typer.Option(help="Folder of audits.")] = Path("audit"),
    victims: Annotated[int, typer.Option(help="Number of single examples to attack.")] = 8,
    budget: Annotated[str, typer.Option(help="Budget of the attack: quick, standard, thorough.")] = "quick",
    seconds: Annotated[float, typer.Option(help="Time after which no further attack starts.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the attacks and of the app's random streams.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the attacks: auto, cpu, cuda or cuda:1.")] = "cpu",
    as_json: AsJson = False,
    sandbox: Isolated = False,
    reads: Reads = None,
    environment: Environment = None,
    limits: Limits = "",
    check: OnlyCheck = False,
    open_page: OpenPage = False,
) -> None:
    """Run an unmodified Flower app and show what its clients' uploads leak.

    The app's code runs in this process, as `flwr run` would run it. The page lists what is sent in the clear, then what
    can be reconstructed: first from the app's real uploads, then from an upload of one example in one step.
    """
    several = {"run_config": run_config, "node_config": node_config, "defense": with_defense}
    asked = _asked(nodes, rounds, victims=victims, budget=budget, seconds=seconds) | {
        **{name: tuple(given or ()) for name, given in several.items()},
        "seed": whole("--seed", seed, at_least=0, at_most=(1 << 32) - 1, example=0),
        "device": device,
        "mirror": None if mirror is None else str(expanded(mirror).absolute()),
        "stand_in": stand_in,
        "network": network,
        "chosen": {"network": True}
        if network and not check
        else _chosen(script, server, client or (), server_args, client_args),
    }
    _check(app, asked, only=check)
    run: Audited = partial(_audited, app, asked, out)
    if sandbox:
        allowed = Allowed(reads=reads or (), environment=environment or (), bounds=bounds_of(limits))
        run = Sandbox(app, asked, out, allowed).audit
    elif reads or environment or limits:
        raise UserError("--reads, --environment and --limits are expected with --sandbox, but it is not there; add it.")
    else:
        say(ALL_RIGHTS, aside=True)
    print_audit(run, as_json=as_json, open_page=open_page)


def _check(app: Path, asked: dict[str, Any], *, only: bool) -> None:
    """Raise ``UserError`` if the audit can't start; if ``only``, print what the app needs, and exit.

    If no script of the app can be run and synthetic data are allowed, ``asked`` is changed to audit the network alone.
    """
    from fl_privacy.auditing.app.bundle import read_app  # noqa: PLC0415
    from fl_privacy.auditing.app.check import check_app  # noqa: PLC0415
    from fl_privacy.auditing.app.scripts import NoScriptError  # noqa: PLC0415

    if asked["network"] and not asked["stand_in"]:
        raise UserError("--network is expected with --stand-in, which draws its inputs, but it is not there; add it.")
    try:
        found = check_app(read_app(app, asked["chosen"]))
    except NoScriptError as error:
        if only or not asked["stand_in"]:
            raise
        asked |= {"chosen": {"network": True}, "not_run": str(error)}
        return
    if only:
        say(found.in_words())
        raise typer.Exit(1 if found.stops else 0)
    if not asked["stand_in"] and found.stops:
        raise UserError(found.stops)


Audited = Callable[[Callable[[str], None]], tuple[str, Path]]
"""Audit that reports its progress, and returns its summary and page."""


def print_audit(run: Audited, *, as_json: bool, open_page: bool) -> None:
    """Call ``run``, which audits, and print its summary line or, if ``as_json``, the content of ``audit.json``."""
    from fl_privacy.cli.console import Lines  # noqa: PLC0415

    aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with Lines(lambda text: say(text, aside=True), silent=False) as lines, aside:
        line, page = run(lines.tell)
    say(visible(line), aside=as_json)
    if as_json:
        say((page.parent / "audit.json").read_text())
    if open_page:
        open_in_browser(page)


def _asked(nodes: int | None, rounds: int, *, victims: int, budget: str, seconds: float) -> dict[str, Any]:
    one_of("--budget", budget, ("quick", "standard", "thorough"))
    whole("--victims", victims, at_least=1, at_most=1000, example=8)
    number("--seconds", seconds, above=0, example=600.0)
    if nodes is not None:
        whole("--nodes", nodes, at_least=1, at_most=100_000, example=4)
    whole("--rounds", rounds, at_least=0, at_most=100_000, example=1)
    return {"nodes": nodes, "rounds": rounds or None, "victims": victims, "budget": budget, "seconds": seconds}


def _chosen(
    script: Path | None, server: Path | None, clients: Sequence[Path], server_args: str | None, client_args: str | None
) -> dict[str, Any] | None:
    if script is not None and server is not None:
        raise UserError(f"--script or --server is expected, but got both: {script} and {server}; leave one out.")
    server = script or server

    def words(option: str, text: str) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise UserError(
                f"{option} is expected as a command line, but got {text!r}: {error}; close quotes."
            ) from error

    options = {
        "server": None if server is None else str(server),
        "clients": [str(path) for path in clients],
        "server_arguments": None if server_args is None else words("--server-args", server_args),
        "client_arguments": None if client_args is None else words("--client-args", client_args),
    }
    return options if any(value not in (None, []) for value in options.values()) else None


def _audited(app: Path, asked: Mapping[str, Any], out: Path, tell: Callable[[str], None]) -> tuple[str, Path]:
    from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app  # noqa: PLC0415
    from fl_privacy.auditing.app.bundle import read_app  # noqa: PLC0415

    logging.getLogger("flwr").propagate = False  # it writes its own lines
    settings = {**asked, "mirror": None if asked["mirror"] is None else Path(asked["mirror"])}
    done = audit_app(read_app(app, settings.pop("chosen")), AppAuditRequest(**settings, out=out), tell)
    return done.line, done.page


def review(
    app: AppPlace, as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False
) -> None:
    """Review a Flower app without running it: mods, strategies, pinned versions, pickles, network access, settings."""
    from fl_privacy.auditing.app.review import review_app  # noqa: PLC0415

    found = review_app(app)
    say(json.dumps(found.as_plain(), indent=1) if as_json else found.in_words())
