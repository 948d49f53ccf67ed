"""Define ``fl-privacy`` and its commands."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.logging import RichHandler

from fl_privacy.cli import faults
from fl_privacy.cli.audit import audit, review
from fl_privacy.cli.audit_update import audit_update
from fl_privacy.cli.completion import OpenPage, Overrides, PsnrBelow
from fl_privacy.cli.dp_check import check_dp, check_leakage
from fl_privacy.cli.jobs import LOADING, end_with, run_jobs
from fl_privacy.cli.policy import app as policy_app
from fl_privacy.cli.predict import predict
from fl_privacy.cli.studies import advise, benchmark, trade_off
from fl_privacy.cli.supernode import OWN_APP, run_node
from fl_privacy.cli.watching import watch
from fl_privacy.errors import UserError, say, visible
from fl_privacy.files import UNENCODABLE

DEBUG = "--debug"

app = typer.Typer(
    help="How much of your clients' data can be reconstructed from what they upload, and which defense prevents it at"
    " what cost?",
    epilog="Settings are Hydra overrides: `fl-privacy run data=cifar10 defense=dp_noise defense.scale=0.01 seed=1`."
    " `fl-privacy list` shows what there is to choose from.",
    pretty_exceptions_enable=False,
)

Multirun = Annotated[
    bool, typer.Option("-m", "--multirun", help="Run every combination of values listed as key=a,b; resumable.")
]
ShowConfig = Annotated[bool, typer.Option("--cfg", help="Print the resolved configuration and stop.")]


def _show_version(asked: bool) -> None:
    if asked:
        say(f"fl-privacy {metadata.version('fl-privacy')}")
        raise typer.Exit


@app.callback()
def common_options(
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error; anywhere in the line.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and stop.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Apply the options that all commands have."""
    logging.getLogger("fl_privacy").setLevel(logging.DEBUG if debug else logging.NOTSET)


@app.command()
def run(
    overrides: Overrides = None, multirun: Multirun = False, cfg: ShowConfig = False, open_page: OpenPage = False
) -> None:
    """Train, intercept, attack, report.

    The defaults are a small federation on the digits of mnist_mini. Change them by KEY=VALUE: the options that
    `fl-privacy list` shows (defense=pruning), any key that `--cfg` shows (defense.rate=0.99, federation.rounds=50). A
    preset such as experiment=fdl_pp_paper repeats a paper's experiment, shortened, with the methods it compares; its
    full size: paper=full.

    Several values: `-m defense=none,pruning seed=0,1` runs all combinations, skips what has finished, and compares.
    """
    run_jobs("run", overrides or [], console=faults.Terminal(), multirun=multirun, show_config=cfg, open_page=open_page)


@app.command()
def attack(
    overrides: Overrides = None, multirun: Multirun = False, cfg: ShowConfig = False, open_page: OpenPage = False
) -> None:
    """Attack without training: fresh or given weights, or uploads that a run saved.

    Victims come from the data's test split. The model is fresh (`model=lenet_dlg attack=idlg victims=100`), or that of
    a run (`weights=RUN_DIR`). `captured=RUN_DIR` attacks the uploads of a run with `intercept.save=true`. A preset such
    as experiment=sapag_paper repeats a paper's experiment, shortened, with the methods it compares; its full size:
    paper=full.
    """
    run_jobs(
        "attack", overrides or [], console=faults.Terminal(), multirun=multirun, show_config=cfg, open_page=open_page
    )


app.command("trade-off")(trade_off)


@app.command("train-evaluator")
def train_evaluator_command(overrides: Overrides = None) -> None:
    """Train the evaluation network of defense=refiner on public images.

    First `data=cifar10 out=evaluator.safetensors`, then `run defense=refiner defense.evaluator=evaluator.safetensors`.
    Take data that the clients do not hold; data.image_size and data.channels bring them to the clients' shape. Other
    keys are those of conf/evaluator.yaml, for example widths=[32,64,128] epochs=2 lr=1e-3 images=5000.
    """
    say(LOADING)
    from fl_privacy.cli.train_networks import train  # noqa: PLC0415

    say(train(overrides or [], console=faults.Terminal()))


