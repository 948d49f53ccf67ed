"""Copy a run's folder for others: figures, and pictures only with consent."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from fl_privacy.errors import UserError
from fl_privacy.files import make_private_folder, write_private, write_whole
from fl_privacy.files.foreign import read_text
from fl_privacy.runs.folder.claims import CLAIM
from fl_privacy.runs.folder.ongoing import CONFIG, IDENTITY, METRICS, SUMMARY
from fl_privacy.runs.folder.records import PAPER

Shared = Literal["figures", "originals"]  # content of a copy: figures alone, or also originals and reconstructions
NOTE = "share.json"
_MOST_NOTE = 1 << 12
FIGURES = ("environment.json", "threat_model.json", "defense.json", "partition.json", CLAIM, PAPER, METRICS, SUMMARY)
PICTURES = ("reconstructions/*.safetensors", "reconstructions/*.json", "pictures/*.png")


def copy_run(source: Path, destination: Path, *, with_originals: bool) -> None:
    """Copy a run without captured updates and final weights, which reveal images, with paths cut to their last part.

    A copy ``with_originals`` has images and is readable only by its owner. ``UserError`` if ``run.json`` is damaged or
    a file is a link, ``OSError`` if something can't be read or written.
    """
    for name in (IDENTITY, CONFIG, *FIGURES):
        if (source / name).is_symlink():
            raise UserError(f"{source / name} is expected to be a file of the run, but is a link; remove it.")
    kept = with_originals and shared_as(source) != "figures"
    write = write_private if kept else write_whole
    if kept:
        make_private_folder(destination, destination)
    else:
        destination.mkdir(parents=True)
    _copy_configuration(source, destination, write)
    for name in FIGURES:
        if (source / name).is_file():
            write(destination / name, (source / name).read_bytes())
    for pattern in PICTURES if kept else ():
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                make_private_folder(destination / path.parent.name, destination / path.parent.name)
                write_private(destination / path.parent.name / path.name, path.read_bytes())
    write(destination / NOTE, json.dumps({"holds": "originals" if kept else "figures"}))


def shared_as(folder: Path) -> Shared | None:
    """Return the content of the copy in ``folder``; ``None`` for the run itself, ``UserError`` for a damaged note."""
    note = folder / NOTE
    if not note.is_file():
        return None
    with suppress(UserError, ValueError, KeyError, TypeError, RecursionError):
        found = json.loads(read_text(note, _MOST_NOTE))["holds"]
        if found in get_args(Shared):
            return found
    raise UserError(f'{note} is expected to hold {{"holds": "figures"}} or "originals", but is damaged; share it anew.')


def _copy_configuration(source: Path, destination: Path, write: Any) -> None:
    try:
        content = json.loads(read_text(source / IDENTITY))
        shown = {**content, "config": _with_names_only(content["config"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{source / 'run.json'} is expected to describe a run, but is damaged ({error}).") from error
    write(destination / IDENTITY, json.dumps(shown, indent=1, ensure_ascii=False))
    if (source / CONFIG).is_file():  # its text may fold or quote a path
        write(destination / CONFIG, yaml.safe_dump(shown["config"], sort_keys=False, allow_unicode=True))


def _with_names_only(value: Any) -> Any:
    """Cut absolute paths to their last part."""
    match value:
        case str() if Path(value).is_absolute():
            return Path(value).name or value
        case Mapping():
            return {key: _with_names_only(entry) for key, entry in value.items()}
        case list():
            return [_with_names_only(entry) for entry in value]
    return value
