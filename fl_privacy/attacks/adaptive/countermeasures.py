"""What can be done against each effect that a defense may have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

from fl_privacy.attacks.adaptive.bounds import (
    Rule,
    Transform,
    bare_layers,
    only_layer,
    outcomes,
    shared_columns,
    where_shared,
    within_bins,
)
from fl_privacy.attacks.adaptive.clip import Clipping
from fl_privacy.attacks.adaptive.constraints import HiddenGradient
from fl_privacy.effects import (
    AdversarialPerturbation,
    Clipped,
    ClippedExamples,
    Effect,
    MutedFeatures,
    Noise,
    NoisedLayers,
    PrivateLayers,
    PrivateLoss,
    Quantized,
    RobustGradient,
    SlicedNoise,
    Sparse,
    Summed,
    Transformed,
)
from fl_privacy.types import LocalPlan


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What an attacker may know and do while it attacks: circumstances of an attack.

    Attributes:
        head: weight of the output layer, if there is one.
        batch_size: examples behind the update.
        plan: of the clients.
        unrolls: whether local steps are replayed.
        matched_per_uploaded: how much larger what is matched is than what was uploaded.
        scales: whether the objective sees how large the whole gradient is.
        complete: whether every parameter is matched.
        smooths: whether the attack prefers smooth or natural images anyway.
        pixels: whether it looks for images pixel by pixel.
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
        sentence: for the report.
        rule: where the undefended update must have been.
        clipping: how the guess is to be clipped.
        smoothness: weight of total variation in units of ``Problem.blank_loss``.
        noisy: whether that weight follows from the noise in the update instead, where it can be told from it.
        hidden: what a private loss sends back, which is guessed as well.
        loss_factor: of the cross entropy in the clients' loss.
        transforms: what the client may have done to an image; every one is tried.
    """

    sentence: str
    rule: Rule | None = None
    clipping: Clipping | None = None
    smoothness: float = 0.0
    noisy: bool = False
    hidden: HiddenGradient | None = None
    loss_factor: float = 1.0
    transforms: tuple[Transform, ...] = ()


FINE, HIDDEN, BLURRED = 1e-2, 1e-1, 2.5e-1
"""Smoothness where little of the update is hidden, where much is and the rest exact, and where all of it is noised;
chosen on two LeNets with sigmoids, of whose gradients the image makes up a hundredth and a hundred-thousandth."""

_MANY_BITS = 6
"""Of a quantized value, from which its levels hide little."""

_REACH = 3.0
"""Standard deviations of the noise within which nearly all of it is."""

UNSCALED, UNTOLD = 1.0, 1.0
"""What an attacker assumes that is not told SPN's weights: the cross entropy is as it would be without, and what is
sent back into the features is as large as the head's weights."""


def looks_noisy(effect: Effect) -> bool:
    """Say whether every element carries noise whose size shows in the update.

    Few levels, up or down to which values are rounded at random, are noise of about a step, also where there are two.
    """
    if isinstance(effect, Quantized):
        return effect.rounding == "stochastic" and 0 < (effect.bits or 0) < _MANY_BITS
    return isinstance(effect, Noise | ClippedExamples | SlicedNoise)


@singledispatch
def countermeasures_against(effect: Effect, circumstances: Circumstances) -> Sequence[Countermeasure] | None:
    """Return the countermeasures against a known ``effect``; ``None`` where none is known.

    A function under ``@countermeasures_against.register`` adds those against another effect. Fields of an effect that
    are not given are ``None``.
    """
    return None


