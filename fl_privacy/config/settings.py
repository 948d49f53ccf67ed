"""Every setting of a run, once: its type and range, what it means, and what it decides.

From these declarations derive the checks, the folders' names, what is taken from a captured run, what a page says of a
run and the README's table. Defaults are in ``conf/``.
"""

# ruff: noqa: RUF009 (declarations are calls)
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, Literal, Self, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from fl_privacy.checks import fits, in_words, one_of
from fl_privacy.config.groups import suggest
from fl_privacy.errors import UserError

T = TypeVar("T")


class Role(StrEnum):
    """What a setting decides."""

    RUNTIME = "runtime"  # where and how fast a run goes and what it is called, but no result
    TRAINING = "training"  # what comes out of the training
    DEFENSE = "defense"  # likewise, by the defense; a run is compared with the same one without
    ATTACK = "attack"  # what an attacker that only listens makes of it


def setting(
    role: Role, meaning: str, *, within: tuple[float, float] | None = None, captured: bool | None = None
) -> Any:
    """Declare a setting.

    Args:
        role: what it decides.
        meaning: a phrase for the README.
        within: least and most of a number: beyond, memory or threads run out before anything can be said.
        captured: whether an attack on captured updates takes it from the run that made them; by default what decides
            the training is.
    """
    taken = role in (Role.TRAINING, Role.DEFENSE) if captured is None else captured
    return field(metadata={"role": role, "meaning": meaning, "within": within, "captured": taken})


def group(
    role: Role,
    meaning: str,
    *,
    shown: bool = True,
    runtime: tuple[str, ...] = (),
    within: Mapping[str, tuple[float, float]] | None = None,
    names: tuple[str, ...] = (),
) -> Any:
    """Declare a group of options, whose settings are those of what the chosen one builds.

    Args:
        role: what it decides.
        meaning: a phrase for the README.
        shown: whether pages tell the option.
        runtime: settings of it that are of the runtime.
        within: least and most of numbers in it, as far as an option has them.
        names: what its setting ``name`` may be, where it has one.
    """
    return field(
        metadata={
            "role": role,
            "meaning": meaning,
            "captured": role in (Role.TRAINING, Role.DEFENSE),
            "group": True,
            "shown": shown,
            "runtime": runtime,
            "limits": dict(within or {}),
            "names": names,
        }
    )


RUNTIME, TRAINING, DEFENSE, ATTACK = Role


@dataclass(frozen=True, kw_only=True)
class FederationSettings:
    """The option of the group ``federation``."""

    clients: int = setting(TRAINING, "how many clients", within=(1, 1_000_000))
    rounds: int = setting(TRAINING, "how many rounds", within=(1, 1_000_000))
    fraction: float = setting(TRAINING, "share of the clients that a round asks")
    aggregation: Literal["mean", "round_robin"] = setting(TRAINING, "of all replies, or one client a round")
    server_lr: float = setting(TRAINING, "learning rate of the server")
    norm_factor: float = setting(
        TRAINING, "replies are excluded whose norm is over so many times the largest median so far"
    )
    plan: DictConfig = group(TRAINING, "how clients train: `LocalPlan`")


@dataclass(frozen=True, kw_only=True)
class InterceptSettings:
    """What is intercepted, and when it is attacked."""

    target: Literal["probe", "update"] = setting(
        ATTACK,
        "`probe`: victims are extra batches that clients send through their own defended update without training on"
        " them; `update`: the training updates themselves, where `victims` and `batch_size` have no effect",
        captured=True,
    )
    rounds: Literal["first", "last", "ends", "all"] | int | list[int] = setting(
        ATTACK, "`first`, `last`, `ends` (both), `all`, a number or a list of numbers", captured=True
    )
    clients: Literal["all"] | list[int] = setting(
        ATTACK, "whose training updates: `all`, or a list of ids", captured=True
    )
    when: Literal["after", "during"] = setting(
        RUNTIME, "attack `after` the training, or `during` it at the end of each intercepted round"
    )
    save: bool = setting(RUNTIME, "keep intercepted updates in the run's folder, readable by its owner only")


@dataclass(frozen=True, kw_only=True)
class ThreatModelSettings:
    """The option of the group ``threat_model``: what the attacker is given beyond the protocol."""

    knows_labels: bool = setting(ATTACK, "the true labels")
    knows_defense: bool = setting(
        ATTACK,
        "each victim is attacked a second time, by an adaptive attacker that knows the public description of the"
        " defense and which updates of different rounds come from the same examples",
    )
    public_images: int = setting(
        ATTACK,
        "so many images of the split that is not attacked, for `attack.start=public_mean`",
        within=(0, 1_000_000),
    )
    colluder: int | None = setting(
        ATTACK,
        "a client that colludes: its private layers stand in for those of the victims, its own data are not attacked;"
        " `null`: the attacker draws some",
        captured=True,
    )
    knows_features: bool = setting(ATTACK, "what the victims' private layers put out", captured=True)
    features_at: str | None = setting(
        ATTACK,
        "the module whose input that is; `null`: the first public layer (with nothing private, the second layer)",
        captured=True,
    )


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """The budget of differential privacy."""

    epsilon: float | None = setting(
        RUNTIME,
        "sets the noise of `dp_sgd`, or of `dp_noise` with a `clip_norm`, such that the worst-off client spends it by"
        " the last round; `defense=none` stays as it is",
    )  # becomes noise of the defense before a run is told apart
    delta: float = setting(DEFENSE, "at which epsilon is reported, where the defense gives a guarantee")
    accountant: Literal["rdp", "prv"] = setting(DEFENSE, "`prv` is tighter and slower")


