"""Public descriptions of defenses: the parts of a defense, and what each part does to the uploads."""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

from fl_privacy import checks
from fl_privacy.errors import UserError

Scope = Literal["layer", "global"]
"""``layer`` treats each parameter tensor separately, ``global`` all as one vector."""

_POSITIVE = {"check": partial(checks.number, above=0, example=1.0)}
_ABOVE_0 = {"check": partial(checks.number, above=0, example=1)}
_MULTIPLIER = {"check": partial(checks.number, at_least=0, example=1.0)}
"""Field metadata with a check: a function (name, value) that raises ``UserError``."""

KNOWN: dict[str, type["Effect"]] = {}  # class name -> effect class


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Effect of one part of a defense on the uploads; files store the name of its class.

    Subclasses are frozen dataclasses of numbers, text, booleans, tuples of these and other effects. ``None`` in a field
    means "not published", unless the class says otherwise.
    """

    def __init_subclass__(cls) -> None:
        known = KNOWN.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(
                f"{cls.__module__}.{cls.__qualname__} is expected to have a name of its own, but {known.__module__} has"
                f" the effect {cls.__name__} already; rename it."
            )
        KNOWN[cls.__name__] = cls

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if "check" in each.metadata and not (value is None and checks.fits(None, each.type)):
                each.metadata["check"](f"{type(self).__name__}.{each.name}", value)


class Undeclared(Effect):
    """Unknown effect of a defense: privacy accountants refuse it, and attacks take no countermeasure."""


UNDECLARED = Undeclared()


class PostProcessing(Effect):
    """Function of the update alone, which costs no privacy budget if noise was added before."""


class Heuristic(Effect):
    """Protection without calibrated noise, and so without a guarantee."""


class PerExample(Effect):
    """Change of each example on its own, such as an augmentation; privacy accounting stays valid."""


@dataclass(frozen=True, kw_only=True)
class Clipped(PostProcessing):
    """Scaling of the update, or of each of its tensors (``scope``), to an l2 norm of at most ``norm``."""

    norm: float | None = field(metadata=_POSITIVE)
    scope: Scope = "global"


@dataclass(frozen=True, kw_only=True)
class Noise(Effect):
    """Independent zero-mean noise on every element."""

    std: float | None = field(metadata={"check": partial(checks.number, at_least=0, example=0.01)})
    """Standard deviation of an element, in units of the update, at least 0."""

    clip: Clipped | None  # clipping of the update before the noise, if any
    at: Literal["upload", "gradient"] = "upload"  # noised values: whole upload, or gradient of every local step


class Gaussian(Noise):
    """Normal noise on every element."""


class Laplace(Noise):
    """Laplace noise on every element."""


def layer_of(name: str) -> str:
    """Return the module name of the parameter ``name``, or ``name`` itself if it has no module."""
    return name.rpartition(".")[0] or name


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Map each parameter of ``names`` to the number of its layer, from 1, in order of first appearance."""
    names, numbers = list(names), dict[str, int]()
    for name in names:
        numbers.setdefault(layer_of(name), len(numbers) + 1)
    return {name: numbers[layer_of(name)] for name in names}


@dataclass(frozen=True, kw_only=True)
class ClippedExamples(Effect):
    """Clipping of each example's gradient to the l2 ``norm`` and Gaussian noise on their sum (DP-SGD)."""

    norm: float | None = field(metadata=_POSITIVE)
    noise_multiplier: float | None = field(metadata=_MULTIPLIER)  # standard deviation of the noise, divided by ``norm``


@dataclass(frozen=True, kw_only=True)
class PrivateRelease(Effect):
    """Training on data derived from one (``epsilon``, ``delta``)-private release of the client's examples."""

    epsilon: float = field(metadata=_POSITIVE)
    delta: float = field(metadata={"check": partial(checks.number, above=0, below=1, example=1e-5)})
    noise_multiplier: float = field(metadata=_MULTIPLIER)


