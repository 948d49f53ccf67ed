"""Test a claimed epsilon (``fl-privacy check-dp``), or a run against a baseline (``check-leakage``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_privacy.errors import UserError, say, visible

if TYPE_CHECKING:
    from fl_privacy.dp_check.check import DpCheckRequest
    from fl_privacy.dp_check.verdict import ClaimVerdict

MORE: dict[str, type] = {"clients": int, "parameters": int, "neighbors": str, "noise": str, "seed": int}
"""Rarely needed settings -> their types; see ``dp_check.check.DpCheckRequest``."""


def check_dp(  # noqa: PLR0917
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="Folder of a run, an audit or a Flower app, or module:name of a mod, a strategy, a defense or a"
            " function from an update to what is sent.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="clients=N that a strategy aggregates, parameters=N of an update, neighbors=add_remove or replace,"
            " noise=gaussian (or other: only bounds for any noise), seed=N.",
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Claimed epsilon, instead of the stated one.")] = None,
    delta: Annotated[float, typer.Option(help="Delta of the claim.")] = 1e-5,
    rounds: Annotated[int, typer.Option(help="Rounds that the claim covers.")] = 1,
    clip_norm: Annotated[float | None, typer.Option(help="Norm to which an update is clipped.")] = None,
    draws: Annotated[int | None, typer.Option(help="Draws for each neighbor; default: about a minute's.")] = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Let an app's first client train once.")] = True,
    out: Annotated[Path | None, typer.Option(help="Where to write the page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Test a claim of differential privacy against the code that runs; status 1 if it is contradicted.

    Two accountants recompute epsilon. Many outputs on two neighboring inputs give a lower bound with 95 % confidence;
    the claim is contradicted only if the bound with 99.9 % confidence exceeds it. A claim without contradiction is not
    proven: the answer says how strong the test was.
    """
    more = _read_settings(settings or [])
    from fl_privacy.dp_check.check import DpCheckRequest  # noqa: PLC0415

    asked = DpCheckRequest(epsilon=epsilon, delta=delta, rounds=rounds, clip_norm=clip_norm, draws=draws, **more)
    folder = Path(subject)
    kind, verdicts = _verdicts(subject, asked, train=train)
    from fl_privacy.report.inferred import write_claims_page  # noqa: PLC0415
    from fl_privacy.runs.folder import claims  # noqa: PLC0415

    records = claims.records_of(verdicts)
    if kind == "run":
        new = {record.subject for record in records}
        records = claims.in_order([*records, *(r for r in claims.read_claims(folder) if r.subject not in new)])
    own, title = folder if kind == "run" else Path(), subject if kind == "name" else folder.name
    page = write_claims_page(records, out or own / "claim.html", title=title)
    if kind == "run":
        claims.write_claims(folder, records)
    paragraphs = ((f"{r.subject}: {r.headline}.", f"  {r.sentence}", *(f"  {n}" for n in r.footnotes)) for r in records)
    lines = [visible(line) for paragraph in paragraphs for line in paragraph]
    say(claims.as_json(records) if as_json else "\n".join([*lines, str(page)]))
    if any(record.is_false for record in records):
        raise typer.Exit(1)


def _read_settings(given: list[str]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals or key not in MORE:
            raise UserError(f"One of {', '.join(MORE)} with =VALUE is expected, but got {setting!r}; write clients=10.")
        try:
            read[key] = MORE[key](value)
        except ValueError as error:
            raise UserError(f"{key} is expected to be a whole number, but got {value!r}; try {key}=10.") from error
    return read


def _verdicts(subject: str, asked: DpCheckRequest, *, train: bool) -> tuple[str, list[ClaimVerdict]]:
    folder = Path(subject)
    if (folder / "run.json").is_file():
        from fl_privacy.runs.run_claims import claims_of_run  # noqa: PLC0415

        return "run", claims_of_run(folder, asked)
    if (folder / "pyproject.toml").is_file():
        from fl_privacy.auditing.app_claims import claims_of_app  # noqa: PLC0415

        return "app", claims_of_app(folder, asked, train=train)
    if folder.exists():
        raise UserError(
            f"{folder} is expected to be the folder of a run (run.json) or of a Flower app (pyproject.toml), but holds"
            " neither; name one that does, or module:name."
        )
    from fl_privacy.flower.dp_mechanisms import located, verdicts_on  # noqa: PLC0415

    return "name", verdicts_on(located(subject), asked, name=subject)


def check_leakage(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, an attack or an audit.")],
    baseline: Annotated[Path, typer.Option(help="JSON file to compare with, kept with the code.")] = Path(
        "leakage_baseline.json"
    ),
    update: Annotated[bool, typer.Option("--update", help="Write the baseline instead of comparing.")] = False,
    name: Annotated[str, typer.Option(help="Name of the run in the baseline.")] = "run",
    metric: Annotated[str, typer.Option(help="Metric by which images are compared.")] = "psnr",
) -> None:
    """Fail (status 1) if a run leaks more than its baseline: a privacy test for continuous integration.

    The same images must be attacked as in the baseline: same seed, data and victims. The test is paired by image,
    one-sided, at 5 %. In pytest use the fixture `leakage`, run by `pytest --fl-privacy`.
    """
    from fl_privacy.auditing.regression import compare, measure_run, read_baseline, write_baseline  # noqa: PLC0415
    from fl_privacy.auditing.regression.measurement import expect_enough  # noqa: PLC0415

    now, kept = measure_run(run, metric=metric), read_baseline(baseline)
    if update:
        expect_enough(now.uploads)
        write_baseline(baseline, {**kept, name: now})
        say(f"{name}: written to {baseline}")
        return
    if name not in kept:
        raise UserError(f"{baseline} is expected to hold a baseline called {name}, but has none; write it by --update.")
    found = compare(kept[name], now)
    say(found.sentence)
    if found.worse:
        raise typer.Exit(1)
