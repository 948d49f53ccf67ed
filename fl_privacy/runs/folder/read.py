"""Load run folders, finished or not, and copy them for others."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from fl_privacy.checks import fits
from fl_privacy.errors import UserError
from fl_privacy.files import make_private_folder, write_private, write_whole
from fl_privacy.files.foreign import expect_regular_files, read_text
from fl_privacy.runs.config.settings import register_plugin_metrics
from fl_privacy.runs.folder import pictures, records as checked
from fl_privacy.runs.folder.claims import CLAIM, ClaimRecord, read_claims
from fl_privacy.runs.folder.identity import FORMAT, Identity, training_hash
from fl_privacy.runs.folder.ongoing import CAPTURES, CONFIG, IDENTITY, METRICS, SUMMARY, WAITING
from fl_privacy.runs.folder.records import PAPER
from fl_privacy.runs.folder.summary import Summary, summarize
from fl_privacy.types.victim_ids import Attacker

MOST_BYTES = 1 << 26  # largest file of a run, except records and tensors
_FIGURES = list[float | None]
Shared = Literal["figures", "originals"]  # content of a copy: figures alone, or also originals and reconstructions


@dataclass(frozen=True, kw_only=True)
class PartitionTable:
    """Number of examples of each client and class: ``counts[client][class]``."""

    class_names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Loaded content of a run's folder, without pictures."""

    path: Path
    identity: Identity
    config_text: str
    environment: Mapping[str, Any]
    threat_model: tuple[str, ...]
    strengths: tuple[str, ...]  # settings that set the defense's strength, the first part's first
    # examples of each client and class; ``None`` if not recorded, as by an attack without training
    partition: PartitionTable | None
    records: tuple[Mapping[str, Any], ...]
    summary: Summary
    finished: bool
    problems: tuple[str, ...]  # damages, a line each
    shared: Shared | None = None  # contents of a copy made for others; ``None`` for the run itself
    defenses: tuple[str, ...] = ()
    claims: tuple[ClaimRecord, ...] = ()  # checked claims of differential privacy, false ones first

    @property
    def name(self) -> str:
        return self.path.name

    def of_kind(self, kind: str, attacker: Attacker = Attacker.PLAIN) -> list[Mapping[str, Any]]:
        return checked.records_of(self.records, kind, attacker)

    def read_pairs(self) -> tuple[Mapping[tuple[str, int], pictures.Pair], list[str]]:
        return pictures.read_pairs(self.path / "reconstructions")

    def read_sentences(self) -> tuple[Mapping[tuple[str, int], pictures.Sentence], list[str]]:
        return pictures.read_sentences(self.path / "reconstructions")

    def read_rows(self) -> tuple[Mapping[tuple[str, int], pictures.RowPair], list[str]]:
        return pictures.read_rows(self.path / "reconstructions")

    def read_films(self) -> tuple[Mapping[Attacker, Sequence[pictures.Film]], list[str]]:
        return pictures.read_films(self.path / "reconstructions")


def run_folder_of(path: Path) -> Path:
    """Return a run's folder from the path of that folder or of the run's page."""
    return path.parent if path.suffix == ".html" and (path.parent / IDENTITY).is_file() else path


def read_run(path: Path) -> Run:
    """Load the run in ``path``, finished or not; ``UserError`` if there is none, or it is damaged."""
    register_plugin_metrics()
    path = run_folder_of(path).resolve()
    if not path.is_dir():
        raise UserError(f"{path} is expected to be the folder of a run, but there is no such folder; check its name.")
    if not (path / IDENTITY).is_file():
        raise UserError(
            f"{path} is expected to be the folder of a run, but has no run.json; give the folder that"
            " `fl-privacy run` printed last."
        )
    expect_regular_files(path, without=(CAPTURES, WAITING))
    records, problems = checked.read_records(path / METRICS)
    stored = read_json(path / SUMMARY)
    summary = None if stored is None else _summary(path, stored, records)
    partition = read_json(path / "partition.json")
    threats = read_json(path / "threat_model.json") or []
    defense = read_json(path / "defense.json") or []
    for name, wrong in (
        ("partition.json", checked.wrong_partition(partition) if partition else None),
        ("defense.json", None if fits(defense, checked.PARTS) else "it is no list of parts"),
        ("threat_model.json", None if fits(threats, checked.SENTENCES) else "it is no list of sentences"),
    ):
        if wrong:
            raise _damaged(path / name, wrong)
    if partition:
        partition = PartitionTable(
            class_names=tuple(partition["class_names"]), counts=tuple(map(tuple, partition["counts"]))
        )
    return Run(
        path=path,
        identity=read_identity(path / IDENTITY),
        config_text=_read_text(path / CONFIG),
        environment=read_environment(path),
        threat_model=tuple(threats),
        strengths=tuple(strength for part in defense if (strength := part.get("strength"))),
        partition=partition or None,
        records=tuple(records),
        summary=summary or summarize(records, finished=False, undefended_accuracy=None, total_seconds=None),
        finished=summary is not None,
        problems=tuple(problems),
        shared=shared_as(path),
        defenses=tuple(name for part in defense if (name := part.get("name"))),
        claims=read_claims(path),
    )


