"""Load the jobs of a study: a trade-off from a grid, or a benchmark from a fixed track."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from fl_privacy.checks import fits, in_words, whole
from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR, PACKAGE
from fl_privacy.runs.config.compose import expand_sweep, merge_overrides, override_keys, swept_key
from fl_privacy.runs.config.parse import suggest
from fl_privacy.runs.config.settings import UNDEFENDED, AttackCell, GridPoint, Role, State, is_within, keys_of
from fl_privacy.runs.config.untrusted import expect_below_here, expect_plain, read_settings, trust_in

GRIDS = PACKAGE / "grids"

_SECTIONS: dict[str, Any] = {
    "settings": list[str],
    "train": list[str],
    "attack": list[str],
    "attacks": Mapping[str, list[str]],
    "weights": Literal["initial", "final"],
    "defenses": Mapping[str, list[str]],
}
"""Key of a grid's file -> type."""


@dataclass(frozen=True, kw_only=True)
class AttackPlan:
    """One attack of a study: the training whose model it attacks, the model's state (untrained, ...), and overrides."""

    training: str
    state: State
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Defenses, trainings and attacks; all combinations are run."""

    settings: tuple[str, ...]  # overrides of every job
    attack: tuple[str, ...]
    trainings: Mapping[str, tuple[str, ...]]  # overrides of each training by name, the main one first
    attacks: Mapping[AttackCell, AttackPlan]
    points: tuple[GridPoint, ...]  # defenses at their strengths, the undefended one first
    early: int = 1  # rounds of training before the state ``early``
    # training -> overrides of ``train-evaluator`` for Refiner's network
    evaluators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # family of the user's own defense among ``points`` -> name of its runs, which includes the source's hash
    entry: Mapping[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> list[AttackCell]:
        return list(self.attacks)

    def weights(self, training: str = "") -> Literal["initial", "final", "both"]:
        fresh = {plan.state == "untrained" for plan in self.attacks.values() if plan.training == training}
        return "both" if len(fresh) > 1 else "initial" if True in fresh else "final"

    def training(self, point: GridPoint, name: str = "") -> list[str]:
        own = ("attack=none", "baseline=false")
        return merge_overrides(self.settings, self.trainings[name], point.overrides, own)

    def attacking(self, point: GridPoint, cell: AttackCell) -> list[str]:
        return merge_overrides(self.attacks[cell].overrides, point.overrides)


def load_grid(name: str, overrides: Sequence[str] = ()) -> Study:
    """Load a study; ``attack.*`` overrides go to attack jobs, ``inference*`` ones to training jobs, others to both."""
    raw = _loaded("grid", name, GRIDS, _SECTIONS)
    _expect_defended(raw["defenses"], f"the grid {name}")
    of_grid = (raw["settings"], raw["train"], raw["attack"], *raw["attacks"].values(), *raw["defenses"].values())
    _expect_safe(of_grid, trust_in(overrides), f"The grid {name}", own=name not in names_in(GRIDS))
    to_attacks, to_train = (_of_keys(overrides, start) for start in ("attack.", "inference"))
    to_all = [o for o in overrides if o not in (*to_attacks, *to_train)]
    state: State = "untrained" if raw["weights"] == "initial" else "trained"
    common = (*raw["settings"], *raw["attack"])
    return Study(
        settings=raw["settings"],
        attack=raw["attack"],
        trainings={"": (*raw["train"], *to_all, *to_train)},
        attacks={
            AttackCell(attack=attack): AttackPlan(
                training="", state=state, overrides=(*common, *own, *to_all, *to_attacks)
            )
            for attack, own in raw["attacks"].items()
        },
        points=_points(raw["defenses"]),
    )


def _loaded(kind: str, name: str, folder: Path, sections: Mapping[str, Any]) -> dict[str, Any]:
    names = names_in(folder)
    path = folder / f"{name}.yaml" if name in names else Path(name)
    if not path.is_file():
        raise UserError(f"A {kind} is expected to be {', '.join(names)} or a YAML file, but got {name!r}; name one.")
    return _checked(read_settings(path), sections, f"the {kind} {name}")


def names_in(folder: Path) -> list[str]:
    """List the names of the study files (``NAME.yaml``) in ``folder``."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _of_keys(overrides: Sequence[str], start: str) -> list[str]:
    return [o for o, key in zip(overrides, override_keys(overrides), strict=True) if key.startswith(start)]


