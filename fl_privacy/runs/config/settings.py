"""Declare every setting of a run: type, range, meaning and role; defaults are in ``conf/``."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal, Self

from fl_privacy.errors import UserError
from fl_privacy.runs.config.parse import Options, called, options, plain_value, put, read_section

# ruff: noqa: RUF009 (declarations are calls)


class Role(StrEnum):
    """Part of a run that a setting affects: only its execution (``RUNTIME``), the training, a defense or an attack."""

    RUNTIME = "runtime"  # place, speed and name of a run, but no result
    TRAINING = "training"  # the result of the training
    DEFENSE = "defense"  # the result of the training, by the defense; a run is compared with the same one without
    ATTACK = "attack"  # the result of a passive attacker


def setting(
    role: Role, meaning: str, *, within: tuple[float, float] | None = None, captured: bool | None = None, **group: Any
) -> Any:
    """Declare a setting of a run, as a dataclass field; ``role``: what in a run the setting changes.

    ``meaning``: help text. ``within``: least and largest value. ``captured``: ``True`` if an attack on captured updates
    copies the value from the run that captured them; by default, only for the roles training and defense.
    """
    taken = role in (Role.TRAINING, Role.DEFENSE) if captured is None else captured
    return field(metadata={"role": role, "meaning": meaning, "within": within, "captured": taken, **group})


def group(
    role: Role,
    meaning: str,
    *,
    shown: bool = True,
    runtime: tuple[str, ...] = (),
    within: Mapping[str, tuple[float, float]] | None = None,
    names: tuple[str, ...] = (),
) -> Any:
    """Declare a group of options as a dataclass field; ``role``, ``meaning``: see :func:`setting`.

    ``shown``: ``True`` if reports name the chosen option. ``runtime``: settings that change no result. ``within``:
    setting -> (least, largest). ``names``: allowed values of the setting ``name``; empty allows all.
    """
    return setting(role, meaning, group=True, shown=shown, runtime=runtime, limits=dict(within or {}), names=names)


RUNTIME, TRAINING, DEFENSE, ATTACK = Role


@dataclass(frozen=True, kw_only=True)
class FederationSettings:
    """Settings of the group ``federation``."""

    clients: int = setting(TRAINING, "how many clients", within=(1, 1_000_000))
    rounds: int = setting(TRAINING, "how many rounds", within=(1, 1_000_000))
    fraction: float = setting(TRAINING, "share of the clients that a round asks")
    aggregation: Literal["mean", "round_robin"] = setting(TRAINING, "of all replies, or one client a round")
    server_lr: float = setting(TRAINING, "learning rate of the server")
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = setting(
        TRAINING, "step along the mean: FedAvg, FedAvgM, FedAdam or FedYogi"
    )
    server_momentum: float = setting(TRAINING, "decay of the server's first moment")
    server_beta2: float = setting(TRAINING, "decay of the second moment, for `adam` and `yogi`")
    server_tau: float = setting(TRAINING, "number added to its root")
    server_noise: float = setting(TRAINING, "standard deviation of the server's noise on the mean")
    norm_factor: float = setting(
        TRAINING, "a reply is excluded if its norm is over this multiple of the largest median so far"
    )
    plan: Options = group(TRAINING, "how clients train: `LocalPlan`")


@dataclass(frozen=True, kw_only=True)
class InterceptSettings:
    """Which uploads are intercepted, and when attacks run."""

    uploads: Literal["probe", "update"] = setting(
        ATTACK,
        "`probe`: victims are extra batches, defended and sent but not trained on; `update`: the training updates"
        " themselves (`victims` and `batch_size` have no effect)",
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
    """Settings of the group ``threat_model``: the attacker's knowledge beyond the protocol."""

    observer: Literal["server", "another_site"] = setting(
        ATTACK, "who looks: the `server`, or the last client as `another_site`", captured=True
    )
    colluding_sites: int = setting(
        ATTACK, "number of such sites that pool what they know", within=(1, 1_000_000), captured=True
    )
    differences: bool = setting(ATTACK, "solve rounds of different participants for single sites", captured=True)
    knows_numbers: bool = setting(
        ATTACK, "such sites are given all numbers of examples; else they estimate their share of a mean", captured=True
    )
    knows_labels: bool = setting(ATTACK, "the true labels")
    knows_lengths: bool = setting(ATTACK, "number of tokens of each text, as published attacks assume")
    knows_defense: bool = setting(
        ATTACK,
        "attack also with knowledge of the public description of the defense and of updates from the same examples",
    )
    public_images: int | None = setting(
        ATTACK,
        "number of images or texts, not attacked, for the prior of `auto`, `attack.start=public_mean` and"
        " `attack=lamp`; `null`: all, up to 5,000",
        within=(0, 1_000_000),
    )
    colluder: int | None = setting(
        ATTACK,
        "client whose private layers stand in for the victims' and whose data are not attacked; `null`: the attacker"
        " draws some",
        captured=True,
    )
    knows_features: bool = setting(ATTACK, "outputs of the victims' private layers", captured=True)
    features_at: str | None = setting(
        ATTACK,
        "module whose input they are; `null`: the first public layer, `activation`: behind the private layers'"
        " activation (nothing private: the first activation)",
        captured=True,
    )
    features_of: Literal["sent", "trained"] = setting(
        ATTACK, "outputs of the model as `sent`, or of each client's after training", captured=True
    )


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Budget of differential privacy."""

    epsilon: float | None = setting(
        RUNTIME,
        "sets the noise of `dp_sgd`, or of `dp_noise` with a `clip_norm`, so that no client spends more by the last"
        " round; `defense=none` stays",
    )  # becomes noise of the defense before the run is hashed
    delta: float = setting(DEFENSE, "delta of the reported epsilon, if there is a guarantee")
    accountant: Literal["rdp", "prv"] = setting(DEFENSE, "`prv` is tighter and slower")


@dataclass(frozen=True, kw_only=True)
class BpkiSettings:
    """Settings of the metric ``bpki``, the Bayesian privacy loss of reconstructed images."""

    bins: int = setting(ATTACK, "intervals of the histogram of the Bayesian privacy loss", within=(2, 65_536))
    smoothing: float = setting(ATTACK, "pixels added to each of them, so that none is empty", within=(0, 1e12))
    prior: Literal["public"] | None = setting(
        ATTACK,
        "the attacker's prior on pixels: `public` is the histogram of images that nobody attacks (`null`: uniform)",
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All checked settings of ``fl-privacy run`` and ``attack``; ``choices`` has the chosen options by group."""

    data: Options = group(TRAINING, "what clients train on")
    partition: Options = group(TRAINING, "which client has what")
    model: Options = group(TRAINING, "the network")
    federation: FederationSettings = group(TRAINING, "how clients and server train")
    defense: Options = group(DEFENSE, "what clients do to their updates")
    guard: Options = group(DEFENSE, "whether clients check a model before training, and refuse some")
    attack: Options = group(
        ATTACK,
        "attack on intercepted updates",
        runtime=("shards",),
        within={"iterations": (0, 100_000_000), "restarts": (1, 10_000), "history": (1, 10_000)},
    )
    inference: Options = group(ATTACK, "other questions about intercepted updates; several as `[membership,source]`")
    threat_model: ThreatModelSettings = group(ATTACK, "what the attacker is given", shown=False)
    server: Options = group(TRAINING, "`honest`, or what a malicious server sends instead")
    secure_aggregation: Options = group(
        TRAINING,
        "whether the server sees single updates",
        shown=False,
        within={"levels": (2, 2**32)},
        names=("none", "secagg", "ckks"),
    )
    backend: Options = group(RUNTIME, "what runs the clients", shown=False)
    seed: int = setting(TRAINING, "all randomness of a run derives from this number", within=(0, 2**63 - 1))
    victims: int = setting(ATTACK, "how many batches are attacked", within=(1, 1_000_000), captured=True)
    batch_size: int = setting(ATTACK, "examples in each of them", within=(1, 1_000_000), captured=True)
    intercept: InterceptSettings = field()
    privacy: PrivacySettings = field()
    films: int = setting(
        RUNTIME,
        "number of first victims of each attacked round whose reconstruction the page plays; 0: none",
        within=(0, 64),
    )
    baseline: bool = setting(
        RUNTIME, "compare accuracy with the same training undefended: a run in `out`, else trained"
    )
    evaluate_every: int = setting(
        TRAINING,
        "rounds between measurements of the test accuracy; the last is always measured",
        within=(1, 10_000_000),
    )
    holdout: int = setting(
        TRAINING,
        "number of training examples that no client gets, as non-members for membership inference; 0: test examples",
        within=(0, 10_000_000),
    )
    split: Literal["train", "test"] = setting(ATTACK, "`attack` takes its victims from this split of the data")
    weights: str | None = setting(
        TRAINING, "the model's start: a run's `model.safetensors` or folder (`null`: fresh values)"
    )
    captured: str | None = setting(ATTACK, "`attack` takes what the run in this folder captured")
    truth: str | None = setting(
        ATTACK,
        "originals for an `attack` on a captured Flower app: a folder of images, or the name of a data set (`null`:"
        " reconstructions are shown alone)",
    )
    trust: str | list[str] | None = setting(
        RUNTIME,
        "unregistered names that a captured configuration may use: import paths of models and defenses, their modules,"
        " names of data sets; naming code means running it",
    )
    candidates: int = setting(
        ATTACK, "public images compared with each original; below 100 none is identified", within=(0, 100_000)
    )
    evaluator: str | None = setting(
        ATTACK, "file of `train-evaluator` that measures the noise ratio of reconstructions"
    )
    tracing: int | None = setting(
        ATTACK,
        "number of participants among whom tracing divides the victims of a single client (`null`: 10)",
        within=(1, 1_000_000),
    )
    tracing_queries: int | None = setting(
        ATTACK,
        "number of the attacked clients' images that tracing compares (`null`: the attacked ones)",
        within=(1, 10_000_000),
    )
    bpki: BpkiSettings = field()
    device: str = setting(RUNTIME, "`auto`: a GPU, if there is one")
    client_threads: int = setting(
        TRAINING, "CPU threads of one client; they decide the last bits of a sum", within=(1, 256)
    )
    attack_threads: int = setting(ATTACK, "CPU threads of an attack; small layers take one", within=(1, 1024))
    jobs: int | None = setting(
        RUNTIME,
        "processes that attack parts of the victims, each with `attack_threads` (`null`: by the cores); no result"
        " depends on it",
        within=(1, 4096),
    )
    out: str = setting(RUNTIME, "folder of the runs' folders")
    name: str | int | None = setting(RUNTIME, "put in front of the folder's name")
    overwrite: bool = setting(RUNTIME, "run again what has finished already")
    page: bool = setting(RUNTIME, "write the run's page; `fl-privacy report RUN_DIR` does so later")
    choices: Options = field()

    @classmethod
    def of(cls, config: Mapping[Any, Any]) -> Self:
        return read_section(cls, config)

    def __hash__(self) -> int:
        return hash(json.dumps(self.plain(), sort_keys=True))

    @property
    def compares(self) -> bool:
        return self.baseline and self.choices["defense"] != "none"

    @property
    def sites(self) -> tuple[int, ...]:
        """Return the clients that attack the others; empty if the server attacks."""
        clients, number = self.federation.clients, self.threat_model.colluding_sites
        if self.threat_model.observer == "server":
            of_sites = {"differences": False, "knows_numbers": True}
            for name in [name for name, usual in of_sites.items() if getattr(self.threat_model, name) is not usual]:
                raise UserError(
                    f"threat_model.{name}={str(not of_sites[name]).lower()} is expected of another site, but got"
                    " threat_model.observer=server; set threat_model=another_site."
                )
            return ()
        if number >= clients:
            raise UserError(
                f"threat_model.colluding_sites is expected to be below federation.clients={clients}, so that a site is"
                f" left to attack, but got {number}; raise federation.clients."
            )
        return tuple(range(clients - number, clients))

    def called(self, part: str) -> str:
        return called(self.choices[part], getattr(self, part))

    def plain(self) -> dict[str, Any]:
        return {name: plain_value(value) for name, value in vars(self).items()}

    def changed(self, changes: Mapping[str, Any]) -> Self:
        content = self.plain()
        for key, value in changes.items():
            put(content, key, plain_value(value))
        return type(self).of(content)


