"""What can be done against each defense."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fl_privacy.attacks.adaptive.assumed_transform import Transform, outcomes
from fl_privacy.attacks.adaptive.bounds import Rule, only_layer, shared_columns, where_shared, within_bins
from fl_privacy.attacks.adaptive.circumstances import Circumstances
from fl_privacy.attacks.adaptive.clip import Clipping, Scope
from fl_privacy.attacks.adaptive.constraints import HiddenGradient

Settings = Mapping[str, Any]
"""Of one defense, from its public description; any may be missing."""


@dataclass(frozen=True, kw_only=True)
class Countermeasure:
    """What is done against one defense.

    Attributes:
        sentence: for the report.
        rule: where the undefended update must have been.
        clipping: how the guess is to be clipped.
        smoothness: weight of total variation as a share of the loss of a zero gradient.
        hidden: what a private loss sends back, which is guessed as well.
        loss_factor: of the cross entropy in the clients' loss.
        transforms: what the client may have done to an image; every one is tried.
    """

    sentence: str
    rule: Rule | None = None
    clipping: Clipping | None = None
    smoothness: float = 0.0
    hidden: HiddenGradient | None = None
    loss_factor: float = 1.0
    transforms: tuple[Transform, ...] = ()


HIDDEN, BLURRED = 1e-3, 3e-3
"""Smoothness where the rest of the update is exact, and where all of it is noised; chosen on LeNet with CIFAR-10."""

UNSCALED, UNTOLD = 1.0, 1.0
"""What an attacker assumes that is not told SPN's weights: the cross entropy is as it would be without, and what is
sent back into the features is as large as the head's weights."""


def against_sparsity(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """Pruning and selective sharing."""
    return [
        Countermeasure(
            sentence="It matches the update where that is not zero; elsewhere it only keeps the guess below what would"
            " have been shared.",
            rule=where_shared(settings),
        ),
        *_prefer_smooth(circumstances, BLURRED if settings.get("noise_std") else HIDDEN),
    ]


def against_quantization(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """Quantization: measured against a straight-through quantizer of the guess, this reaches further."""
    return [
        Countermeasure(
            sentence="It accepts every gradient that rounds to the levels observed.",
            rule=within_bins(settings),
        ),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


def against_soteria(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """Soteria: muting the columns that are zero reaches a little further than muting the whole layer."""
    if circumstances.head is None:
        return []
    return [
        Countermeasure(
            sentence="It mutes those columns of the last layer's gradient that are zero.",
            rule=shared_columns(circumstances.head),
        ),
        *_prefer_smooth(circumstances, HIDDEN),
    ]


def against_mixing(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """The improved Soteria, which leaves nothing to mute: noise like any other."""
    return _prefer_smooth(circumstances, BLURRED)


def against_refiner(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """Refiner: robust data look like noise, and where their noise is drawn anew it averages out over rounds."""
    return _prefer_smooth(circumstances, BLURRED)


def against_ats(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """ATS: the original is looked for through every transformation that may have been drawn."""
    transforms = outcomes(
        settings.get("policies", ()),
        table=settings.get("table", "paper"),
        by_probability=settings.get("by_probability", False),
    )
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


def against_noise(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """Noise on the update, or on the gradient of every local step, after clipping it."""
    unit = circumstances.matched_per_uploaded
    if settings.get("at") == "gradient":
        unit, clips = 1.0, not circumstances.unrolls
    else:
        clips = circumstances.unrolls or not circumstances.plan.weight_decay
    norm, std = settings.get("clip_norm", 0), settings.get("std")
    clipping = _clip(norm and norm * unit, std and std * unit, settings, circumstances) if clips else []
    return [*clipping, *_prefer_smooth(circumstances, BLURRED)]


def against_dp_sgd(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """Noise on the sum of clipped gradients of single examples; that of a single one can be clipped likewise."""
    norm, multiplier = settings.get("clip_norm", 0), settings.get("noise_multiplier")
    std = norm * multiplier if norm and multiplier is not None else None
    clipping = (
        _clip(norm, std, settings, circumstances) if circumstances.batch_size == 1 and not circumstances.unrolls else []
    )
    return [*clipping, *_prefer_smooth(circumstances, BLURRED)]


def against_spn(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """SPN, whose private loss acts on the public model through one vector of features an example.

    Whatever head and codes are, their gradient by the backbone is that of <q, features>, with one unknown vector q an
    example. This is the surrogate that is learned: F unknowns in place of the (F + 1) K weights and K bits that make
    them. The K weights of a feature, which all have a part where no output is beyond the margin yet, give an element of
    q a size of about alpha2 sqrt(K) times theirs, in whose unit it has to be guessed. The output layer is not perturbed
    at all; it is all that is matched where an update is of several steps, each with another q. In a batch q is free for
    each example, more than the attacker might know: as long as no output is beyond the margin, it is one per class.
    """
    factor = settings.get("alpha1", UNSCALED)
    told = "alpha2" in settings and "bits" in settings
    strength = settings["alpha2"] * math.sqrt(settings["bits"]) / factor if told else UNTOLD
    if strength == 0:
        sentence = "It weights the cross entropy as the clients do."
        return [] if factor == 1 else [Countermeasure(sentence=sentence, loss_factor=factor)]
    bound = settings.get("bound")
    layer = settings.get("layer")
    weight = f"{layer}.weight" if layer else circumstances.head
    if weight is not None and weight in circumstances.learnable:
        return [
            Countermeasure(
                sentence="It learns what the private head sends back into the features, jointly with the image.",
                hidden=HiddenGradient(weight=weight, strength=strength, weight_rms=bound and bound / math.sqrt(3)),
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


def against_split(settings: Settings, circumstances: Circumstances) -> list[Countermeasure]:
    """Private layers, of which only stand-ins are known; model inversion also finds them with the image."""
    return _prefer_smooth(circumstances, BLURRED)


def _clip(
    norm: float | None, std: float | None, settings: Settings, circumstances: Circumstances
) -> list[Countermeasure]:
    """``norm``: ``None`` where nothing is clipped, 0 where it is not known."""
    scope: Scope = settings.get("clip_scope", "global") if norm else "global"
    if norm is None or (scope == "global" and not (circumstances.scales and circumstances.complete)):
        return []
    estimated = "" if norm else ", to the norm that it sees"
    return [
        Countermeasure(
            sentence=f"It clips the guessed gradient as the clients clip theirs{estimated}.",
            clipping=Clipping(norm=norm or None, noise_std=std, scope=scope),
        )
    ]


def _prefer_smooth(circumstances: Circumstances, share: float) -> list[Countermeasure]:
    """Many images fit an update that is not known exactly; attacks with total variation have one to choose by."""
    if circumstances.smooths:
        return []
    return [
        Countermeasure(sentence="Of the images that fit it prefers smooth ones (total variation).", smoothness=share)
    ]


COUNTERMEASURES: Mapping[str, Callable[[Settings, Circumstances], list[Countermeasure]]] = {
    "ats": against_ats,
    "dp_noise": against_noise,
    "dp_sgd": against_dp_sgd,
    "fdl_pp": against_split,
    "none": lambda settings, circumstances: [],
    "pruning": against_sparsity,
    "quantization": against_quantization,
    "refiner": against_refiner,
    "selective_sharing": against_sparsity,
    "soteria": against_soteria,
    "soteria_mixing": against_mixing,
    "spn": against_spn,
    "split_fed": against_split,
}
"""By the name of the defense."""