@dataclass(frozen=True, kw_only=True)
class BpkiSettings:
    """The Bayesian privacy loss of reconstructions."""

    bins: int = setting(ATTACK, "intervals of the histogram of the Bayesian privacy loss", within=(2, 65_536))
    smoothing: float = setting(ATTACK, "pixels added to each of them, so that none is empty", within=(0, 1e12))


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All that ``fl-privacy run`` and ``attack`` can be told, checked.

    ``choices`` are the options taken, by group.
    """

    data: DictConfig = group(TRAINING, "what clients train on")
    partition: DictConfig = group(TRAINING, "which client has what")
    model: DictConfig = group(TRAINING, "the network")
    federation: FederationSettings = group(TRAINING, "how clients and server train")
    defense: DictConfig = group(DEFENSE, "what clients do to their updates")
    attack: DictConfig = group(
        ATTACK,
        "what is tried on intercepted updates",
        runtime=("shards",),
        within={"iterations": (0, 100_000_000), "restarts": (1, 10_000), "history": (1, 10_000)},
    )
    threat_model: ThreatModelSettings = group(ATTACK, "what the attacker is given", shown=False)
    secure_aggregation: DictConfig = group(
        TRAINING,
        "whether the server reads single updates",
        shown=False,
        within={"levels": (2, 2**32)},
        names=("none", "secagg", "ckks"),
    )
    backend: DictConfig = group(RUNTIME, "what runs the clients", shown=False)
    seed: int = setting(TRAINING, "all randomness of a run derives from this number", within=(0, 2**63 - 1))
    victims: int = setting(ATTACK, "how many batches are attacked", within=(1, 1_000_000), captured=True)
    batch_size: int = setting(ATTACK, "examples in each of them", within=(1, 1_000_000), captured=True)
    intercept: InterceptSettings = field()
    privacy: PrivacySettings = field()
    baseline: bool = setting(
        RUNTIME,
        "compare accuracy with the same training without defense (PMM): found among the runs in `out`, else trained",
    )
    evaluate_every: int = setting(
        TRAINING, "test accuracy is measured every so many rounds, and after the last", within=(1, 10_000_000)
    )
    split: Literal["train", "test"] = setting(ATTACK, "`attack` takes its victims from this split of the data")
    weights: str | None = setting(
        TRAINING, "`attack` takes these weights (`model.safetensors` of a run) instead of fresh ones"
    )
    captured: str | None = setting(ATTACK, "`attack` takes what the run in this folder captured")
    trust: str | list[str] | None = setting(
        RUNTIME,
        "what a captured configuration may name beside what is registered: import paths of models and defenses, modules"
        " that define them, names of data sets; naming code means running it",
    )
    evaluator: str | None = setting(
        ATTACK, "also measure the noise ratio of reconstructions, by this file of `train-evaluator`"
    )
    tracing: int | None = setting(
        ATTACK,
        "victims of a single client are dealt to so many participants, whose images are told apart (`null`: 10)",
        within=(1, 1_000_000),
    )
    tracing_queries: int | None = setting(
        ATTACK,
        "tracing asks for so many images of the attacked clients, those attacked among them (`null`: these alone)",
        within=(1, 10_000_000),
    )
    bpki: BpkiSettings = field()
    device: str = setting(RUNTIME, "`auto` takes a GPU where there is one")
    client_threads: int = setting(
        TRAINING, "CPU threads of one client; they decide the last bits of a sum", within=(1, 256)
    )
    attack_threads: int = setting(ATTACK, "CPU threads of an attack; likewise, more are faster", within=(1, 1024))
    out: str = setting(RUNTIME, "folder of the runs' folders")
    name: str | int | None = setting(RUNTIME, "put in front of the folder's name")
    overwrite: bool = setting(RUNTIME, "run again what has finished already")
    choices: DictConfig = field()

    @classmethod
    def of(cls, config: Mapping[Any, Any] | DictConfig | ListConfig) -> Self:
        """The settings that ``config`` holds.

        Raises:
            UserError: one is missing, of a wrong type or out of its range, or nothing reads it.
        """
        section = config if isinstance(config, DictConfig | ListConfig) else OmegaConf.create(dict(config))
        assert isinstance(section, DictConfig)
        return _read(cls, section, "")

    def plain(self) -> dict[str, Any]:
        """Nested mappings, lists, text, numbers, as a file holds them."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """The same settings but for ``changes``, by dotted key."""
        content = self.plain()
        for key, value in changes.items():
            put(content, key, value)
        return type(self).of(content)


def declared_settings() -> Iterator[tuple[str, Field[Any]]]:
    """Dotted key and declaration of every setting and group, groups first."""
    yield from _walk(RunSettings, "")


def groups(*, shown: bool = False) -> list[str]:
    """Names of the groups of options; with ``shown`` those that pages tell."""
    return [f.name for f in fields(RunSettings) if "group" in f.metadata and (f.metadata["shown"] or not shown)]


def sections() -> list[str]:
    """Names of all that holds settings by name."""
    return [f.name for f in fields(RunSettings) if is_dataclass(f.type) or f.type is DictConfig]


def keys_of(role: Role) -> tuple[str, ...]:
    """Dotted keys of all settings with this role, and of the choices of groups with it."""
    found: list[str] = []
    for key, declared in declared_settings():
        is_group = "group" in declared.metadata
        if is_group and role is RUNTIME:
            found += [f"{key}.{name}" for name in declared.metadata["runtime"]]
        if declared.metadata["role"] is role and not is_dataclass(declared.type):
            found.append(key)
    of_choice = {name: _declared(name).metadata["role"] for name in groups()}
    of_choice |= {"experiment": RUNTIME, "threat_model": RUNTIME}  # short for settings that have roles of their own
    return (*found, *(f"choices.{name}" for name, of in of_choice.items() if of is role))


def captured_keys() -> tuple[str, ...]:
    """Dotted keys that an attack on captured updates takes from the run that made them."""
    found: list[str] = []
    for key, declared in declared_settings():
        if declared.metadata["captured"] and key.partition(".")[0] not in found:
            found.append(key)
    return tuple(found)


def captured_groups() -> tuple[str, ...]:
    """Those of them that name what a run is made of."""
    return tuple(name for name in groups() if _declared(name).metadata["captured"])


def is_within(key: str, keys: Iterable[str]) -> bool:
    """Whether the dotted ``key`` is one of ``keys`` or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def select(content: Any, key: str) -> Any:
    """What nested mappings hold at the dotted ``key``; ``None`` where there is nothing."""
    for name in key.split("."):
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted ``key`` in nested mappings."""
    *above, last = key.split(".")
    for name in above:
        content = content.setdefault(name, {})
    content[last] = value


def expect_type(name: str, value: object, annotation: Any) -> None:
    """Raise ``UserError`` unless ``value`` fits ``annotation``; one that Hydra is yet to build does."""
    is_built = isinstance(value, dict) and "_target_" in value
    if not is_built and not fits(value, annotation):
        raise UserError(f"{name} is expected to be {in_words(annotation)}, but got {value!r}.")


def expect_within(name: str, value: object, within: tuple[float, float] | None) -> None:
    """Raise ``UserError`` unless ``value`` is no number or lies ``within`` these bounds."""
    if within and isinstance(value, int | float) and not within[0] <= value <= within[1]:
        raise UserError(f"{name} is expected to be at least {within[0]:g} and at most {within[1]:g}, but got {value}.")


def _read(kind: type[T], section: DictConfig, above: str) -> T:
    declared = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for key in map(str, section):
        if key not in declared:
            raise UserError(f"Unknown key {above}{key}{suggest(key, declared)}")
    return kind(**{name: _value(f, hints[name], section.get(name), f"{above}{name}") for name, f in declared.items()})


def _value(declared: Field[Any], annotation: Any, value: Any, name: str) -> Any:
    if is_dataclass(annotation) or annotation is DictConfig:
        if not isinstance(value, DictConfig):
            raise UserError(f"{name} is expected to be a section of settings, but is none; leave it as it is.")
        for key, within in declared.metadata.get("limits", {}).items():
            expect_within(f"{name}.{key}", value.get(key), within)
        if names := declared.metadata.get("names"):
            one_of(f"{name}.name", value.get("name"), names)
        section: Any = annotation
        return _frozen(value) if annotation is DictConfig else _read(section, value, f"{name}.")
    value = list(value) if isinstance(value, ListConfig) else value
    expect_type(name, value, annotation)
    expect_within(name, value, declared.metadata["within"])
    return value


def _frozen(section: DictConfig) -> DictConfig:
    own = OmegaConf.create(OmegaConf.to_container(section, resolve=True))
    assert isinstance(own, DictConfig)
    OmegaConf.set_readonly(own, True)
    return own


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {name: _plain(entry) for name, entry in vars(value).items()}
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig) else value


def _walk(kind: type, above: str) -> Iterator[tuple[str, Field[Any]]]:
    for declared in fields(kind):
        if "role" in declared.metadata:
            yield f"{above}{declared.name}", declared
        if is_dataclass(declared.type):
            yield from _walk(declared.type, f"{above}{declared.name}.")  # type: ignore[arg-type]


def _declared(name: str) -> Field[Any]:
    return RunSettings.__dataclass_fields__[name]