def read_summary(path: Path) -> Summary | None:
    """Return the summary of the run in folder ``path``; ``None`` if it has not finished."""
    expect_regular_files(path, without=(CAPTURES, WAITING))
    stored = read_json(path / SUMMARY)
    return None if stored is None else _summary(path, stored, checked.read_records(path / METRICS)[0])


def read_environment(path: Path) -> Mapping[str, Any]:
    """Return versions, hardware and seed of a run, empty if not recorded; ``UserError`` if damaged."""
    found = read_json(path / "environment.json") or {}
    if wrong := checked.wrong_field(found, checked.ENVIRONMENT):
        raise _damaged(path / "environment.json", wrong)
    return found


def read_identity(path: Path) -> Identity:
    """Load a ``run.json``; ``UserError`` if it is damaged or of a later version."""
    try:
        content = checked.parse_json(_read_text(path))
        found = content.pop("format")
        if found != FORMAT:
            raise UserError(f"{path} is expected in format {FORMAT}, but is in format {found}; update fl-privacy.")
        if wrong := checked.wrong_identity(content):
            raise _damaged(path, wrong)
        return Identity(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is expected to describe a run, but is damaged ({error}); remove it.") from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; ``None`` without the file, ``UserError`` if it is damaged."""
    if not path.is_file():
        return None
    try:
        return checked.parse_json(_read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is expected to hold JSON, but is damaged ({error}); remove it.") from error


def _read_text(path: Path) -> str:
    if not path.is_file():
        return ""
    if path.stat().st_size > MOST_BYTES:
        raise _damaged(path, f"it is larger than {MOST_BYTES >> 20} MiB")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(path, "it is no text") from error


def _summary(path: Path, stored: object, records: Sequence[Mapping[str, Any]]) -> Summary:
    seconds = stored.get("seconds") if isinstance(stored, Mapping) else None
    accuracy = stored.get("undefended_accuracy") if isinstance(stored, Mapping) else None
    total = seconds.get("total") if isinstance(seconds, Mapping) else None
    if not isinstance(stored, Mapping) or not isinstance(seconds, Mapping) or not fits([accuracy, total], _FIGURES):
        raise _damaged(path / SUMMARY, "it is no summary")
    return summarize(records, finished=True, undefended_accuracy=accuracy, total_seconds=total)


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is expected to be as `fl-privacy` wrote it, but is damaged: {what}; remove it.")


def failed_attackers(path: Path) -> dict[Attacker, str]:
    """Return attacker -> most common reason, for attackers that failed on every image of a run."""
    records, _ = checked.read_records(path / METRICS)
    found: dict[Attacker, str] = {}
    for attacker in Attacker:
        reasons = [record.get("failure") for record in checked.records_of(records, "image", attacker)]
        if reasons and all(reasons):
            found[attacker] = Counter(map(str, reasons)).most_common(1)[0][0]
    return found


def find_baseline(out: Path, config: Mapping[str, Any]) -> tuple[Path, float] | None:
    """Return a finished undefended run in ``out`` that trained like ``config``, if any, and its accuracy in [0, 1]."""
    wanted = training_hash(config)
    for summary in sorted(out.glob("*/summary.json")):
        try:
            identity = read_identity(summary.with_name(IDENTITY))
            accuracy = checked.parse_json(_read_text(summary))["final_accuracy"]
        except (UserError, OSError, ValueError, KeyError, TypeError):  # no reason to stop another run
            continue
        if identity.undefended and identity.training == wanted and isinstance(accuracy, float | int):
            return summary.parent, accuracy
    return None


NOTE = "share.json"
_MOST_NOTE = 1 << 12
FIGURES = ("environment.json", "threat_model.json", "defense.json", "partition.json", CLAIM, PAPER, METRICS, SUMMARY)
PICTURES = ("reconstructions/*.safetensors", "reconstructions/*.json", "pictures/*.png")


def copy_run(source: Path, destination: Path, *, with_originals: bool) -> None:
    """Copy a run without captured updates and final weights; absolute paths in its settings are cut to their last part.

    A copy ``with_originals`` has images and is readable only by its owner. ``UserError`` if ``run.json`` is damaged or
    a file is a link; ``OSError`` if copying fails.
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
    try:
        content = json.loads(read_text(source / IDENTITY))
        shown = {**content, "config": _with_names_only(content["config"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{source / IDENTITY} is expected to be a run's, but is damaged ({error}); run again."
        ) from error
    write(destination / IDENTITY, json.dumps(shown, indent=1, ensure_ascii=False))
    if (source / CONFIG).is_file():  # its text may fold or quote a path
        write(destination / CONFIG, yaml.safe_dump(shown["config"], sort_keys=False, allow_unicode=True))
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
    """Return what a copy made for sharing holds; ``None`` for a run itself, ``UserError`` for a damaged note."""
    note = folder / NOTE
    if not note.is_file():
        return None
    with suppress(UserError, ValueError, KeyError, TypeError, RecursionError):
        found = json.loads(read_text(note, _MOST_NOTE))["holds"]
        if found in get_args(Shared):
            return found
    raise UserError(f'{note} is expected to hold {{"holds": "figures"}} or "originals", but is damaged; share it anew.')


def _with_names_only(value: Any) -> Any:
    match value:
        case str() if Path(value).is_absolute():
            return Path(value).name or value
        case Mapping():
            return {key: _with_names_only(entry) for key, entry in value.items()}
        case list():
            return [_with_names_only(entry) for entry in value]
    return value
