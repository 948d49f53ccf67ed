"""``fl-privacy check-leakage``: the privacy test of a build, for runs and audits."""

from pathlib import Path
from typing import Annotated

import typer

from fl_privacy.errors import UserError, say

EXIT_WORSE = 1


def check_leakage(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, an attack or an audit.")],
    baseline: Annotated[Path, typer.Option("--baseline", help="JSON file to compare with, kept with the code.")] = Path(
        "leakage_baseline.json"
    ),
    update: Annotated[bool, typer.Option("--update", help="Write the baseline anew instead.")] = False,
    name: Annotated[str, typer.Option("--name", help="Under which the baseline keeps it.")] = "run",
    metric: Annotated[str, typer.Option("--metric", help="By which images are compared.")] = "psnr",
) -> None:
    """Fail (status 1) where a run leaks more than its baseline: a privacy test for continuous integration.

    The same images have to be attacked as then: the same seed, data and victims. The test is paired by image and
    one-sided at 5 %. In pytest the same is the fixture `leakage`, run by `pytest --fl-privacy`.
    """
    from fl_privacy.auditing.regression import compare, measure_run, read_baseline, write_baseline  # noqa: PLC0415
    from fl_privacy.auditing.regression.comparison import expect_enough  # noqa: PLC0415

    now, kept = measure_run(run, metric=metric), read_baseline(baseline)
    if update:
        expect_enough(now)
        write_baseline(baseline, {**kept, name: now})
        say(f"{name}: written to {baseline}")
        return
    if name not in kept:
        raise UserError(f"{baseline} is expected to hold a baseline called {name}, but has none; write it by --update.")
    found = compare(kept[name], now)
    say(found.sentence)
    if found.worse:
        raise typer.Exit(EXIT_WORSE)