@countermeasures_against.register
def _against_sparsity(effect: Sparse, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter pruning and selective sharing: match only the values that were shared."""
    return [
        Countermeasure(
            sentence="It matches the update where that is not zero; elsewhere it only keeps the guess below what would"
            " have been shared.",
            rule=where_shared(effect),
        ),
        *_prefer_smooth(circumstances, BLURRED if effect.noise_std else HIDDEN),
    ]


@countermeasures_against.register
def _against_quantization(effect: Quantized, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter quantization: accept every gradient within the bins.

    Measured against a straight-through quantizer of the guess, bins get further.
    """
    if looks_noisy(effect):
        return _smooth_away(circumstances)
    return [
        Countermeasure(
            sentence="It accepts every gradient that rounds to the levels observed.",
            rule=within_bins(effect),
        ),
        *_prefer_smooth(circumstances, FINE if (effect.bits or 0) >= _MANY_BITS else HIDDEN),
    ]


@countermeasures_against.register
def _against_soteria(effect: MutedFeatures, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter Soteria: mute the columns that are zero.

    This gets a little further than muting the whole layer.
    """
    if circumstances.head is None:
        return []
    return [
        Countermeasure(
            sentence="It mutes those columns of the last layer's gradient that are zero.",
            rule=shared_columns(circumstances.head, effect.dropped),
        ),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


@countermeasures_against.register
def _against_mixing(effect: SlicedNoise, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter the improved Soteria, which leaves nothing to mute, as any other noise."""
    return _smooth_away(circumstances)


@countermeasures_against.register
def _against_refiner(effect: RobustGradient, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter Refiner by smoothness: robust data look like noise.

    Where their noise is drawn anew each round, it averages out over rounds.
    """
    return _prefer_smooth(circumstances, BLURRED)


@countermeasures_against.register
def _against_misleading(effect: AdversarialPerturbation, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter RecUP-FL by smoothness: its perturbation is noise to an attack that looks for images."""
    return _prefer_smooth(circumstances, BLURRED)


@countermeasures_against.register
def _against_ats(effect: Transformed, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter ATS: search the original image through every transformation that may have been drawn."""
    transforms = outcomes(effect.policies or (), table=effect.table, by_probability=effect.by_probability)
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
def _against_noise(effect: Noise, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter noise on the update, or on the gradient of every local step, after clipping it."""
    unit = circumstances.matched_per_uploaded
    if effect.at == "gradient":
        unit, clips = 1.0, not circumstances.unrolls
    else:
        clips = circumstances.unrolls or not circumstances.plan.weight_decay
    std = effect.std and effect.std * unit
    clipping = _clip(effect.clip, unit, std, circumstances) if effect.clip and clips else []
    return [*clipping, *_smooth_away(circumstances)]


@countermeasures_against.register
def _against_bare_layers(effect: NoisedLayers, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter noise on some layers: the others are exact, and those are near what was observed."""
    noise = effect.added or Noise(std=None, clip=None)
    one = noise.at == "upload" or (circumstances.plan.shares == "gradient" and not circumstances.unrolls)
    reach = math.inf if noise.std is None or not one else _REACH * noise.std
    clip = noise.clip if noise.clip and noise.clip.norm else None
    clipping = _against_noise(Noise(std=0.0, clip=clip, at=noise.at), replace(circumstances, pixels=False))
    return [
        *clipping,
        Countermeasure(
            sentence="It matches the layers without noise exactly, and the others within what the noise hides.",
            rule=bare_layers(effect, reach),
        ),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


@countermeasures_against.register
def _against_clipping(effect: Clipped, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter clipping without noise: clip the guess too."""
    clips = circumstances.unrolls or not circumstances.plan.weight_decay
    return _clip(effect, circumstances.matched_per_uploaded, 0.0, circumstances) if clips else []


@countermeasures_against.register
def _against_sum(effect: Summed, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter the sum over clients: it is the update of the batch that they have together."""
    return [Countermeasure(sentence=f"It takes the sum over {effect.clients} clients for the update of one batch.")]


@countermeasures_against.register
def _against_dp_sgd(effect: ClippedExamples, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter DP-SGD's noise on the sum of clipped gradients; clip the guess for a batch of one example."""
    norm, multiplier = effect.norm, effect.noise_multiplier
    std = norm * multiplier if norm is not None and multiplier is not None else None
    alone = circumstances.batch_size == 1 and not circumstances.unrolls
    clipping = _clip(Clipped(norm=norm), 1.0, std, circumstances) if alone else []
    return [*clipping, *_smooth_away(circumstances)]


@countermeasures_against.register
def _against_spn(effect: PrivateLoss, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter SPN, whose private loss acts on the public model through one feature vector per example.

    Whatever head and codes are, their gradient by the backbone is that of <q, features>, with one unknown vector q an
    example. This is the surrogate that is learned: F unknowns in place of the (F + 1) K weights and K bits that make
    them. The K weights of a feature, which all have a part where no output is beyond the margin yet, give an element of
    q a size of about alpha2 sqrt(K) times theirs, in whose unit it has to be guessed. The output layer is not perturbed
    at all; it is all that is matched where an update is of several steps, each with another q. In a batch q is free for
    each example, more than the attacker might know: as long as no output is beyond the margin, it is one per class of a
    head of a single layer. Further private layers leave q one vector of F unknowns; each of width w takes its size by
    sqrt(w / 2) times that of its weights, since about half of its ReLUs pass something on.
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
        return [
            Countermeasure(
                sentence="It learns what the private head sends back into the features, jointly with the image.",
                hidden=HiddenGradient(
                    weight=weight,
                    strength=strength,
                    weight_rms=effect.bound and effect.bound / math.sqrt(3),
                    layers=1 + len(effect.widths),
                ),
                loss_factor=factor,
            )
        ]
    if circumstances.head is None:
        return []
    return [
        Countermeasure(
            sentence="It matches only the output layer, where the private loss has no part.",
            rule=only_layer(circumstances.head.rpartition(".")[0]),
            loss_factor=factor,
        ),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


@countermeasures_against.register
def _against_split(effect: PrivateLayers, circumstances: Circumstances) -> Sequence[Countermeasure]:
    """Counter private layers, of which only stand-ins are known, by smoothness.

    Model inversion also finds the layers along with the image.
    """
    return _prefer_smooth(circumstances, BLURRED)


def _clip(clip: Clipped, unit: float, std: float | None, circumstances: Circumstances) -> list[Countermeasure]:
    """Clip the guess as the client clips, in units of what is matched; a norm that is not given counts as global."""
    scope = clip.scope if clip.norm else "global"
    if scope == "global" and not (circumstances.scales and circumstances.complete):
        return []
    estimated = "" if clip.norm else ", to the norm that it sees"
    return [
        Countermeasure(
            sentence=f"It clips the guessed gradient as the clients clip theirs{estimated}.",
            clipping=Clipping(norm=clip.norm and clip.norm * unit, noise_std=std, scope=scope),
        )
    ]


def _prefer_smooth(circumstances: Circumstances, share: float) -> list[Countermeasure]:
    """Prefer smooth images, since many fit an update that is known only in part.

    Attacks with total variation of their own need no other.
    """
    if circumstances.smooths:
        return []
    return [
        Countermeasure(sentence="Of the images that fit it prefers smooth ones (total variation).", smoothness=share)
    ]


def _smooth_away(circumstances: Circumstances) -> list[Countermeasure]:
    """Counter noisy updates by smoothness, whose likeliest weight follows from the noise.

    Also for attacks with total variation of their own.
    """
    if not circumstances.pixels:
        return []
    sentence = "Of the images that fit it prefers those as smooth as the noise calls for (total variation)."
    return [Countermeasure(sentence=sentence, smoothness=0.0 if circumstances.smooths else BLURRED, noisy=True)]
