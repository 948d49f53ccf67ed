"""Countermeasures against each effect that a defense may have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch

from fl_privacy import effects
from fl_privacy.attacks.adaptive import constraints
from fl_privacy.types import LocalPlan


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Knowledge and options of an attacker during an attack.

    Attributes:
        matched_per_uploaded: factor from what was uploaded to what is matched.
        scales: ``True`` if the objective depends on the scale of the whole gradient.
        complete: ``True`` if every parameter is matched.
        learnable: weights of the linear layers into whose input unknown gradients can be guessed.
    """

    head: str | None
    batch_size: int
    plan: LocalPlan
    unrolls: bool
    matched_per_uploaded: float
    scales: bool
    complete: bool
    smooths: bool
    pixels: bool
    learnable: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Countermeasure:
    """Measures that an attack takes against one defense.

    Attributes:
        smoothness: weight of total variation in units of ``Problem.blank_loss``.
        noisy: ``True`` if that weight follows from the noise in the update instead, if it can be estimated.
        hidden: gradient that a private loss sends back, which is guessed as well.
        loss_factor: factor of the cross entropy in the clients' loss.
        transforms: image transforms that the client may have used; every one is tried.
    """

    sentence: str
    rule: constraints.Rule | None = None
    clipping: constraints.Clipping | None = None
    smoothness: float = 0.0
    noisy: bool = False
    hidden: constraints.HiddenGradient | None = None
    loss_factor: float = 1.0
    transforms: tuple[constraints.Transform, ...] = ()


FINE, HIDDEN, BLURRED = 1e-2, 1e-1, 2.5e-1
"""Smoothness if little of the update is hidden, if much is and the rest exact, and if all of it is noised; chosen on
two LeNets with sigmoids, of whose gradients the image makes up a hundredth and a hundred-thousandth."""

_MANY_BITS = 6  # bits of a quantized value above which its levels hide little
_REACH = 3.0  # standard deviations of the noise within which nearly all of it is

UNSCALED, UNTOLD = 1.0, 1.0
"""Assumptions about SPN's unknown weights: the cross entropy is unchanged, and the gradient sent back into the features
is as large as the head's weights."""


def looks_noisy(effect: effects.Effect) -> bool:
    """Return ``True`` if every element carries noise whose size shows in the update, as with coarse random rounding."""
    if isinstance(effect, effects.Quantized):
        return effect.rounding == "stochastic" and 0 < (effect.bits or 0) < _MANY_BITS
    return isinstance(effect, effects.Noise | effects.ClippedExamples | effects.SlicedNoise)


@singledispatch
def countermeasures_against(effect: effects.Effect, circumstances: Circumstances) -> Sequence[Countermeasure] | None:
    """Return the countermeasures against a known ``effect``; ``None`` if none is known.

    A function under ``@countermeasures_against.register`` adds an effect. Unknown fields of an effect are ``None``.
    """
    return None


@countermeasures_against.register
def _against_sparsity(effect: effects.Sparse, circumstances: Circumstances) -> Sequence[Countermeasure]:
    return [
        Countermeasure(
            sentence="It matches the update where that is not zero; elsewhere it only keeps the guess below what would"
            " have been shared.",
            rule=partial(constraints.where_shared, effect),
        ),
        *_prefer_smooth(circumstances, BLURRED if effect.noise_std else HIDDEN),
    ]


@countermeasures_against.register
def _against_truncation(effect: effects.Truncated, circumstances: Circumstances) -> Sequence[Countermeasure]:
    sentence = "It accepts every value beyond the bound for elements that were cut to it."
    return [
        Countermeasure(sentence=sentence, rule=partial(constraints.beyond_cut, effect)),
        *_prefer_smooth(circumstances, FINE),
    ]


@countermeasures_against.register
def _against_withholding(effect: effects.Withheld, circumstances: Circumstances) -> Sequence[Countermeasure]:
    return _prefer_smooth(circumstances, FINE)


