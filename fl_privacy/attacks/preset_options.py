"""Options that all presets share, and a decorator that adds them to a signature."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

from fl_privacy.attacks.feature_inversion import FeatureSource, FrontPolicy, ModelInversion
from fl_privacy.attacks.gradient_inversion import Compile, DType, GradientInversion, LabelPolicy, LocalSteps, Projection
from fl_privacy.attacks.gradient_inversion.generator_prior import Untrained
from fl_privacy.attacks.gradient_inversion.settings import STARTS, Scaling, TokenReading, named_start
from fl_privacy.checks import one_of
from fl_privacy.errors import UserError

ImageSpace = Literal["pixels", "network"]  # space in which images are searched
P = ParamSpec("P")
T = TypeVar("T", bound=GradientInversion | ModelInversion)


class _Options(TypedDict, total=False):
    iterations: int | None
    restarts: int | None
    start: str
    projection: Projection | None
    into_range: Scaling
    dtype: DType
    device: str | None


class GenerativeOptions(TypedDict, total=False):
    """Options shared by the published attacks that search a generator's images; ``None`` keeps the paper's value."""

    iterations: int | None
    restarts: int | None
    dtype: DType
    device: str | None
    labels: LabelPolicy
    enough: float
    accept: float
    evident: bool
    local_steps: LocalSteps
    compile: Compile


class GradientOptions(_Options, total=False):
    """Options shared by the published gradient inversions; ``None`` keeps the paper's value.

    ``start`` is a name of :data:`fl_privacy.attacks.gradient_inversion.settings.STARTS`. ``layers`` maps patterns of
    parameter names to weights in the loss; 0 ignores a parameter. ``space="network"`` optimizes an untrained network
    that makes the images (:class:`fl_privacy.attacks.gradient_inversion.generator_prior.Untrained`).
    """

    labels: LabelPolicy
    reading: TokenReading
    embedding_norm: float
    layers: Mapping[str, float] | None
    space: ImageSpace
    enough: float
    accept: float
    noise: float
    local_steps: LocalSteps
    compile: Compile


class FeatureOptions(_Options, total=False):
    """Options of :class:`ModelInversion` for the published attack; ``None`` keeps the paper's value."""

    features: FeatureSource
    recover_at: str | None
    front: FrontPolicy
    anchor: float


def vary(published: T, options: Mapping[str, Any]) -> T:
    """Return a copy of ``published``, an attack as in its paper, with other ``options``, or raise ``UserError``."""
    chosen = {name: value for name, value in options.items() if value is not None}
    if "start" in chosen:
        chosen["start"] = named_start(chosen["start"])
    if "space" in chosen:
        space = chosen.pop("space")
        one_of("attack.space", space, get_args(ImageSpace))
        if space == "network" and chosen.get("start", published.start) != published.start:
            raise UserError("attack.start is expected without attack.space=network, but got both; leave one out.")
        chosen |= {"source": Untrained(), "projection": "none"} if space == "network" else {}
    if layers := chosen.pop("layers", None):
        objective = chosen.get("objective", published.objective) if isinstance(published, GradientInversion) else None
        if (
            not is_dataclass(objective)
            or isinstance(objective, type)
            or "layers" not in {each.name for each in fields(objective) if each.init}
        ):
            raise UserError(
                "attack.layers is expected with an objective that is a dataclass with a field layers, but"
                f" {type(objective).__name__} is none; leave attack.layers out."
            )
        chosen["objective"] = replace(objective, layers=layers)
    return replace(published, **chosen)


def takes(options: type, *, depending: Collection[str] = ()) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that adds ``options``, a typed dictionary, to the shown signature of a published attack.

    Their defaults are the paper's values, or ``None`` for names in ``depending``, whose value depends on the attack's
    own parameters.
    """

    def named(preset: Callable[P, T]) -> Callable[P, T]:
        signature, published = inspect.signature(preset), preset()  # type: ignore[call-arg]

        def value(option: str) -> object:
            if option in depending:
                return None
            if option == "start":
                return next(name for name, start in STARTS.items() if start == published.start)
            return "pixels" if option == "space" else getattr(published, option, None)

        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value(name), annotation=hint)
            for name, hint in get_type_hints(options).items()
        ]
        preset.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return preset

    return named