def declared_settings() -> Iterator[tuple[str, Field[Any]]]:
    """Yield dotted key and declaration of every setting and group, a group before its settings."""
    yield from _walk(RunSettings, "")


def groups(*, shown: bool = False) -> list[str]:
    """Return the names of groups of options; if ``shown``, only those that HTML reports list."""
    return [f.name for f in fields(RunSettings) if "group" in f.metadata and (f.metadata["shown"] or not shown)]


def sections() -> list[str]:
    """Return the names of all sections of a run's settings."""
    return [f.name for f in fields(RunSettings) if is_dataclass(f.type) or f.type is Options]


def keys_of(role: Role) -> tuple[str, ...]:
    """Return the dotted keys of all settings with this ``role``; for a group, the key is ``choices.GROUP``."""
    found: list[str] = []
    for key, declared in declared_settings():
        if "group" in declared.metadata and role is Role.RUNTIME:
            found += [f"{key}.{name}" for name in declared.metadata["runtime"]]
        if declared.metadata["role"] is role and not is_dataclass(declared.type):
            found.append(key)
    of_choice = {f.name: f.metadata["role"] for f in fields(RunSettings) if "group" in f.metadata}
    of_choice |= dict.fromkeys(("experiment", "threat_model"), Role.RUNTIME)  # short for settings with own roles
    return (*found, *(f"choices.{name}" for name, of in of_choice.items() if of is role))