@countermeasures_against.register
def _against_quantization(effect: effects.Quantized, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Accept every gradient within the bins, which works better than a straight-through quantizer."""
    if looks_noisy(effect):
        return _smooth_away(circumstances)
    sentence = "It accepts every gradient that rounds to the levels observed."
    return [
        Countermeasure(sentence=sentence, rule=partial(constraints.within_bins, effect)),
        *_prefer_smooth(circumstances, FINE if (effect.bits or 0) >= _MANY_BITS else HIDDEN),
    ]


@countermeasures_against.register
def _against_soteria(effect: effects.MutedFeatures, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Mute the columns that are zero, which works a little better than muting the whole layer."""
    if circumstances.head is None:
        return []
    rule = partial(constraints.shared_columns, circumstances.head, effect.dropped)
    return [
        Countermeasure(sentence="It mutes those columns of the last layer's gradient that are zero.", rule=rule),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


@countermeasures_against.register
def _against_mixing(effect: effects.SlicedNoise, circumstances: Circumstances) -> Sequence[Countermeasure]:
    return _smooth_away(circumstances)


@countermeasures_against.register(effects.RobustGradient)
@countermeasures_against.register(effects.AdversarialPerturbation)
@countermeasures_against.register(effects.PrivateLayers)
def _against_lookalikes(effect: effects.Effect, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Prefer smooth images: perturbations look like noise, and of private layers only stand-ins are known."""
    return _prefer_smooth(circumstances, BLURRED)


@countermeasures_against.register
def _against_ats(effect: effects.Transformed, circumstances: Circumstances) -> Sequence[Countermeasure]:
    transforms = constraints.outcomes(effect.policies or (), table=effect.table, by_probability=effect.by_probability)
    if not transforms:
        return []
    return [
        Countermeasure(
            sentence=f"It looks for the original image through each of the {len(transforms)} transformations that a"
            " client may draw, and keeps the one that fits the update best.",
            transforms=transforms,
        ),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


@countermeasures_against.register
def _against_noise(effect: effects.Noise, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter noise on the update or on the local steps' gradients, after clipping it."""
    unit, clips = circumstances.matched_per_uploaded, circumstances.unrolls or not circumstances.plan.weight_decay
    if effect.at == "gradient":
        unit, clips = 1.0, not circumstances.unrolls
    std = effect.std and effect.std * unit
    clipping = _clip(effect.clip, unit, std, circumstances) if effect.clip and clips else []
    return [*clipping, *_smooth_away(circumstances)]


@countermeasures_against.register
def _against_bare_layers(effect: effects.NoisedLayers, circumstances: Circumstances) -> Sequence[Countermeasure]:
    noise = effect.added or effects.Noise(std=None, clip=None)
    one = noise.at == "upload" or (circumstances.plan.shares == "gradient" and not circumstances.unrolls)
    reach = math.inf if noise.std is None or not one else _REACH * noise.std
    clip = noise.clip if noise.clip and noise.clip.norm else None
    return [
        *_against_noise(effects.Noise(std=0.0, clip=clip, at=noise.at), replace(circumstances, pixels=False)),
        Countermeasure(
            sentence="It matches the layers without noise exactly, and the others within what the noise hides.",
            rule=partial(constraints.bare_layers, effect, reach),
        ),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


@countermeasures_against.register
def _against_clipping(effect: effects.Clipped, circumstances: Circumstances) -> Sequence[Countermeasure]:
    clips = circumstances.unrolls or not circumstances.plan.weight_decay
    return _clip(effect, circumstances.matched_per_uploaded, 0.0, circumstances) if clips else []


@countermeasures_against.register
def _against_sum(effect: effects.Summed, circumstances: Circumstances) -> Sequence[Countermeasure]:
    return [Countermeasure(sentence=f"It takes the sum over {effect.clients} clients for the update of one batch.")]


@countermeasures_against.register
def _against_dp_sgd(effect: effects.ClippedExamples, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter DP-SGD's noise; clip the guess for a batch of one example."""
    norm, multiplier = effect.norm, effect.noise_multiplier
    std = norm * multiplier if norm is not None and multiplier is not None else None
    alone = circumstances.batch_size == 1 and not circumstances.unrolls
    clipping = _clip(effects.Clipped(norm=norm), 1.0, std, circumstances) if alone else []
    return [*clipping, *_smooth_away(circumstances)]


@countermeasures_against.register
def _against_spn(effect: effects.PrivateLoss, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter SPN's private loss by an unknown vector q per example: its gradient is that of <q, features>.

    Its size is about alpha2 sqrt(K) times the weights'; each further private layer of width w multiplies it by sqrt(w /
    2), since about half of its ReLUs are active. For several steps, each with another q, only the unperturbed output
    layer is matched.
    """
    factor = UNSCALED if effect.alpha1 is None else effect.alpha1
    told = effect.alpha2 is not None and effect.bits is not None
    strength = (effect.alpha2 or 0.0) * math.sqrt(effect.bits or 0) / factor if told else UNTOLD
    strength *= math.sqrt(math.prod(width / 2 for width in effect.widths))
    if strength == 0:
        sentence = "It weights the cross entropy as the clients do."
        return [] if factor == 1 else [Countermeasure(sentence=sentence, loss_factor=factor)]
    weight = f"{effect.layer}.weight" if effect.layer else circumstances.head
    if weight is not None and weight in circumstances.learnable:
        sentence = "It learns what the private head sends back into the features, jointly with the image."
        rms, layers = effect.bound and effect.bound / math.sqrt(3), 1 + len(effect.widths)
        hidden = constraints.HiddenGradient(weight=weight, strength=strength, weight_rms=rms, layers=layers)
        return [Countermeasure(sentence=sentence, hidden=hidden, loss_factor=factor)]
    if circumstances.head is None:
        return []
    return [
        Countermeasure(
            sentence="It matches only the output layer, where the private loss has no part.",
            rule=partial(constraints.only_layer, circumstances.head.rpartition(".")[0]),
            loss_factor=factor,
        ),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


def _clip(clip: effects.Clipped, unit: float, std: float | None, circumstances: Circumstances) -> list[Countermeasure]:
    """Clip the guess as the client clips; an unknown norm counts as global."""
    scope = clip.scope if clip.norm else "global"
    if scope == "global" and not (circumstances.scales and circumstances.complete):
        return []
    estimated = "" if clip.norm else ", to the norm that it sees"
    sentence = f"It clips the guessed gradient as the clients clip theirs{estimated}."
    clipping = constraints.Clipping(norm=clip.norm and clip.norm * unit, noise_std=std, scope=scope)
    return [Countermeasure(sentence=sentence, clipping=clipping)]


def _prefer_smooth(circumstances: Circumstances, share: float) -> list[Countermeasure]:
    """Prefer smooth images, since many fit an update that is known only in part."""
    sentence = "Among the images that fit it prefers smooth ones (total variation)."
    return [] if circumstances.smooths else [Countermeasure(sentence=sentence, smoothness=share)]


def _smooth_away(circumstances: Circumstances) -> list[Countermeasure]:
    """Counter noise by smoothness whose likeliest weight follows from it."""
    if not circumstances.pixels:
        return []
    sentence = "Among the images that fit it prefers those as smooth as the noise calls for (total variation)."
    return [Countermeasure(sentence=sentence, smoothness=0.0 if circumstances.smooths else BLURRED, noisy=True)]
