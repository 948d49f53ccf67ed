"""Pages to pass on: copies of run folders with figures alone, or with pictures by consent."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import make_private_folder
from fl_privacy.report.write import write_report
from fl_privacy.results import read_run
from fl_privacy.results.share import copy_run


def share_report(
    run_dirs: Sequence[Path],
    destination: Path,
    *,
    with_originals: bool = False,
    psnr_below: float | None = None,
    cap: bool = False,
) -> Path:
    """Copy runs into the new folder ``destination``, each with its page, and over several the page that compares them.

    Args:
        run_dirs: folders that runs have written.
        destination: it must not exist, or be empty; it appears when all is in it.
        with_originals: the copies also hold attacked images and reconstructions, for the owner alone.
        psnr_below: see ``write_report``.
        cap: see ``write_report``.

    Returns:
        Path of the page that shows all of it.

    Raises:
        UserError: a folder is not that of a run, or ``destination`` is taken or can't be written.
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
        copies = _copy_all(sources, part, with_originals=with_originals)
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


def _copy_all(sources: Sequence[Path], out: Path, *, with_originals: bool) -> list[Path]:
    copies: list[Path] = []
    for source in sources:
        number = sum(copy.name.startswith(source.name) for copy in copies)
        copies.append(out / (f"{source.name}-{number + 1}" if number else source.name))
        copy_run(source, copies[-1], with_originals=with_originals)
    return copies
