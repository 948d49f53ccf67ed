"""Countermeasures of an attacker who knows the defense, for each of its effects."""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce, singledispatch

import torch

from fl_privacy import effects
from fl_privacy.attacks.adaptive import constraints
from fl_privacy.effects import Clipped, Description, Effect, Noise, NoisedLayers, SlicedNoise, Summed
from fl_privacy.types import LocalPlan, Observation, Tensors


@dataclass(frozen=True, kw_only=True)
class AttackSetting:
    """Facts about an attack, from which its countermeasures against a known defense are chosen."""

    head: str | None  # name of the output layer's weight
    batch_size: int
    plan: LocalPlan
    unrolls: bool
    matched_per_uploaded: float  # factor from what was uploaded to what is matched
    scales: bool  # ``True`` if the objective depends on the scale of the whole gradient
    complete: bool  # ``True`` if every parameter is matched
    smooths: bool  # ``True`` if priors hold total variation, or guesses are no pixels
    pixels: bool  # ``True`` if the guess consists of pixels
    learnable: Sequence[str]  # weights of the linear layers into whose input unknown gradients can be guessed


@dataclass(frozen=True, kw_only=True)
class Countermeasure:
    """One change of an attack to counter a known defense; ``sentence`` describes the change to users.

    ``hidden``: gradient of a loss that only the client knows, to be guessed, too. ``transforms``: image transforms that
    the client may have used; all are tried.
    """

    sentence: str
    rule: constraints.Rule | None = None
    clipping: constraints.Clipping | None = None
    smoothness: float = 0.0  # weight of total variation in units of ``Problem.blank_loss``
    noisy: bool = False  # ``True`` if that weight follows from the noise in the update instead, if it can be estimated
    hidden: constraints.HiddenGradient | None = None
    loss_factor: float = 1.0  # factor of the cross entropy in the clients' loss
    transforms: tuple[constraints.Transform, ...] = ()


FINE, HIDDEN, BLURRED = 1e-2, 1e-1, 2.5e-1
"""Weights of smoothness: if little of the update is hidden; if much is hidden and the rest exact; if all is noised."""

_MANY_BITS = 6  # bits of a quantized value above which its levels hide little
_REACH = 3.0  # standard deviations of the noise within which nearly all of it is

UNSCALED, UNSTATED = 1.0, 1.0
"""Assumptions on SPN with unknown settings: cross entropy with factor 1, features' gradients as large as weights."""


def looks_noisy(effect: effects.Effect) -> bool:
    """Return whether ``effect`` changes every element like noise; coarse stochastic rounding does, too."""
    if isinstance(effect, effects.Quantized):
        return effect.rounding == "stochastic" and 0 < (effect.bits or 0) < _MANY_BITS
    return isinstance(effect, effects.Noise | effects.ClippedExamples | effects.SlicedNoise)


@singledispatch
def countermeasures_against(effect: effects.Effect, setting: AttackSetting) -> Sequence[Countermeasure] | None:
    """Return an attack's changes against ``effect``, whose unknown fields are ``None``; ``None`` if none is known."""
    return None


@countermeasures_against.register
def _against_sparsity(effect: effects.Sparse, setting: AttackSetting) -> Sequence[Countermeasure]:
    return [
        Countermeasure(
            sentence="It matches the update where that is not zero; elsewhere it only keeps the guess below what would"
            " have been shared.",
            rule=partial(constraints.where_shared, effect),
        ),
        *_prefer_smooth(setting, BLURRED if effect.noise_std else HIDDEN),
    ]


@countermeasures_against.register
def _against_truncation(effect: effects.Truncated, setting: AttackSetting) -> Sequence[Countermeasure]:
    sentence = "It accepts every value beyond the bound for elements that were cut to it."
    return [
        Countermeasure(sentence=sentence, rule=partial(constraints.beyond_cut, effect)),
        *_prefer_smooth(setting, FINE),
    ]


@countermeasures_against.register
def _against_withholding(effect: effects.Withheld, setting: AttackSetting) -> Sequence[Countermeasure]:
    return _prefer_smooth(setting, FINE)


# accepting all gradients within the bins works better than a straight-through quantizer
@countermeasures_against.register
def _against_quantization(effect: effects.Quantized, setting: AttackSetting) -> Sequence[Countermeasure]:
    if looks_noisy(effect):
        return _smooth_away(setting)
    sentence = "It accepts every gradient that rounds to the levels observed."
    return [
        Countermeasure(sentence=sentence, rule=partial(constraints.within_bins, effect)),
        *_prefer_smooth(setting, FINE if (effect.bits or 0) >= _MANY_BITS else HIDDEN),
    ]