def _expect_safe(every: Iterable[Sequence[str]], trust: Collection[str], where: str, *, own: bool) -> None:
    for overrides in every:
        expect_plain(overrides, trust, where=where)
        if own:
            expect_below_here(overrides, where=where)


def _points(defenses: Mapping[str, Sequence[str]]) -> tuple[GridPoint, ...]:
    undefended = GridPoint(UNDEFENDED, "", ("defense=none",))
    return (undefended, *(point for family, own in defenses.items() for point in grid_points(family, own)))


def _expect_defended(defenses: Mapping[str, object], where: str) -> None:
    if UNDEFENDED in defenses:
        raise UserError(
            f"defenses in {where} are expected to have names of their own, but got {UNDEFENDED}, which each sweep"
            " adds; use another name, or leave it out."
        )


def grid_points(family: str, overrides: Sequence[str]) -> Iterable[GridPoint]:
    """Yield the defense ``family`` at each strength listed in ``overrides``, such as ``defense.rate=0.1,0.9``."""
    key = swept_key(overrides)
    for point in expand_sweep(overrides):
        value = next((o.partition("=")[2] for o in point if o.partition("=")[0] == key), "")
        yield GridPoint(family, f"{key.rpartition('.')[2].replace('_', ' ')} {value}".strip(), tuple(point))


TRACKS = PACKAGE / "tracks"

_SECTIONS_OF_TRACK: dict[str, Any] = {
    "version": int,
    "about": str,
    "settings": list[str],
    "attack": list[str],
    "early": int,
    "trainings": Mapping[str, list[str]],
    "uploads": Mapping[str, Mapping[str, Any]],
    "accuracy_loss": list[float],
    "defenses": Mapping[str, list[str]],
    "left_out": Mapping[str, str],
    "evaluators": Mapping[str, list[str]],
}
"""Key of a track's file -> type."""


@dataclass(frozen=True, kw_only=True)
class UploadKind:
    """Uploads that a benchmark attacks: from which training, at which states of the model, with which overrides."""

    training: str
    states: tuple[State, ...]
    attack: tuple[str, ...]
    servers: Mapping[str, tuple[str, ...]]
    server_states: tuple[State, ...]


@dataclass(frozen=True, kw_only=True)
class Track(Study):
    """A benchmark: a study with fixed settings."""

    name: str
    version: int  # figures of different versions are not compared
    about: str
    uploads: Mapping[str, UploadKind]
    accuracy_loss: tuple[float, ...]  # percentage points, each with a leaderboard
    left_out: Mapping[str, str]  # shipped defense -> reason for its absence
    sha256: str  # hash of everything that determines the figures, without the user's own defenses

    def entered(self, points: Sequence[GridPoint], source: str) -> "Track":
        family = points[0].family
        if family in {point.family for point in self.points}:
            raise UserError(f"A new name is expected for the entry, but the track already has {family}; rename it.")
        return replace(self, points=(*self.points, *points), entry={family: f"entry-{source[:12]}"})