@app.command("train-generator")
def train_generator_command(overrides: Overrides = None) -> None:
    """Train the image generator that attack=ggl and attack=gifd search, on public images.

    First `data=cifar10 out=FILE`, then `attack data=cifar10 attack=ggl attack.generator=FILE`. The attack refuses
    victims from the generator's training split. A killed training resumes. Other keys: see conf/generator.yaml.
    """
    say(LOADING)
    from fl_privacy.cli.train_networks import make_generator  # noqa: PLC0415

    say(make_generator(overrides or [], console=faults.Terminal()))


@app.command("search-policies")
def search_policies_command(overrides: Overrides = None, cfg: ShowConfig = False) -> None:
    """Search for the image transformations that the defense ATS (defense=ats) draws from.

    After `search-policies data=fashion_mnist model=resnet20 policies=1500`, train with what was found: `run defense=ats
    defense.policies=FOLDER`. A killed search resumes. `--cfg` shows all keys (conf/policy_search.yaml).
    """
    from fl_privacy.runs.config import compose_file, to_yaml  # noqa: PLC0415

    config = compose_file("policy_search", overrides or [])
    if cfg:
        say(to_yaml(config))
        return
    say(LOADING)
    from fl_privacy.cli.console import RichMonitor  # noqa: PLC0415
    from fl_privacy.runs.policy_search import search_policies  # noqa: PLC0415

    say(search_policies(config, RichMonitor(faults.Terminal())))


@app.command()
def report(  # noqa: PLR0917
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page.")] = None,
    psnr_below: PsnrBelow = None,
    cap: Annotated[
        bool, typer.Option("--cap", help="Compare defenses at several strengths by accuracy over leakage (PPC, CAP).")
    ] = False,
    share: Annotated[
        Path | None, typer.Option(metavar="DEST", help="Copy the runs there for sharing, without pictures.")
    ] = None,
    with_originals: Annotated[
        bool, typer.Option("--with-originals", help="Keep attacked images in the copies of --share.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a row for each attacked example there instead.")
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Write one page on a run or audit, to print and sign.")
    ] = False,
    log: Annotated[
        str | None, typer.Option(metavar="LOGGER", help="Log the figures there: tensorboard:FOLDER, mlflow or wandb.")
    ] = None,
    open_page: OpenPage = False,
) -> None:
    """Write one HTML page on one or many runs, finished or not.

    A run's page shows the clients' images; only its owner can read it. Copies by --share hold metrics, but no images,
    captured updates or weights; --with-originals adds originals and reconstructions. --brief writes `brief.html`,
    without pictures, for a data protection impact assessment, structured by EDPB Opinion 28/2024 and SATRE 2.0.
    """
    from fl_privacy.report import share_report, write_brief, write_report  # noqa: PLC0415
    from fl_privacy.report.brief import audit_folder_of  # noqa: PLC0415
    from fl_privacy.report.headline import answers_of  # noqa: PLC0415
    from fl_privacy.runs.folder.read import run_folder_of  # noqa: PLC0415

    if csv is not None or log is not None:
        if brief or share is not None or cap or with_originals or out is not None or (csv and log):
            name = "--csv" if csv is not None else "--log"
            raise UserError(f"{name} is expected with RUN_DIR alone, but got another option; use one at a time.")
        _write_figures(runs, csv, log)
        return
    if brief:
        if len(runs) != 1 or share is not None or cap or with_originals:
            raise UserError("--brief is expected with one RUN_DIR and --out alone, but got more; call report again.")
        page = write_brief(runs[0], out)
    elif share is not None:
        if out is not None:
            raise UserError("--share and --out are expected one at a time, but got both; leave --out out.")
        page = share_report(runs, share, with_originals=with_originals, psnr_below=psnr_below, cap=cap)
    elif with_originals:
        raise UserError("--with-originals is expected with --share DEST, but got it alone; add --share DEST.")
    folders = [run_folder_of(run) for run in runs]
    if not brief and share is None:
        page = write_report(folders, out, psnr_below=psnr_below, cap=cap)
    of_audit = audit_folder_of(folders[0]) is not None
    end_with(f"brief of the audit in {folders[0]}" if of_audit else answers_of(folders), page, open_page=open_page)


