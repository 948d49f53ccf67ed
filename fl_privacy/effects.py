"""What a defense does to an update, as values: all that accountants, attackers and pages read of a defense.

The public description of a defense: its parts, and how they are written to a file.
"""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, Literal

from fl_privacy import checks
from fl_privacy.errors import UserError

Scope = Literal["layer", "global"]
"""``layer``: each parameter tensor by itself (as in Opacus' per-layer clipping); ``global``: all as one vector."""

KNOWN: dict[str, type["Effect"]] = {}
"""Effects by the names of their classes."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one part of a defense does. Known by its class's name, also where it is written to a file.

    Subclasses are frozen dataclasses of numbers, text, truth values, tuples of them and other effects. A field that is
    ``None`` is not told to whoever reads the description, unless the class says what else that means. A defense from
    outside the package declares one of these, or one of its own, which inherits from what it is a case of.
    """

    def __init_subclass__(cls) -> None:
        known = KNOWN.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(
                f"{cls.__module__}.{cls.__qualname__} is expected to have a name of its own, but {known.__module__} has"
                f" the effect {cls.__name__} already; rename it."
            )
        KNOWN[cls.__name__] = cls


class Undeclared(Effect):
    """Nothing is known of it: no accountant covers it, and no countermeasure is taken."""


UNDECLARED = Undeclared()


class PostProcessing(Effect):
    """Looks at nothing but the update that it is handed, hence costs no privacy after noise."""


class Heuristic(Effect):
    """Hides by other means than calibrated noise, hence gives no guarantee."""


class PerExample(Effect):
    """Changes each example without a look at the others, hence leaves what the accountants argue by as it is."""


@dataclass(frozen=True, kw_only=True)
class Clipped(PostProcessing):
    """The update is scaled down to an l2 norm; ``norm`` in units of the update, above 0."""

    norm: float | None
    scope: Scope = "global"

    def __post_init__(self) -> None:
        if self.norm is not None:
            checks.number("Clipped.norm", self.norm, above=0, example=1.0)


@dataclass(frozen=True, kw_only=True)
class Noise(Effect):
    """Independent zero-mean noise on every element.

    Attributes:
        std: standard deviation of an element, in units of the update, at least 0.
        clip: what was done to the update before; ``None``: it was not clipped.
        at: on the whole ``upload``, or the ``gradient`` of every local step.
    """

    std: float | None
    clip: Clipped | None
    at: Literal["upload", "gradient"] = "upload"

    def __post_init__(self) -> None:
        if self.std is not None:
            checks.number(f"{type(self).__name__}.std", self.std, at_least=0, example=0.01)


class Gaussian(Noise):
    """Normal noise on every element."""


class Laplace(Noise):
    """Laplace noise on every element."""