@countermeasures_against.register
def _against_soteria(effect: effects.MutedFeatures, setting: AttackSetting) -> Sequence[Countermeasure]:
    if setting.head is None:
        return []
    rule = partial(constraints.shared_columns, setting.head, effect.dropped)
    return [
        Countermeasure(sentence="It mutes those columns of the last layer's gradient that are zero.", rule=rule),
        *_prefer_smooth(setting, HIDDEN),
    ]


@countermeasures_against.register
def _against_mixing(effect: effects.SlicedNoise, setting: AttackSetting) -> Sequence[Countermeasure]:
    return _smooth_away(setting)


@countermeasures_against.register(effects.RobustGradient)
@countermeasures_against.register(effects.AdversarialPerturbation)
@countermeasures_against.register(effects.PrivateLayers)
def _against_lookalikes(effect: effects.Effect, setting: AttackSetting) -> Sequence[Countermeasure]:
    return _prefer_smooth(setting, BLURRED)


@countermeasures_against.register
def _against_ats(effect: effects.Transformed, setting: AttackSetting) -> Sequence[Countermeasure]:
    transforms = constraints.outcomes(effect.policies or (), table=effect.table, by_probability=effect.by_probability)
    if not transforms:
        return []
    return [
        Countermeasure(
            sentence=f"It looks for the original image through each of the {len(transforms)} transformations that a"
            " client may draw, and keeps the one that fits the update best.",
            transforms=transforms,
        ),
        *_prefer_smooth(setting, HIDDEN),
    ]


@countermeasures_against.register
def _against_noise(effect: effects.Noise, setting: AttackSetting) -> Sequence[Countermeasure]:
    unit, clips = setting.matched_per_uploaded, setting.unrolls or not setting.plan.weight_decay
    if effect.at == "gradient":
        unit, clips = 1.0, not setting.unrolls
    std = effect.std and effect.std * unit
    clipping = _clip(effect.clip, unit, std, setting) if effect.clip and clips else []
    return [*clipping, *_smooth_away(setting)]


@countermeasures_against.register
def _against_bare_layers(effect: effects.NoisedLayers, setting: AttackSetting) -> Sequence[Countermeasure]:
    noise = effect.added or effects.Noise(std=None, clip=None)
    one = noise.at == "upload" or (setting.plan.shares == "gradient" and not setting.unrolls)
    reach = math.inf if noise.std is None or not one else _REACH * noise.std
    clip = noise.clip if noise.clip and noise.clip.norm else None
    return [
        *_against_noise(effects.Noise(std=0.0, clip=clip, at=noise.at), replace(setting, pixels=False)),
        Countermeasure(
            sentence="It matches the layers without noise exactly, and the others within what the noise hides.",
            rule=partial(constraints.bare_layers, effect, reach),
        ),
        *_prefer_smooth(setting, HIDDEN),
    ]


@countermeasures_against.register
def _against_clipping(effect: effects.Clipped, setting: AttackSetting) -> Sequence[Countermeasure]:
    clips = setting.unrolls or not setting.plan.weight_decay
    return _clip(effect, setting.matched_per_uploaded, 0.0, setting) if clips else []


@countermeasures_against.register
def _against_sum(effect: effects.Summed, setting: AttackSetting) -> Sequence[Countermeasure]:
    return [Countermeasure(sentence=f"It takes the sum over {effect.clients} clients for the update of one batch.")]


@countermeasures_against.register
def _against_dp_sgd(effect: effects.ClippedExamples, setting: AttackSetting) -> Sequence[Countermeasure]:
    norm, multiplier = effect.norm, effect.noise_multiplier
    std = norm * multiplier if norm is not None and multiplier is not None else None
    alone = setting.batch_size == 1 and not setting.unrolls
    clipping = _clip(effects.Clipped(norm=norm), 1.0, std, setting) if alone else []
    return [*clipping, *_smooth_away(setting)]