@app.command()
def verify(
    place: Annotated[Path, typer.Argument(metavar="FOLDER_OR_BRIEF", help="Folder of a run or audit, or its brief.")],
    of_app: Annotated[
        Path | None, typer.Option("--app", metavar="APP", help="Also compare the audited app's files.")
    ] = None,
) -> None:
    """Recompute the figures of a brief (`report --brief`) from its records; status 1 if a line of the brief differs.

    Nothing of the folder is executed. Without a brief, the figures of audit.json or summary.json are recomputed.
    """
    from fl_privacy.auditing.app.bundle import read_app  # noqa: PLC0415
    from fl_privacy.report.brief import verified  # noqa: PLC0415

    app_there = None if of_app is None else read_app(of_app)
    compared, wrong = verified(place, app=None if app_there is None else app_there.folder)
    for line in wrong:
        say(visible(line))
    say(f"{compared}: {f'{len(wrong)} differ' if wrong else 'as their records say'}")
    if wrong:
        raise typer.Exit(1)


def _write_figures(runs: Sequence[Path], csv: Path | None, log: str | None) -> None:
    if csv is not None:
        from fl_privacy.runs.folder.frames import write_csv  # noqa: PLC0415

        say(write_csv(runs, csv))
    if log is not None:
        from fl_privacy.report.loggers import log_run  # noqa: PLC0415

        say(f"{sum(log_run(run, log) for run in runs)} figures logged by {log}")


@app.command("list")
def list_(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help="Only these kinds, such as defense or metrics.")
    ] = None,
) -> None:
    """List attacks, defenses, models, data and metrics, a line each; `list defense` lists only defenses."""
    from fl_privacy.cli.catalog import catalog_tables  # noqa: PLC0415

    for table in catalog_tables(kinds or ()):
        faults.Terminal().print(table)


def supernode(
    context: typer.Context,
    client_app: Annotated[
        str, typer.Option("--app", metavar="MODULE:NAME", help="The installed ClientApp that answers.")
    ] = OWN_APP,
    patience: Annotated[
        float, typer.Option(help="Seconds to keep trying if the SuperLink does not admit the node.")
    ] = 90.0,
    policy: Annotated[
        str, typer.Option(metavar="SITE.YAML", help="The site's policy: what may come in and leave.")
    ] = "",
) -> None:
    """Run Flower's SuperNode with one process for all messages instead of a new one for each.

    Options are those of `flower-supernode`: `--superlink HOST:PORT --root-certificates ca.crt
    --auth-supernode-private-key KEY --node-config 'partition-id=0 num-partitions=4'`. An installed app answers. Code
    that a run brings is executed only if the policy has an entry `runs`.

    With --policy (a file, or the built-in strict, research or dp) the app runs in a process without network, node key
    or record of the privacy budget, and only what the policy names may leave: see `fl-privacy policy check SITE.YAML`.
    """
    raise typer.Exit(run_node(context.args, app=client_app, patience=patience, policy=policy))


