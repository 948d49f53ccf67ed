"""``fl-privacy audit APP`` and ``fl-privacy review APP``: any Flower app, as it is."""

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_privacy.checks import number, one_of, whole
from fl_privacy.cli.jobs import open_in_browser
from fl_privacy.errors import UserError, say, visible
from fl_privacy.files import CACHE_VARIABLE, make_missing_private
from fl_privacy.foreign_files import expanded

if TYPE_CHECKING:
    from fl_privacy.flower.untouched.audit import Asked

SANDBOXED = "FL_PRIVACY_SANDBOXED"
"""Environment variable that says that this process is within a sandbox already."""

AppPlace = Annotated[Path, typer.Argument(metavar="APP", help="Folder with Flower's pyproject.toml, or a .fab file.")]


def audit(  # noqa: PLR0917
    app: AppPlace,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Clients; by default the app's own number, or 10.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Of training; 0 takes the app's own number.")] = 1,
    run_config: Annotated[
        list[str] | None, typer.Option("--run-config", help="As `flwr run` takes it: 'key=value key=\"text\"'.")
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option("--node-config", help="As `flower-supernode` takes it, of every node; {partition} is its number."),
    ] = None,
    mirror: Annotated[
        Path | None,
        typer.Option("--mirror", metavar="DIR", help="Folder of data sets by hub name, instead of the hub."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of audits.")] = Path("audit"),
    victims: Annotated[int, typer.Option("--victims", help="Single examples that are attacked.")] = 8,
    budget: Annotated[str, typer.Option("--budget", help="Of the attack: quick, standard, thorough.")] = "quick",
    seconds: Annotated[float, typer.Option("--seconds", help="After which no further attack is begun.")] = 600.0,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Run the app without network; it can write into the audit's folder alone.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser at the end.")] = False,
) -> None:
    """Run a Flower app as it is and show what its clients' uploads give away: nothing of it is edited.

    The app's code runs in this process, as `flwr run` would run it. The page says first what leaves in clear, then what
    can be read from updates, from one example in one step up to what the app really uploads.
    """
    one_of("--budget", budget, ("quick", "standard", "thorough"))
    whole("--victims", victims, at_least=1, at_most=1000, example=8)
    number("--seconds", seconds, above=0, example=600.0)
    if nodes is not None:
        whole("--nodes", nodes, at_least=1, at_most=100_000, example=4)
    whole("--rounds", rounds, at_least=0, at_most=100_000, example=1)
    if sandbox and not os.environ.get(SANDBOXED):
        raise typer.Exit(_sandboxed(sys.argv[1:]))
    held = _confined(out) if sandbox else ""
    from fl_privacy.flower.untouched.audit import Asked  # noqa: PLC0415

    asked = Asked(
        nodes=nodes,
        rounds=rounds or None,
        run_config=tuple(run_config or ()),
        node_config=tuple(node_config or ()),
        mirror=None if mirror is None else expanded(mirror).absolute(),
        out=out,
        victims=victims,
        budget=budget,
        seconds=seconds,
        sandbox=held,
    )
    page = _audited(app, asked)
    if open_page:
        open_in_browser(page)


def _audited(app: Path, asked: "Asked") -> Path:
    """Audit ``app``, tell of it, and return the page."""
    from fl_privacy.cli.console import SECONDS_BETWEEN_LINES, Lines  # noqa: PLC0415
    from fl_privacy.flower.untouched.app import read_app  # noqa: PLC0415
    from fl_privacy.flower.untouched.audit import audit_app  # noqa: PLC0415

    logging.getLogger("flwr").propagate = False  # it writes its own lines
    with Lines(lambda text: say(text, aside=True), SECONDS_BETWEEN_LINES, silent=False) as lines:
        done = audit_app(read_app(app), asked, lines.tell)
    say(visible(done.line))
    return done.page


def review(
    app: AppPlace,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Read a Flower app without running anything of it: mods, strategies, pins, pickles, network, privacy settings."""
    from fl_privacy.flower.untouched.review import review_app  # noqa: PLC0415

    found = review_app(app)
    say(json.dumps(found.as_plain(), indent=1) if as_json else found.in_words())


def _sandboxed(arguments: list[str]) -> int:
    """Run the same command without network and with its own temporary folder and caches; return its exit status."""
    unshare = shutil.which("unshare")
    command = [sys.executable, "-m", "fl_privacy", *arguments]
    probe = [unshare, "-rn", "true"] if unshare else []
    if not unshare or subprocess.run(probe, capture_output=True, check=False).returncode:
        raise UserError(
            "--sandbox is expected to find `unshare -rn`, which takes a process off the network, but this system does"
            " not allow it; run the audit in a container without network."
        )
    with tempfile.TemporaryDirectory(prefix="fl-privacy-sandbox-") as temporary:
        own = {name: str(Path(temporary) / name.casefold()) for name in (CACHE_VARIABLE, "MPLCONFIGDIR")}
        environment = {**os.environ, **own, SANDBOXED: "1", "TMPDIR": temporary}
        return subprocess.run([unshare, "-rn", *command], env=environment, check=False).returncode


def _confined(out: Path) -> str:
    """Let this process write into ``out``, its temporary folder and the cache of data sets alone; say what holds."""
    from fl_privacy.gate.isolation import confine_writes  # noqa: PLC0415  (not everywhere can processes be limited)

    with contextlib.suppress(OSError):  # the audit says why it can't be written
        make_missing_private(expanded(out).absolute())
    hub = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    datasets = os.environ.get("HF_DATASETS_CACHE") or str(hub / "datasets")
    held = confine_writes([str(expanded(out).absolute()), tempfile.gettempdir(), datasets])
    if not held:
        say("This kernel does not keep the app from writing files.", aside=True)
    alone = {name for _, name in socket.if_nameindex()} <= {"lo"}
    network = "no network" if alone else "network not taken away"
    return f"{network}; {f'writes only --out, temporary files, data caches ({held})' if held else 'may write files'}"