def layer_of(name: str) -> str:
    """Name the layer that owns the parameter ``name``: its module, or itself where nothing else names one."""
    return name.rpartition(".")[0] or name


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return the number of the layer of each of the parameters ``names``, from 1, in their order."""
    names, numbers = list(names), dict[str, int]()
    for name in names:
        numbers.setdefault(layer_of(name), len(numbers) + 1)
    return {name: numbers[layer_of(name)] for name in names}


@dataclass(frozen=True, kw_only=True)
class ClippedExamples(Effect):
    """The gradient of each example clipped, Gaussian noise on their sum (DP-SGD).

    Attributes:
        norm: bound on one example's gradient, above 0.
        noise_multiplier: standard deviation of the noise on the sum, in units of ``norm``; at least 0.
    """

    norm: float | None
    noise_multiplier: float | None

    def __post_init__(self) -> None:
        if self.norm is not None:
            checks.number("ClippedExamples.norm", self.norm, above=0, example=1.0)
        if self.noise_multiplier is not None:
            checks.number("ClippedExamples.noise_multiplier", self.noise_multiplier, at_least=0, example=1.0)


@dataclass(frozen=True, kw_only=True)
class PrivateRelease(Effect):
    """All that the client trains on is made of one noised release of its examples.

    Attributes:
        epsilon: budget of one example, above 0.
        delta: in (0, 1).
        noise_multiplier: of the release.
    """

    epsilon: float
    delta: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.number("PrivateRelease.epsilon", self.epsilon, above=0, example=1.0)
        checks.number("PrivateRelease.delta", self.delta, above=0, below=1, example=1e-5)
        checks.number("PrivateRelease.noise_multiplier", self.noise_multiplier, at_least=0, example=1.0)


@dataclass(frozen=True, kw_only=True)
class Sparse(PostProcessing):
    """Only some elements are uploaded; the others are zero.

    Attributes:
        largest: whether those of the largest magnitude in what is uploaded stay.
        scope: over what these are counted.
        error_feedback: whether what was dropped is added to the next update.
        noise_std: of the noise on the elements that stay.
        dropped: share of the elements that are zero, in [0, 1].
    """

    largest: bool | None = False
    scope: Scope = "global"
    error_feedback: bool = False
    noise_std: float = 0.0
    dropped: float | None = None

    def __post_init__(self) -> None:
        if self.dropped is not None:
            checks.number("Sparse.dropped", self.dropped, at_least=0, at_most=1, example=0.9)


@dataclass(frozen=True, kw_only=True)
class Quantized(PostProcessing):
    """Each tensor is rounded to an even grid of at most 2^bits values up to its largest magnitude."""

    bits: int | None
    rounding: Literal["nearest", "stochastic"] = "stochastic"

    def __post_init__(self) -> None:
        if self.bits is not None:
            checks.whole("Quantized.bits", self.bits, at_least=1, at_most=28, example=8)


@dataclass(frozen=True, kw_only=True)
class Transformed(PerExample):
    """Each image is transformed by a policy drawn at random.

    Attributes:
        policies: names, such as ``3-43-15``.
        table: of the operations that they number.
        by_probability: whether operations are left out at random.
    """

    policies: tuple[str, ...] | None
    table: Literal["paper", "code"] = "paper"
    by_probability: bool = False


@dataclass(frozen=True, kw_only=True)
class Summed(PostProcessing):
    """Only the mean of the updates of several clients is seen, each defended by itself.

    Attributes:
        clients: how many.
        rounding: standard deviation of what the protocol's whole numbers did to the mean, at least 0.
    """

    clients: int
    rounding: float = 0.0

    def __post_init__(self) -> None:
        checks.whole("Summed.clients", self.clients, at_least=1, example=8)
        checks.number("Summed.rounding", self.rounding, at_least=0, example=1e-6)


class OtherImages(Heuristic):
    """The client trains on images that stand for its own: mixtures, or condensed ones."""


@dataclass(frozen=True, kw_only=True)
class Mixed(OtherImages):
    """Each image is a weighted sum of itself and others, with random pixels turned to their negative, anew each time.

    Attributes:
        images: in a sum, at least 1.
        labeled: how many of them the label is a weighted sum of as well; the others are public.
    """

    images: int | None
    labeled: int | None

    def __post_init__(self) -> None:
        for name in ("images", "labeled"):
            if getattr(self, name) is not None:
                checks.whole(f"Mixed.{name}", getattr(self, name), at_least=1, example=4)


class RobustGradient(Heuristic):
    """The update is the gradient of images that look like noise but pull the model alike."""


@dataclass(frozen=True, kw_only=True)
class MutedFeatures(Heuristic):
    """Columns of the last linear layer's weight gradient are zero, those of the most telling features.

    Attributes:
        dropped: share of the columns, in [0, 1].
    """

    dropped: float | None = None

    def __post_init__(self) -> None:
        if self.dropped is not None:
            checks.number("MutedFeatures.dropped", self.dropped, at_least=0, at_most=1, example=0.8)


@dataclass(frozen=True, kw_only=True)
class SlicedNoise(Heuristic):
    """Gaussian noise of standard deviation ``std`` on random slices of the gradient."""

    std: float | None


@dataclass(frozen=True, kw_only=True)
class NoisedLayers(Heuristic):
    """Noise on some layers alone; the others are uploaded as they are, so that nothing is guaranteed.

    Attributes:
        added: noise on each element of these layers, and what was clipped before.
        layers: their names; numbers count the layers of the update from 1.
    """

    added: Noise | None
    layers: tuple[int | str, ...] | None

    def noised(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of the tensors ``names`` of an update that are noised; all where the layers are untold."""
        numbered = layer_numbers(names)
        wanted = None if self.layers is None else {*self.layers}
        return frozenset(
            name for name, number in numbered.items() if wanted is None or number in wanted or layer_of(name) in wanted
        )


@dataclass(frozen=True, kw_only=True)
class AdversarialPerturbation(Heuristic):
    """Something is added to the gradient that misleads classifiers of an attribute.

    Attributes:
        budget: its norm at most, in units of that of the gradient.
    """

    budget: float | None


@dataclass(frozen=True, kw_only=True)
class PrivateLoss(Heuristic):
    """A private head on the features is trained to secret codes beside the public one.

    Attributes:
        alpha1: factor of the cross entropy.
        alpha2: factor of the private loss.
        bits: length of the codes.
        layer: linear layer whose input are the features; ``None``: the last one.
        bound: first weights of the private head are from U(-bound, bound); ``None``: spread like that layer's.
        widths: of the private layers between the features and the last one.
    """

    alpha1: float | None
    alpha2: float | None
    bits: int | None
    layer: str | None = None
    bound: float | None = None
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for width in self.widths:
            checks.whole("PrivateLoss.widths", width, at_least=1, example=64)
        for name in ("alpha1", "bits", "bound"):
            if (value := getattr(self, name)) is not None:
                checks.number(f"PrivateLoss.{name}", value, above=0, example=1)
        if self.alpha2 is not None:
            checks.number("PrivateLoss.alpha2", self.alpha2, at_least=0, example=0.1)