def load_track(name: str, overrides: Sequence[str] = ()) -> Track:
    """Load a track (benchmark); ``UserError`` if it is missing or invalid, or if ``overrides`` change its results."""
    raw, uploads = _loaded("track", name, TRACKS, _SECTIONS_OF_TRACK), dict[str, UploadKind]()
    for upload, entry in raw["uploads"].items():
        where = f"uploads.{upload} of the track {name}"
        uploads[upload] = kind = UploadKind(**_checked(entry, get_type_hints(UploadKind), where))
        _expect_training(kind.training, raw["trainings"], where)
    for training in raw["evaluators"]:
        _expect_training(training, raw["trainings"], f"The section evaluators of the track {name}")
    whole(f"version of the track {name}", raw["version"], at_least=1, example=1)
    whole(f"early of the track {name}", raw["early"], at_least=1, example=3)
    for key in ("trainings", "uploads", "accuracy_loss"):
        if not raw[key]:
            raise UserError(f"{key} of the track {name} is expected to have an entry, but has none; add one.")
    _expect_defended(raw["defenses"], f"the track {name}")
    of_uploads = [own for kind in uploads.values() for own in (kind.attack, *kind.servers.values())]
    named = [own for key in ("trainings", "defenses", "evaluators") for own in raw[key].values()]
    every = (raw["settings"], raw["attack"], *of_uploads, *named)
    _expect_safe(every, (), f"The track {name}", own=name not in names_in(TRACKS))
    free = keys_of(Role.RUNTIME)
    for key in override_keys(overrides):
        if not is_within(key, free):
            raise UserError(
                f"The track {name} fixes {key}, or else its figures could not be compared; copy its file"
                f" ({TRACKS / 'smoke.yaml'} is one), change that and run the copy, or set one of"
                f" {', '.join(k for k in free if not k.startswith('choices.'))}."
            )
    of_attacks = _of_keys(overrides, "attack.")
    settings = (*raw["settings"], *(o for o in overrides if o not in of_attacks))
    attack, trainings = (*raw["attack"], *of_attacks), raw["trainings"]
    return Track(
        name=Path(name).stem,
        version=raw["version"],
        about=" ".join(raw["about"].split()),
        settings=settings,
        attack=attack,
        early=raw["early"],
        trainings=trainings,
        uploads=uploads,
        attacks={
            cell: AttackPlan(
                training=kind.training,
                state=state,
                overrides=(*settings, *trainings[kind.training], *attack, *kind.attack, *kind.servers.get(server, ())),
            )
            for kind, state, server, cell in _cells(uploads)
        },
        accuracy_loss=tuple(sorted(raw["accuracy_loss"])),
        points=_points(raw["defenses"]),
        left_out=_left_out(name, raw),
        evaluators=raw["evaluators"],
        sha256=hashlib.sha256(json.dumps(raw | {"about": "", "left_out": {}}, sort_keys=True).encode()).hexdigest(),
    )


def _left_out(name: str, raw: Mapping[str, Any]) -> dict[str, str]:
    given = dict(raw["left_out"])
    if name not in names_in(TRACKS):
        return given
    used = {override for own in raw["defenses"].values() for override in own}
    shipped = sorted(path.stem for path in (CONFIG_DIR / "defense").glob("*.yaml"))
    others = [each for each in shipped if each not in ("none", "custom", *given) and f"defense={each}" not in used]
    return given | dict.fromkeys(others, "not measured in this track")


def _cells(uploads: Mapping[str, UploadKind]) -> Iterator[tuple[UploadKind, State, str, AttackCell]]:
    for name, kind in uploads.items():
        for state in kind.states:
            yield kind, state, "", AttackCell(uploads=name, state=state)
    for name, kind in uploads.items():
        for server in kind.servers:
            for state in kind.server_states:
                yield kind, state, server, AttackCell(uploads=name, state=state, server=server)


def _expect_training(name: str, trainings: Mapping[str, object], where: str) -> None:
    if name not in trainings:
        raise UserError(
            f"{where} is expected to name a training of the track, but got {name}{suggest(name, trainings)}"
        )


def _checked(raw: object, sections: Mapping[str, Any], what: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise UserError(f"{what} is expected to be a mapping, but got {raw!r}; write KEY: VALUE lines.")
    for key in raw:
        if key not in sections:
            raise UserError(f"Unknown key {key} in {what}{suggest(str(key), sections)}")
    for key, annotation in sections.items():
        if key not in raw or not fits(raw[key], annotation):
            raise UserError(
                f"{key} in {what} is expected to be {in_words(annotation)}, but got {raw.get(key)!r}; correct the file."
            )
    return {key: _frozen(value) for key, value in raw.items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _frozen(entry) for key, entry in value.items()}
    return tuple(value) if isinstance(value, list) else value
