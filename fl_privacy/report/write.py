"""Write pages of run folders, and copies to share."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import make_private_folder, write_private, write_whole
from fl_privacy.files.foreign import expect_file_name
from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.report import ppc
from fl_privacy.report.comparison import render_comparison
from fl_privacy.report.gallery import caption, grid_picture, rank_by
from fl_privacy.report.mechanisms import samples_of_runs
from fl_privacy.report.ppc import Sample, ppc_view_of, samples_of_rows
from fl_privacy.report.run_page import ShownVictims, render_run
from fl_privacy.report.trade_off_page import render_trade_off, row_as_plain, trade_off_sentences
from fl_privacy.runs.folder import Run, read_run
from fl_privacy.runs.folder.records import dump_json
from fl_privacy.runs.folder.share import copy_run
from fl_privacy.runs.folder.study import StudyEntry, read_study

PICTURED = 16
"""Pairs in ``pictures/reconstructions.png``, evenly spread from best to worst."""


def write_report(
    run_dirs: Sequence[Path], out: Path | None = None, *, psnr_below: float | None = None, cap: bool = False
) -> Path:
    """Write one self-contained HTML page on one or many runs; with images it is readable only by its owner.

    A single run gets ``<run>/report.html`` and ``<run>/pictures/reconstructions.png``, several get ``comparison.html``
    next to the first one.

    Args:
        out: other path of the page; its folder is created.
        psnr_below: dB that no image may reach for a training to be named as best without reconstructions.
        cap: ``True`` to compare strengths of defenses by PPC curves and CAP, also in ``<page>_cap.json``.

    Returns:
        Path of the page.

    Raises:
        UserError: a folder is not a run's, ``out`` is not writable, or no run has what ``cap`` needs.
    """
    if not run_dirs:
        raise UserError("The folders of one or more runs are expected, but got none; name what `fl-privacy run` wrote.")
    if out is not None:
        expect_file_name(out)
    runs = [read_run(Path(path)) for path in dict.fromkeys(Path(p).resolve() for p in run_dirs)]
    single = runs[0] if len(runs) == 1 and not cap else None
    samples = samples_of_runs(runs) if cap else []
    if cap and not samples:
        raise UserError(
            "CAP is expected to be of runs that defended, trained and were attacked, but none of these did all three;"
            " name runs with defense=... and attack=... that `fl-privacy run` wrote."
        )
    page = out or (single.path / "report.html" if single else runs[0].path.parent / "comparison.html")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        if single:
            write = write_whole if single.shared == "figures" else write_private
            _write_picture(single)
            write(page, page_of_run(single))
        else:
            write_whole(page, render_comparison(runs, page, psnr_below=psnr_below, ppc=ppc_view_of(samples)))
        _write_caps(page, samples)
    except OSError as error:
        raise UserError(f"{page} can't be written ({error.strerror}); choose another place with --out.") from error
    return page


def write_trade_off(entries: Sequence[StudyEntry], page: Path, *, psnr_below: float | None = None) -> Path:
    """Write the page of a sweep, and its tables ``trade_off.json`` and ``trade_off_cap.json`` next to it.

    Args:
        psnr_below: see ``write_report``.

    Raises:
        UserError: ``page`` is not writable.
    """
    rows = read_study(entries)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(page, render_trade_off(rows, page, psnr_below=psnr_below))
        write_whole(page.with_suffix(".json"), dump_json([row_as_plain(row) for row in rows], indent=1))
        _write_caps(page, samples_of_rows(rows))
    except OSError as error:
        raise UserError(f"{page} can't be written ({error.strerror}); choose another place with out=FOLDER.") from error
    return page


def trade_off_in_words(entries: Sequence[StudyEntry], *, psnr_below: float | None = None) -> str:
    """Recommend a defense of a sweep in a few sentences."""
    return trade_off_sentences(read_study(entries), psnr_below=psnr_below)


def _write_caps(page: Path, samples: Sequence[Sample]) -> None:
    if samples:
        found = [ppc.cap_as_plain(entry) for entry in ppc.caps(samples)]
        write_whole(page.with_name(f"{page.stem}_cap.json"), dump_json(found, indent=1))


def page_of_run(run: Run, *, live: bool = False) -> str:
    """Render the HTML of a single run without writing it."""
    problems = [] if live and not run.finished else run.problems  # an incomplete last line is no damage
    return render_run(run, ShownVictims.of(run), problems=problems, live=live)


def _write_picture(run: Run) -> None:
    pairs, _ = run.read_pairs() if run.shared != "figures" else ({}, [])
    ranked = [v for v in rank_by(run, IMAGE_METRIC) if (v["id"], v["image"]) in pairs]
    chosen = (
        ranked
        if len(ranked) <= PICTURED
        else [ranked[k * (len(ranked) - 1) // (PICTURED - 1)] for k in range(PICTURED)]
    )
    if not chosen:
        return
    shown = [pairs[v["id"], v["image"]] for v in chosen]
    grid_picture(
        [pair.original for pair in shown],
        [pair.guess for pair in shown],
        [caption(v) for v in chosen],
        run.path / "pictures" / "reconstructions.png",
        adaptive=[pair.adaptive for pair in shown] if run.summary.adaptive else None,
        transformed=[pair.transformed for pair in shown] if any(p.transformed is not None for p in shown) else None,
    )


def share_report(
    run_dirs: Sequence[Path],
    destination: Path,
    *,
    with_originals: bool = False,
    psnr_below: float | None = None,
    cap: bool = False,
) -> Path:
    """Copy runs into the new folder ``destination``, each with its page, and a comparison of several.

    Args:
        destination: missing or empty folder; it appears when complete.
        with_originals: ``True`` to include images, readable only by the owner.

    Returns:
        Path of the main page.

    Raises:
        UserError: a folder is not a run's, or ``destination`` exists or is not writable.
    """
    sources = list(dict.fromkeys(Path(path).resolve() for path in run_dirs))
    for source in sources:
        read_run(source)
    destination = destination.absolute()
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise UserError(f"--share is expected to be a new folder, but {destination} exists; choose another one.")
    part = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.part")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        if with_originals:
            make_private_folder(part, part)
        copies: list[Path] = []
        for source in sources:
            number = sum(copy.name.startswith(source.name) for copy in copies)
            copies.append(part / (f"{source.name}-{number + 1}" if number else source.name))
            copy_run(source, copies[-1], with_originals=with_originals)
        pages = [write_report([copy]) for copy in copies]
        page = pages[0]
        if len(copies) > 1 or cap:
            page = write_report(copies, part / "comparison.html", psnr_below=psnr_below, cap=cap)
        part.rename(destination)
    except OSError as error:
        raise UserError(f"{destination} can't be written ({error.strerror}); choose another folder.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return destination / page.relative_to(part)