class PrivateLayers(Heuristic):
    """Some layers stay with each client and are neither sent nor uploaded."""


@dataclass(frozen=True)
class Part:
    """One of the defenses that a defense is composed of, as the public may know it.

    Attributes:
        name: as in the configuration.
        settings: by name, for people to read: numbers, text, lists of them.
        effect: what it does, for everything else.
        strength: the setting that its strength follows, in pages that compare runs; the noise of a mechanism of
            differential privacy is proportional to it. ``None`` where there is none.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    effect: Effect = UNDECLARED
    strength: str | None = None


Description = tuple[Part, ...]
"""The public description of a defense: its parts in order. Empty of a client that does not defend itself."""


def mixing(parts: Description | None) -> Mixed | None:
    """Return what mixes images, if nothing else of a defense makes other images of them each time."""
    changing = [part.effect for part in parts or () if isinstance(part.effect, OtherImages | Transformed)]
    return changing[0] if len(changing) == 1 and isinstance(changing[0], Mixed) else None


def settings_in_words(parts: Iterable[Part]) -> str:
    """Return ``NAME.SETTING=value`` of all parts with commas between; the second part of a name is ``NAME#2``."""
    words, seen = [], list[str]()
    for part in parts:
        seen.append(part.name)
        number = seen.count(part.name)
        name = f"{part.name}#{number}" if number > 1 else part.name
        words += [f"{name}.{key}={value}" for key, value in part.settings.items()]
    return ", ".join(words)


def to_plain(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Turn ``parts`` into lists, mappings, numbers and text."""
    return [
        {
            "name": part.name,
            "settings": dict(part.settings),
            "strength": part.strength,
            "effect": _effect_to_plain(part.effect),
        }
        for part in parts
    ]


def from_plain(plain: object) -> Description:
    """Return what ``to_plain`` was given.

    Raises:
        UserError: it is something else, or an effect that no imported module declares.
    """
    if not isinstance(plain, list):
        raise UserError(f"The description of a defense is expected to be a list of its parts, but got {plain!r}.")
    return tuple(_part_from_plain(part) for part in plain)


def _part_from_plain(plain: object) -> Part:
    types = {"name": str, "settings": Mapping[str, Any], "strength": str | None, "effect": Mapping[str, Any]}
    if not isinstance(plain, dict) or plain.keys() != types.keys():
        raise UserError(f"A part of a defense is expected to be told by {', '.join(types)}, but got {plain!r}.")
    for key, annotation in types.items():
        if not checks.fits(plain[key], annotation):
            raise UserError(
                f"The {key} of a part of a defense is expected to be {checks.in_words(annotation)}, but got"
                f" {plain[key]!r}."
            )
    return Part(**(plain | {"effect": _effect_from_plain(plain["effect"])}))


def _effect_to_plain(effect: Effect) -> dict[str, Any]:
    def told(value: Any) -> Any:
        return _effect_to_plain(value) if isinstance(value, Effect) else value

    return {"effect": type(effect).__name__, **{f.name: told(getattr(effect, f.name)) for f in fields(effect)}}


def _effect_from_plain(plain: Mapping[str, Any], base: type[Effect] = Effect) -> Effect:
    known = KNOWN.get(name) if isinstance(name := plain.get("effect"), str) else None
    if known is None or not issubclass(known, base):
        allowed = ", ".join(sorted(key for key, effect in KNOWN.items() if issubclass(effect, base)))
        raise UserError(
            f"The effect of a defense is expected to be one of {allowed}, but got {name!r}; import the module that"
            " declares it."
        )
    types = typing.get_type_hints(known)
    names = [f.name for f in fields(known)]
    needed = {f.name for f in fields(known) if f.default is MISSING and f.default_factory is MISSING}
    given = {key: value for key, value in plain.items() if key != "effect"}
    if not needed <= given.keys() <= set(names):
        raise UserError(f"{name} is expected to be told by {', '.join(names) or 'nothing'}, but got {sorted(given)}.")
    return known(**{key: _value_from_plain(f"{name}.{key}", value, types[key]) for key, value in given.items()})


def _value_from_plain(name: str, value: Any, annotation: Any) -> Any:
    kinds = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    effects = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Effect)]
    if effects and isinstance(value, Mapping):
        return _effect_from_plain(value, effects[0])
    if not any(checks.fits(value, kind) for kind in kinds if kind not in effects):
        raise UserError(f"{name} is expected to be {checks.in_words(annotation)}, but got {value!r}.")
    return tuple(value) if isinstance(value, list) else value
