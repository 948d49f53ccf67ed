"""Audit the change between two files of any framework: ``fl-privacy audit-update BEFORE AFTER``."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fl_privacy.checks import number, one_of, whole
from fl_privacy.cli.audit import AsJson, print_audit
from fl_privacy.cli.completion import OpenPage
from fl_privacy.errors import UserError

_MOST = 1 << 16


def audit_update(  # noqa: PLR0917
    before: Annotated[Path, typer.Argument(help="The sent model: a file, or a folder with one for each update.")],
    after: Annotated[Path, typer.Argument(help="Update or model after the training: a file, or a folder of files.")],
    model: Annotated[str, typer.Option(help="The network: FILE.py:NAME, or a program of torch.export (.pt2).")],
    shape: Annotated[str | None, typer.Option(help="Shape of an example: 3,32,32 of an image, 14 of a row.")] = None,
    examples: Annotated[str | None, typer.Option(help="Number of examples, or a range: 4, 1-8. Else inferred.")] = None,
    steps: Annotated[str | None, typer.Option(help="Number of local steps, or a range. Else inferred, or 1.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Else inferred up to scale.")] = None,
    data: Annotated[Path | None, typer.Option(help="The site's examples, as truth: images, .csv or .npz.")] = None,
    others: Annotated[Path | None, typer.Option(help="Control: similar examples that were never trained on.")] = None,
    normalize: Annotated[
        str | None, typer.Option(help="Mean and deviation of pixels, as 0.5/0.5 or R,G,B/R,G,B.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of audits.")] = Path("audit"),
    budget: Annotated[str, typer.Option(help="Budget of the attack: quick, standard, thorough.")] = "quick",
    seconds: Annotated[float, typer.Option(help="Time after which no further attack starts.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the attacks.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the attacks: auto, cpu, cuda or cuda:1.")] = "cpu",
    as_json: AsJson = False,
    open_page: OpenPage = False,
) -> None:
    """Show what can be reconstructed from the change between two files, whatever framework trained.

    Files are safetensors, .npz, PyTorch checkpoints, NVFlare's DXO, Fed-BioMed's .mpk or OpenFL's .pbuf; none of their
    code is run, but that of --model is. Numbers of examples and steps are inferred if not given, or a few are tried.
    """
    one_of("--budget", budget, ("quick", "standard", "thorough"))
    number("--seconds", seconds, above=0, example=600.0)
    if lr is not None:
        number("--lr", lr, above=0, example=0.1)
    settings = {
        "shape": None if shape is None else _numbers("--shape", shape),
        "examples": _span("--examples", examples),
        "steps": _span("--steps", steps),
        "seed": whole("--seed", seed, at_least=0, at_most=(1 << 32) - 1, example=0),
    }
    from fl_privacy.auditing.update_audit import UpdateAuditRequest, audit_update as audited  # noqa: PLC0415
    from fl_privacy.types.plan import Normalization  # noqa: PLC0415

    asked = UpdateAuditRequest(
        before=before,
        after=after,
        model=model,
        lr=lr,
        data=data,
        others=others,
        normalization=None if normalize is None else Normalization(*_halves(normalize)),
        out=out,
        budget=budget,
        seconds=seconds,
        device=device,
        **settings,  # type: ignore[arg-type]
    )

    def run(tell: Callable[[str], None]) -> tuple[str, Path]:
        done = audited(asked, tell)
        return done.line, done.page

    print_audit(run, as_json=as_json, open_page=open_page)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < size <= _MOST for size in found) or len(found) not in (1, 3):
        raise UserError(f"{option} is expected as C,H,W of an image or one number, but got {text!r}; try 3,32,32.")
    return found


def _span(option: str, text: str | None) -> tuple[int, ...]:
    """Parse ``8`` as (8,), ``3-20`` by doubling as (3, 6, 12, 20), and ``None`` as (); an error names ``option``."""
    if text is None:
        return ()
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal()) or not 0 < int(low) <= int(high or low) <= _MOST:
        raise UserError(f"{option} is expected to be a number or a range, but got {text!r}; try 4 or 1-8.")
    first, last = int(low), int(high or low)
    return (*(first << k for k in range(16) if first << k < last), last)


def _halves(text: str) -> tuple[list[float], list[float]]:
    try:
        mean, std = ([float(value) for value in half.split(",")] for half in text.split("/"))
    except ValueError as error:
        raise UserError(f"--normalize is expected as MEAN/DEVIATION, but got {text!r}; try 0.5/0.5.") from error
    return mean, std