@dataclass(frozen=True, kw_only=True)
class Sparse(PostProcessing):
    """Upload in which only some elements of the update are kept; the others are zero."""

    largest: bool | None = False  # ``True`` if the elements of largest magnitude are kept
    scope: Scope = "global"  # ``layer`` to choose elements within each tensor, ``global`` within the whole update
    error_feedback: bool = False
    noise_std: float = 0.0  # standard deviation of the noise on the kept elements
    dropped: float | None = field(
        default=None, metadata={"check": partial(checks.number, at_least=0, at_most=1, example=0.9)}
    )
    """Share of zero elements, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class SparseVector(Sparse):
    """Upload of some elements, clamped to [-``bound``, ``bound``] and noised; epsilon grows with their number."""

    bound: float | None = field(default=None, metadata=_POSITIVE)


@dataclass(frozen=True, kw_only=True)
class Truncated(PostProcessing):
    """Clamping of each element of the update to the range from -``bound`` to ``bound``."""

    bound: float | None = field(metadata=_POSITIVE)


class Withheld(PostProcessing):
    """Removal of some parameters from the upload."""


@dataclass(frozen=True, kw_only=True)
class Quantized(PostProcessing):
    """Rounding of each tensor to at most 2^bits evenly spaced values in [-m, m], m its largest magnitude."""

    bits: int | None = field(metadata={"check": partial(checks.whole, at_least=1, at_most=28, example=8)})
    rounding: Literal["nearest", "stochastic"] = "stochastic"


@dataclass(frozen=True, kw_only=True)
class Transformed(PerExample):
    """Transformation of each training image by one of the ``policies``, chosen at random (ATS).

    A policy such as ``3-43-15`` applies operations 3, 43 and 15 in this order; ``table``: their numbering, that of the
    paper or of the authors' code. With ``by_probability``, an operation may be skipped at random.
    """

    policies: tuple[str, ...] | None
    table: Literal["paper", "code"] = "paper"
    by_probability: bool = False


@dataclass(frozen=True, kw_only=True)
class Summed(PostProcessing):
    """Secure aggregation: only the mean of the updates of ``clients`` clients is seen."""

    clients: int = field(metadata={"check": partial(checks.whole, at_least=1, example=8)})
    rounding: float = field(default=0.0, metadata={"check": partial(checks.number, at_least=0, example=1e-6)})
    """Standard deviation of the protocol's rounding error."""


class OtherImages(Heuristic):
    """Training on substitutes of the client's images, such as mixtures or condensed images."""


@dataclass(frozen=True, kw_only=True)
class Mixed(OtherImages):
    """Training on weighted sums of ``images`` images, with the sign of random pixels flipped (InstaHide).

    Labels are summed with the same weights. ``labeled``: number of images of a sum that have a label.
    """

    images: int | None = field(metadata={"check": partial(checks.whole, at_least=1, example=4)})
    labeled: int | None = field(metadata={"check": partial(checks.whole, at_least=1, example=4)})


class RobustGradient(Heuristic):
    """Upload of a gradient that is close to the true one, but computed from images that look like noise."""


@dataclass(frozen=True, kw_only=True)
class MutedFeatures(Heuristic):
    """Zeroing of the share ``dropped`` of the columns of the last linear layer's weight gradient."""

    dropped: float | None = field(
        default=None, metadata={"check": partial(checks.number, at_least=0, at_most=1, example=0.8)}
    )


@dataclass(frozen=True, kw_only=True)
class SlicedNoise(Heuristic):
    """Gaussian noise of standard deviation ``std`` on random parts of the gradient; the rest is unchanged."""

    std: float | None


@dataclass(frozen=True, kw_only=True)
class NoisedLayers(Heuristic):
    """Noise on some ``layers`` only, given by name or by number from 1; the others are uploaded in the clear."""

    added: Noise | None
    layers: tuple[int | str, ...] | None

    def noised(self, names: Iterable[str]) -> frozenset[str]:
        numbered = layer_numbers(names)
        wanted = None if self.layers is None else {*self.layers}
        return frozenset(
            name for name, number in numbered.items() if wanted is None or number in wanted or layer_of(name) in wanted
        )


@dataclass(frozen=True, kw_only=True)
class AdversarialPerturbation(Heuristic):
    """Perturbation, at most ``budget`` times as long as the gradient, that misleads classifiers of an attribute."""

    budget: float | None