@countermeasures_against.register
def _against_spn(effect: effects.PrivateLoss, setting: AttackSetting) -> Sequence[Countermeasure]:
    factor = UNSCALED if effect.alpha1 is None else effect.alpha1
    stated = effect.alpha2 is not None and effect.bits is not None
    strength = (effect.alpha2 or 0.0) * math.sqrt(effect.bits or 0) / factor if stated else UNSTATED
    # size of a feature's gradient over the private head's weights; each further layer of width w has a factor
    strength *= math.sqrt(math.prod(width / 2 for width in effect.widths))
    if strength == 0:
        sentence = "It weights the cross entropy as the clients do."
        return [] if factor == 1 else [Countermeasure(sentence=sentence, loss_factor=factor)]
    weight = f"{effect.layer}.weight" if effect.layer else setting.head
    if weight is not None and weight in setting.learnable:
        sentence = "It learns what the private head sends back into the features, jointly with the image."
        rms, layers = effect.bound and effect.bound / math.sqrt(3), 1 + len(effect.widths)
        hidden = constraints.HiddenGradient(weight=weight, strength=strength, weight_rms=rms, layers=layers)
        return [Countermeasure(sentence=sentence, hidden=hidden, loss_factor=factor)]
    if setting.head is None:
        return []
    return [
        Countermeasure(
            sentence="It matches only the output layer, where the private loss has no part.",
            rule=partial(constraints.only_layer, setting.head.rpartition(".")[0]),
            loss_factor=factor,
        ),
        *_prefer_smooth(setting, HIDDEN),
    ]


def _clip(clip: effects.Clipped, unit: float, std: float | None, setting: AttackSetting) -> list[Countermeasure]:
    scope = clip.scope if clip.norm else "global"
    if scope == "global" and not (setting.scales and setting.complete):
        return []
    estimated = "" if clip.norm else ", to the norm that it sees"
    sentence = f"It clips the guessed gradient as the clients clip theirs{estimated}."
    clipping = constraints.Clipping(norm=clip.norm and clip.norm * unit, noise_std=std, scope=scope)
    return [Countermeasure(sentence=sentence, clipping=clipping)]


def _prefer_smooth(setting: AttackSetting, share: float) -> list[Countermeasure]:
    sentence = "Among the images that fit, it prefers smooth ones (total variation)."
    return [] if setting.smooths else [Countermeasure(sentence=sentence, smoothness=share)]


def _smooth_away(setting: AttackSetting) -> list[Countermeasure]:
    if not setting.pixels:
        return []
    sentence = "Among the images that fit, it prefers smoother ones if there is more noise (total variation)."
    return [Countermeasure(sentence=sentence, smoothness=0.0 if setting.smooths else BLURRED, noisy=True)]


logger: logging.Logger = logging.getLogger(__name__)
MOST_SEQUENCES = 1024  # largest number of sequences of transforms that are tried one by one
Matched = Callable[[Observation], Tensors]  # function from an observation to the tensors that an attack matches


