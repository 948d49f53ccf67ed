"""A grid of defenses and attacks: which jobs a trade-off sweep consists of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fl_privacy.checks import fits, in_words
from fl_privacy.config.foreign import expect_plain, read_settings, trust_in
from fl_privacy.config.groups import suggest
from fl_privacy.config.overrides import expand_sweep, merge_overrides, override_keys, swept_key
from fl_privacy.config.places import expect_below_here
from fl_privacy.errors import UserError

GRIDS = Path(__file__).resolve().parent.parent / "grids"

_SECTIONS: dict[str, Any] = {
    "settings": list[str],
    "train": list[str],
    "attack": list[str],
    "attacks": Mapping[str, list[str]],
    "weights": Literal["initial", "final"],
    "defenses": Mapping[str, list[str]],
}
"""Of a grid's file -> type."""

UNDEFENDED = "Undefended"


@dataclass(frozen=True)
class GridPoint:
    """A defense at one strength.

    Attributes:
        family: points of one family make a curve.
        strength: ``rate 0.9``; empty where there is only one, and for the undefended point.
        overrides: of the defense.
    """

    family: str
    strength: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is trained and what is attacked; attributes are overrides unless said otherwise.

    Attributes:
        settings: of every job.
        train: of the trainings.
        attack: of the attacks.
        attacks: of each attack by its name.
        weights: attack the model of the first round or the one that the training ended at.
        points: the undefended one first.
    """

    settings: tuple[str, ...]
    train: tuple[str, ...]
    attack: tuple[str, ...]
    attacks: Mapping[str, tuple[str, ...]]
    weights: Literal["initial", "final"]
    points: tuple[GridPoint, ...]

    def training(self, point: GridPoint) -> list[str]:
        """Overrides of the training of ``point``, which nobody attacks; accuracies are compared in the end."""
        own = ("attack=none", "baseline=false")
        return merge_overrides(self.settings, self.train, point.overrides, own)

    def attacking(self, point: GridPoint, attack: str, weights: Path | None) -> list[str]:
        """Overrides of the attack called ``attack`` on ``point``, whose training is in ``weights`` if it matters."""
        own = (f"weights={weights}",) if weights else ()
        return merge_overrides(self.settings, self.attack, self.attacks[attack], point.overrides, own)


def load_grid(name: str, overrides: Sequence[str] = ()) -> Grid:
    """The grid of that name, or in the file of that name.

    Args:
        name: of a file in ``fl_privacy/grids``, or the path of another one.
        overrides: put last, hence winning; those of ``attack.*`` go to the attacks alone, those of
            ``inference`` to the trainings.

    Raises:
        UserError: there is no such grid, or it is not one.
    """
    raw, trust = _read(name), trust_in(overrides)
    for key in raw:
        if key not in _SECTIONS:
            raise UserError(f"Unknown key {key} in the grid {name}{suggest(str(key), _SECTIONS)}")
    for key, annotation in _SECTIONS.items():
        if key not in raw or not fits(raw[key], annotation):
            raise UserError(
                f"{key} in the grid {name} is expected to be {in_words(annotation)}, but got {raw.get(key)!r}."
            )
    if UNDEFENDED in raw["defenses"]:
        raise UserError(
            f"defenses in the grid {name} are expected to have names of their own, but got {UNDEFENDED}, which each"
            " sweep has beside them; call it otherwise, or leave it out."
        )
    for own in (raw["settings"], raw["train"], raw["attack"], *raw["attacks"].values(), *raw["defenses"].values()):
        expect_plain(own, trust, where=f"The grid {name}")
        if name not in grid_names():
            expect_below_here(own, where=f"The grid {name}")
    to_attacks = [o for o, key in zip(overrides, override_keys(overrides), strict=True) if key.startswith("attack.")]
    to_train = [o for o, key in zip(overrides, override_keys(overrides), strict=True) if key.startswith("inference")]
    to_all = [o for o in overrides if o not in (*to_attacks, *to_train)]
    return Grid(
        settings=tuple(raw["settings"]),
        train=(*raw["train"], *to_all, *to_train),
        attack=tuple(raw["attack"]),
        attacks={attack: (*own, *to_all, *to_attacks) for attack, own in raw["attacks"].items()},
        weights=raw["weights"],
        points=(
            GridPoint(UNDEFENDED, "", ("defense=none",)),
            *(point for family, own in raw["defenses"].items() for point in grid_points(family, own)),
        ),
    )


def grid_names() -> list[str]:
    """Grids that come with the package."""
    return sorted(path.stem for path in GRIDS.glob("*.yaml"))


def grid_points(family: str, overrides: Sequence[str]) -> Iterable[GridPoint]:
    """The points of ``family``, one for each strength that its ``overrides`` list."""
    key = swept_key(overrides)
    for point in expand_sweep(overrides):
        value = next((o.partition("=")[2] for o in point if o.partition("=")[0] == key), "")
        yield GridPoint(family, f"{key.rpartition('.')[2].replace('_', ' ')} {value}".strip(), tuple(point))


def _read(name: str) -> Mapping[str, Any]:
    path = GRIDS / f"{name}.yaml" if name in grid_names() else Path(name)
    if not path.is_file():
        raise UserError(f"A grid is expected to be a YAML file or one of {', '.join(grid_names())}, but got {name!r}.")
    return read_settings(path)