@dataclass(frozen=True, kw_only=True)
class PrivateLoss(Heuristic):
    """Loss with a second, private head on the features, trained to output secret codes (SPN)."""

    alpha1: float | None = field(metadata=_ABOVE_0)  # weight of the public loss
    alpha2: float | None = field(metadata={"check": partial(checks.number, at_least=0, example=0.1)})
    """Weight of the private loss."""

    bits: int | None = field(metadata=_ABOVE_0)  # length of a code
    layer: str | None = None  # linear layer whose inputs are the features; ``None`` takes the last one
    bound: float | None = field(default=None, metadata=_ABOVE_0)
    """Bound of the private head's initial weights, U(-bound, bound); ``None`` takes that layer's spread."""

    widths: tuple[int, ...] = ()  # widths of the private layers between the features and the last one

    def __post_init__(self) -> None:
        for width in self.widths:
            checks.whole("PrivateLoss.widths", width, at_least=1, example=64)
        super().__post_init__()


class PrivateLayers(Heuristic):
    """Some layers stay with each client and are neither sent nor uploaded."""


@dataclass(frozen=True)
class Part:
    """Public description of one component of a defense: name, settings, and effect on the uploads."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    effect: Effect = UNDECLARED
    strength: str | None = None
    """Setting that pages show as the defense's strength, if any; in a differentially private mechanism, the noise is
    proportional to it."""


Description = tuple[Part, ...]
"""Parts of a defense, in order; empty without a defense."""


def mixing(parts: Description | None) -> Mixed | None:
    """Return the :class:`Mixed` effect among the defense's ``parts``, if it changes images only by mixing them."""
    changing = [part.effect for part in parts or () if isinstance(part.effect, OtherImages | Transformed)]
    return changing[0] if len(changing) == 1 and isinstance(changing[0], Mixed) else None


def settings_in_words(parts: Iterable[Part]) -> str:
    """Return ``NAME.SETTING=value`` of all parts, comma-separated; a repeated name becomes ``NAME#2``."""
    words, seen = [], list[str]()
    for part in parts:
        seen.append(part.name)
        number = seen.count(part.name)
        name = f"{part.name}#{number}" if number > 1 else part.name
        words += [f"{name}.{key}={value}" for key, value in part.settings.items()]
    return ", ".join(words)


def to_plain(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Convert the parts of a defense to JSON values, one dictionary for each."""
    return [
        {"name": p.name, "settings": dict(p.settings), "strength": p.strength, "effect": _effect_to_plain(p.effect)}
        for p in parts
    ]


def from_plain(plain: object) -> Description:
    """Read a defense's description from the JSON values of ``to_plain``; ``UserError`` if they are malformed."""
    try:
        return checks.each(_part, plain, "a description")
    except ValueError as error:
        raise UserError(
            f"The description of a defense is expected to be of to_plain, but {error}; use that."
        ) from error


def _part(plain: object, where: str) -> Part:
    names = [each.name for each in fields(Part)]
    if not isinstance(plain, dict) or plain.keys() != set(names):
        raise UserError(
            f"A part of a defense is expected to have {', '.join(names)}, but got {plain!r:.200}; use to_plain."
        )
    return checks.made(Part, plain, where, effect=_effect)


def _effect(plain: object, where: str, base: type[Effect] = Effect) -> Effect:
    given = dict(plain) if isinstance(plain, Mapping) else {}
    known = {name: effect for name, effect in KNOWN.items() if issubclass(effect, base)}
    if (name := str(given.pop("effect", None))) not in known:
        raise UserError(
            f"The effect of a defense is expected to be one of {', '.join(sorted(known))}, but got {name!r}; import the"
            " module that declares it."
        )
    hints = typing.get_type_hints(known[name])
    nested = {
        field: partial(_effect, base=kind)
        for field, hint in hints.items()
        for kind in (hint, *typing.get_args(hint))
        if isinstance(kind, type) and issubclass(kind, Effect) and isinstance(given.get(field), Mapping)
    }
    return checks.made(known[name], given, f"{where}.{name}", **nested)


def _effect_to_plain(effect: Effect) -> dict[str, Any]:
    values = {each.name: getattr(effect, each.name) for each in fields(effect)}
    plain = {name: _effect_to_plain(value) if isinstance(value, Effect) else value for name, value in values.items()}
    return {"effect": type(effect).__name__, **plain}