@dataclass(frozen=True)
class KnownDefense:
    """Countermeasures against one known defense, and the standard deviations of its noise."""

    countermeasures: tuple[Countermeasure, ...] = ()  # sequence in the order of the defense's parts
    noise_stds: tuple[float | None, ...] = ()  # of all noise, in units of the update; ``None`` if unknown

    @classmethod
    def of(cls, observation: Observation, setting: AttackSetting) -> "KnownDefense":
        parts = _as_in_mean(observation.knowledge.defense or ())
        found = _taken(parts, setting)
        if any(countermeasure.rule for countermeasure in found):  # bounds are in the units of the clipped update
            found = _taken(parts, replace(setting, scales=True))
        for name in without_countermeasure(parts):
            logger.info("No countermeasure is known against %s, which is attacked as if unknown.", name)
        stds = [_noise_std(part.effect, setting) for part in parts if looks_noisy(part.effect)]
        return cls(tuple(found), tuple(stds))

    @property
    def sentences(self) -> tuple[str, ...]:
        said = [countermeasure.sentence for countermeasure in self.countermeasures]
        if self.hidden and (others := {h.weight for h in self._hidden} - {self.hidden.weight}):
            said.append(f"It leaves out what private heads send back elsewhere, before {', '.join(sorted(others))}.")
        tried, ways = len(self.transforms), math.prod(self._numbers_of_transforms)
        if tried < ways:
            said.append(
                f"It leaves out that several defenses change the image: they may do so in {ways} ways together, of"
                f" which it tries the {tried} of the one with the most."
            )
        return tuple(dict.fromkeys(said))

    @property
    def hidden(self) -> constraints.HiddenGradient | None:
        """Return the private loss's gradient to guess, if any; for several losses, the largest stands for their sum."""
        return max(self._hidden, key=lambda hidden: hidden.strength, default=None)

    @property
    def _hidden(self) -> list[constraints.HiddenGradient]:
        return [countermeasure.hidden for countermeasure in self.countermeasures if countermeasure.hidden]

    @property
    def loss_factor(self) -> float:
        return math.prod(countermeasure.loss_factor for countermeasure in self.countermeasures)

    @property
    def transforms(self) -> tuple[constraints.Transform, ...]:
        """Return all image transforms that the client may have used; those of several defenses are combined."""
        each = [countermeasure.transforms for countermeasure in self.countermeasures if countermeasure.transforms]
        if len(each) < 2 or math.prod(self._numbers_of_transforms) > MOST_SEQUENCES:
            return max(each, key=len, default=())
        return tuple(
            partial(reduce, lambda images, transform: transform(images), sequence)
            for sequence in itertools.product(*each)
        )

    @property
    def _numbers_of_transforms(self) -> list[int]:
        return [len(each.transforms) for each in self.countermeasures if each.transforms] or [0]

    @property
    def smoothness(self) -> float:
        return max((m.smoothness for m in self.countermeasures), default=0.0)

    @property
    def noisy(self) -> bool:
        return any(m.noisy for m in self.countermeasures)

    def bounds(self, update: Tensors, number: int | None = None) -> constraints.Bounds:
        rules = [m.rule for m in self.countermeasures[:number] if m.rule]
        std = self._noise_std(update) if rules else 0.0
        return constraints.widest(rule(update, std) for rule in rules)

    def _noise_std(self, update: Tensors) -> float:
        if not self.noise_stds:
            return 0.0
        known = [std for std in self.noise_stds if std is not None]
        most = constraints.estimate_noise_std(update)
        return min(most, math.hypot(*known)) if len(known) == len(self.noise_stds) else most

    def update_constraints(
        self, observations: Sequence[Observation], matched: Matched
    ) -> constraints.UpdateConstraints:
        updates = [o.update() for o in observations]
        clippings = [(number, m.clipping) for number, m in enumerate(self.countermeasures) if m.clipping]
        clipped = [matched(o) for o in observations] if clippings else []
        clips = []
        for number, clipping in clippings:  # the elements that countermeasures before it may have dropped count for 0
            each = [self.bounds(update, number) for update in updates]
            pairs = {name: [bounds[name] for bounds in each] for name in each[0]}
            kept = {n: torch.stack([1 - ((low < 0) & (high > 0)).float() for low, high in p]) for n, p in pairs.items()}
            clips.append(clipping.of(clipped, kept))
        each = [_in_matched_units(o, self.bounds(u), matched) for o, u in zip(observations, updates, strict=True)]
        low, high = ({name: torch.stack([bounds[name][end] for bounds in each]) for name in each[0]} for end in (0, 1))
        bounds = {name: (low[name], high[name]) for name in low}
        return constraints.UpdateConstraints(bounds=bounds, clip=constraints.Clips(tuple(clips)) if clips else None)


def _as_in_mean(parts: Description) -> Description:
    number = math.prod(part.effect.clients for part in parts if isinstance(part.effect, Summed))
    if number == 1:
        return parts

    def of_mean(noise: Noise) -> Noise:
        return replace(noise, std=None if noise.std is None else noise.std / math.sqrt(number), clip=None)

    seen = []
    for part in (part for part in parts if not isinstance(part.effect, Clipped)):
        effect = of_mean(part.effect) if isinstance(part.effect, Noise) else part.effect
        if isinstance(effect, NoisedLayers):
            effect = replace(effect, added=effect.added and of_mean(effect.added))
        seen.append(replace(part, effect=effect))
    return tuple(seen)


def without_countermeasure(parts: Description) -> list[str]:
    """Name the ``parts`` of a defense that have no countermeasure."""
    unknown = countermeasures_against.dispatch(object)
    names = [part.name for part in parts if countermeasures_against.dispatch(type(part.effect)) is unknown]
    return list(dict.fromkeys(names))


def _taken(parts: Description, setting: AttackSetting) -> list[Countermeasure]:
    return [taken for part in parts for taken in countermeasures_against(part.effect, setting) or ()]


def _noise_std(effect: Effect, setting: AttackSetting) -> float | None:
    std, unit = None, 1.0 / setting.matched_per_uploaded
    if isinstance(effect, Noise) and effect.at == "upload":
        std, unit = effect.std, 1.0
    elif isinstance(effect, Noise | SlicedNoise) and not setting.unrolls:
        std = effect.std
    return None if std is None else std * unit


def _in_matched_units(observation: Observation, bounds: constraints.Bounds, matched: Matched) -> constraints.Bounds:
    plan = observation.plan
    plan = replace(plan, shares="delta") if plan.shares == "weights" else plan

    def convert(end: int) -> Tensors:
        tensors = {name: pair[end] for name, pair in bounds.items()}
        return matched(replace(observation, plan=plan, upload=replace(observation.upload, tensors=tensors)))

    ends = convert(0), convert(1)
    return {n: (torch.minimum(ends[0][n], ends[1][n]), torch.maximum(ends[0][n], ends[1][n])) for n in bounds}