def captured_keys() -> tuple[str, ...]:
    """Return the dotted keys of settings that an attack on captured updates takes from the run that captured them."""
    found: list[str] = []
    for key, declared in declared_settings():
        if declared.metadata["captured"] and key.partition(".")[0] not in found:
            found.append(key)
    return tuple(found)


def captured_groups() -> tuple[str, ...]:
    """Return the option groups that an attack on captured updates copies from the run that captured them."""
    return tuple(f.name for f in fields(RunSettings) if "group" in f.metadata and f.metadata["captured"])


def is_within(key: str, keys: Iterable[str]) -> bool:
    """Return whether the dotted ``key`` is one of ``keys`` or below one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _walk(kind: type, above: str) -> Iterator[tuple[str, Field[Any]]]:
    for declared in fields(kind):
        if "role" in declared.metadata:
            yield f"{above}{declared.name}", declared
        if is_dataclass(declared.type):
            yield from _walk(declared.type, f"{above}{declared.name}.")  # type: ignore[arg-type]


@cache
def register_plugin_metrics() -> None:
    """Register the metrics of all installed plugins once; ``UserError`` if one is no metric or its name is taken."""
    for name, path in options("metric").items():
        from fl_privacy.measure import Metric, register_metric  # noqa: PLC0415
        from fl_privacy.runs.config.building import instantiate  # noqa: PLC0415  (Hydra: reading a run needs none)
        from fl_privacy.site.gate.plain_yaml import loaded  # noqa: PLC0415

        section = loaded(path.read_bytes(), str(path))
        metric = instantiate(section, f"metric.{name}") if isinstance(section, dict) else None
        if not isinstance(metric, Metric):
            raise UserError(f"{path} is expected to make a Metric, but makes a {type(metric).__name__}; correct it.")
        register_metric(name, metric)


UNDEFENDED = "Undefended"


@dataclass(frozen=True)
class GridPoint:
    """A defense at one strength, with the overrides that choose it."""

    family: str  # name of the curve; ``UNDEFENDED`` without a defense
    strength: str = ""  # setting and value such as ``rate 0.9``; empty for a single strength and the undefended point
    overrides: tuple[str, ...] = ()


State = Literal["untrained", "early", "trained"]  # of the attacked model: fresh, after a few rounds or all of them


@dataclass(frozen=True, kw_only=True)
class AttackCell:
    """One attack of a study, run against each defense; only the fields in which a study's attacks differ are filled."""

    attack: str = ""
    uploads: str = ""  # name of the clients' kind of upload
    state: State | Literal[""] = ""  # state of the model sent to them
    server: str = ""  # name of a malicious server's attack; empty for an honest server

    @property
    def title(self) -> str:
        return ", ".join(part for part in (self.attack, self.uploads, self.state, self.server) if part)
