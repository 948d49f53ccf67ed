"""``fl-privacy advise``: which defense, from what was measured."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fl_privacy.checks import number, one_of
from fl_privacy.errors import UserError

if TYPE_CHECKING:
    from fl_privacy.report.measured_tables import MeasuredTable, Threat

ACCURACY_LOSS, THREAT, PSNR_BELOW = "accuracy_loss", "threat", "psnr_below"
ASKED = {ACCURACY_LOSS: "2", THREAT: "adaptive", PSNR_BELOW: ""}
"""What may be asked for, with its default, empty for none; all else is a setting of the measurement."""

_EXAMPLES = {ACCURACY_LOSS: "2", PSNR_BELOW: "12"}

KNOWN: tuple[Literal["honest", "adaptive", "malicious"], ...] = ("honest", "adaptive", "malicious")


def advise(
    asked: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="accuracy_loss=2 (points, at most), threat=adaptive, honest or malicious, psnr_below=DB, and the"
            " settings that were measured: data=mnist_mini model=lenet.",
        ),
    ] = None,
    grid: Annotated[str | None, typer.Option("--grid", help="Read the runs of this grid (trade-off).")] = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="Read the folder of a benchmark, or a file that --save wrote."),
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Also write the tables that were read, as JSON.")] = None,
) -> None:
    """The cheapest defense that costs little accuracy and behind which no image was read, and what it leaves open.

    Each measurement of the settings that are named has its own answer.
    `fl-privacy trade-off GRID`, then `fl-privacy advise --grid GRID accuracy_loss=5`, answers from your runs;
    `fl-privacy advise --table runs/benchmark_laptop threat=malicious` from a benchmark. The tables that came with the
    package are withdrawn until they are measured again.
    """
    bounds, settings = _asked(asked or [])
    if grid is not None and table is not None:
        raise UserError("--grid and --table are expected one at a time, but got both; leave one out.")
    one_of(THREAT, bounds[THREAT], KNOWN)
    threat = next(known for known in KNOWN if known == bounds[THREAT])
    loss, below = _number(ACCURACY_LOSS, bounds[ACCURACY_LOSS]), bounds[PSNR_BELOW]
    told = {ACCURACY_LOSS: loss} | ({PSNR_BELOW: _number(PSNR_BELOW, below)} if below else {})
    tables = _in_file(table, settings) if table else [_of_grid(grid, settings)] if grid else _shipped(settings)
    if save is not None:
        from fl_privacy.report.measured_tables import write_tables  # noqa: PLC0415

        write_tables(save, tables)
    print("\n\n".join(_answers(tables, threat=threat, **told)))


def _answers(tables: "Sequence[MeasuredTable]", *, threat: "Threat", **told: float) -> list[str]:
    """One for each table; of those that have none why, unless no table has any."""
    from fl_privacy.report.advice import advice_from  # noqa: PLC0415

    found, refused = list[str](), list[UserError]()
    for table in tables:
        try:
            found.append("\n".join(advice_from(table, threat=threat, **told)))
        except UserError as error:
            refused.append(UserError(f"Not answered from {' '.join(table.settings)}: {error}"))
    if not found:
        raise refused[0]
    return [*found, *map(str, refused)]


def _asked(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What is asked for, ``accuracy_loss<=2`` as well as ``accuracy_loss=2``, and the settings."""
    bounds, settings = dict(ASKED), []
    for argument in arguments:
        key, _, value = re.sub(r"\s*<=?\s*", "=", argument, count=1).partition("=")
        if key in ASKED:
            bounds[key] = value
        else:
            settings.append(argument)
    return bounds, settings


def _number(key: str, value: str) -> float:
    try:
        return number(key, float(value), at_least=0, example=float(_EXAMPLES[key]))
    except ValueError as error:
        raise UserError(f"{key} is expected to be a number, but got {value!r}; try {key}={_EXAMPLES[key]}.") from error


def _in_file(path: Path, settings: Sequence[str]) -> "list[MeasuredTable]":
    from fl_privacy.report.measured_tables import MEASURED, read_tables  # noqa: PLC0415

    file = path / MEASURED if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"--table is expected to be the folder of a benchmark that measured at least one defense, or a file that"
            f" --save wrote, but there is no {file}; run `fl-privacy benchmark` first."
        )
    tables = read_tables(file)
    if found := [table for table in tables if table.matches(settings)]:
        return found
    raise UserError(
        f"Settings that were measured are expected, but got {' '.join(settings)}; {file} is of {_there(tables)}."
    )


def _shipped(settings: Sequence[str]) -> "list[MeasuredTable]":
    from fl_privacy.report.measured_tables import SHIPPED, read_tables  # noqa: PLC0415

    tables = [table for path in sorted(SHIPPED.glob("*.json")) for table in read_tables(path)]
    if found := [table for table in tables if table.matches(settings)]:
        return found
    told = f" {' '.join(settings)}" if settings else ""
    there = f"there are: {_there(tables)}" if tables else "those that came with the package are withdrawn until they"
    there += "" if tables else " are measured again: they took empty pictures for read ones and readable ones for none"
    raise UserError(
        f"Settings that were measured are expected, but {there}. Measure yours by `fl-privacy trade-off quick{told}`,"
        f" then `fl-privacy advise --grid quick{told}`."
    )


def _there(tables: "Sequence[MeasuredTable]") -> str:
    return "; ".join(" ".join(table.settings) for table in tables)


def _of_grid(name: str, settings: Sequence[str]) -> "MeasuredTable":
    from fl_privacy.config.grid import load_grid  # noqa: PLC0415

    grid = load_grid(name, settings)
    from fl_privacy.experiment.trade_off import plan_sweep  # noqa: PLC0415
    from fl_privacy.report.measured_tables import MeasuredTable, measured_rows  # noqa: PLC0415
    from fl_privacy.report.trade_off import read_rows  # noqa: PLC0415

    rows = read_rows(plan_sweep(grid).outcomes())
    defenses, unknown = measured_rows(rows, [point.overrides for point in grid.points])
    command = f"fl-privacy trade-off {name} {' '.join(settings)}".rstrip()
    if len(defenses) < 2:
        raise UserError(f"Runs of the grid {name} are expected to have finished, but too few did; run `{command}`.")
    return MeasuredTable(
        settings=tuple(s for s in (*grid.settings, *settings) if not s.startswith("out=")),
        attacks=tuple(grid.attacks),
        weights=grid.weights,
        command=command,
        defenses=defenses,
        unknown=unknown,
    )
