"""Define options that commands share, and complete overrides in shells."""

from pathlib import Path
from typing import Annotated

import typer

from fl_privacy.checks import number


def complete_override(incomplete: str) -> list[str]:
    """List all completions of ``incomplete`` (``def``, ``defense=pr``), also after commas."""
    from fl_privacy.runs.config import options  # noqa: PLC0415  (help goes without)
    from fl_privacy.runs.config.settings import declared_settings, groups  # noqa: PLC0415

    named = (*groups(), "experiment")
    key, equals, value = incomplete.partition("=")
    if not equals:
        keys = dict.fromkeys([*named, *(name for name, _ in declared_settings())])
        return [f"{name}=" for name in keys if name.startswith(key)]
    if key not in named:
        return []
    chosen, comma, last = value.rpartition(",")
    return [f"{key}={chosen}{comma}{name}" for name in options(key) if name.startswith(last)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides.", autocompletion=complete_override),
]
AppPlace = Annotated[Path, typer.Argument(metavar="APP", help="Folder with Flower's pyproject.toml, or a .fab file.")]
RunConfig = Annotated[list[str] | None, typer.Option(help="Run config, as for `flwr run`: 'key=value key=\"text\"'.")]
NodeConfig = Annotated[
    list[str] | None, typer.Option(help="Node config, as for `flower-supernode`; {partition} is a node's number.")
]
Mirror = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of data sets by hub name, instead of the hub.")
]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the page in the browser at the end.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", help="Number of parallel runs, one CPU thread each; default: all cores.")
]
OnlyReport = Annotated[bool, typer.Option("--only-report", help="Write the page from the finished runs.")]
PsnrBelow = Annotated[
    float | None,
    typer.Option(
        "--psnr-below",
        help="dB; a defense is chosen only if no reconstructed image reaches this PSNR.",
        callback=lambda value: None if value is None else number("--psnr-below", value, at_least=0, example=12),
    ),
]