def deploy(  # noqa: PLR0917
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, or to check.")],
    nodes: Annotated[int, typer.Option(help="Number of SuperNodes.")] = 4,
    host: Annotated[str, typer.Option(help="Name or address of the SuperLink for the nodes.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port of the SuperLink.")] = 8000,
    check: Annotated[bool, typer.Option("--check", help="Try the deployment in OUT on this machine.")] = False,
    policy: Annotated[
        str, typer.Option(help="Give each node a site.yaml (strict, research or dp), and run behind it.")
    ] = "",
) -> None:
    """Write what real nodes need: keys, certificates, commands, systemd units, Docker files, Flower's config entry.

    An existing folder keeps its keys and certificates; --nodes may add nodes. Private keys are readable by their owner
    only; OUT/README.md says who gets which.
    """
    from fl_privacy.site.deploy import check_deployment, write_deployment  # noqa: PLC0415

    if check:
        raise typer.Exit(check_deployment(out, say=print))
    say(write_deployment(out, nodes=nodes, host=host, port=port, policy=policy))


def node_cost(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Finished runs, or sweeps.")],
    memory: Annotated[int, typer.Option(help="Memory of the node in MiB.")] = 1024,
    core: Annotated[int | None, typer.Option(help="Number of the node's CPU core; default: the first.")] = None,
    repeats: Annotated[int, typer.Option(help="Number of rounds; the median counts.")] = 3,
    trust: Annotated[list[str] | None, typer.Option(help="Import path that the runs may use: pkg.Net.")] = None,
) -> None:
    """Measure a client's round on one core with little memory; the runs' pages then show CPU time, memory, energy.

    The limit is a memory cgroup if this user may set one; else the process is killed once it exceeds --memory.
    """
    from fl_privacy.site.deploy.device import MIB, measure_nodes  # noqa: PLC0415

    for line in measure_nodes(runs, memory=memory * MIB, core=core, repeats=repeats, trust=trust or ()):
        say(line)


app.command("benchmark")(benchmark)
app.command()(advise)
app.command()(predict)
app.command("check-leakage")(check_leakage)
app.command("check-dp")(check_dp)
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(supernode)
app.command()(deploy)
app.command("node-cost")(node_cost)
app.command()(watch)
app.command()(audit)
app.command("audit-update")(audit_update)
app.command()(review)
app.add_typer(policy_app, name="policy", no_args_is_help=True)


_RECORDED = "what was recorded is kept, `fl-privacy report RUN_DIR` reads it"
_GOES_ON = "what was done is kept, the same command goes on from there"
_KEPT = {"run": _RECORDED, "attack": _RECORDED}
_KEPT |= dict.fromkeys(("trade-off", "benchmark", "train-generator", "search-policies"), _GOES_ON)
"""Command -> message after an interrupt."""


def main() -> None:
    """Run ``fl-privacy`` with the arguments of the process, and set its exit status."""
    with suppress(AttributeError):  # standard output may not be a file
        sys.stdout.reconfigure(errors=UNENCODABLE)  # type: ignore[union-attr]
    if "_FL_PRIVACY_COMPLETE" in os.environ:  # a shell asks for completions
        app(prog_name="fl-privacy")
    sys.exit(run_command_line(sys.argv[1:]))


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status.

    A fault of user, disk or memory gives status 2, an attack that failed on all victims 3, an interrupt 130, SIGTERM
    143, SIGHUP 129. Without a command, help is printed.
    """
    handler = RichHandler(console=faults.Terminal(stderr=True), show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    debug = DEBUG in arguments
    rest = [argument for argument in arguments if argument != DEBUG]
    try:
        with faults.interruptible():
            return int(app([DEBUG, *rest] if debug else rest or ["--help"], standalone_mode=False) or 0)
    except (faults.Interrupted, KeyboardInterrupt, click.Abort) as error:
        with suppress(OSError):  # the terminal may be gone
            say(f"interrupted; {_KEPT.get(next(iter(rest), ''), 'start it again')}", aside=True)
        return 128 + (error.number if isinstance(error, faults.Interrupted) else signal.SIGINT)  # as shells do
    except (click.ClickException, *faults.STOPPING) as error:
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
            # the output is closed (`fl-privacy list | head`), for which Rich ends the program; Python reports it, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return faults.EXIT_ERROR
        if (fault := faults.recognized(error)) is None:
            raise
        if debug:
            traceback.print_exception(error)
        return faults.fail(fault)
