"""Recover one image from reconstructed mixtures of it with others."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fl_privacy.attacks.pixel_prior import FEWEST, PixelPrior, learn_prior
from fl_privacy.effects import Mixed, mixing
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

_TURNS, _DOUBTFUL, _LEAST_DOUBT = 30, 20, 0.05
"""Turns in which signs and image are estimated from each other, the number of them over which the image's extra
uncertainty falls, and its last value as a share of the variance under the prior."""

_LEAST_SHARE, _LEAST_VARIANCE = 1e-3, 1e-3
"""Least share of an image in its mixture, and least variance of a pixel."""


def as_mixture(observation: Observation) -> Observation:
    """Return ``observation`` as one of a mixture, on which alone its update depends."""
    known = observation.knowledge
    if mixing(known.defense) is None:
        return observation
    others = tuple(part for part in known.defense or () if not isinstance(part.effect, Mixed))
    return observation.told(defense=others, same_data=None)


def unmixed(observations: Sequence[Observation], found: Sequence[Reconstruction]) -> list[Reconstruction]:
    """Replace mixtures in ``found`` by the image that those of the same example share.

    The attacker has to know the defense, and public images. Batches stay.
    """
    together: dict[object, list[int]] = {}
    for place, (observation, own) in enumerate(zip(observations, found, strict=True)):
        if own.batch is not None and _can_be_unmixed(observation):
            name = observation.knowledge.same_data
            together.setdefault(place if name is None else name, []).append(place)
    results = list(found)
    for places in together.values():
        observation = observations[places[-1]]
        batch = common_image(observation, [batch for place in places if (batch := found[place].batch) is not None])
        sentence = f"It undoes the signs of {_in_words(len(places))} by what public images look like."
        for place in places:
            results[place] = replace(
                found[place],
                batch=batch,
                certainty=Certainty.APPROXIMATE,
                certainties=(),
                member="unmixed",
                countermeasures=(*found[place].countermeasures, sentence),
            )
    return results


def _can_be_unmixed(observation: Observation) -> bool:
    public = observation.knowledge.public_images
    told = public is not None and public.dim() == 4 and len(public) >= FEWEST
    return told and observation.upload.num_examples == 1 and mixing(observation.knowledge.defense) is not None


def _in_words(number: int) -> str:
    return "a mixture" if number == 1 else f"{number} mixtures with the same image, together"


@torch.no_grad()
def common_image(observation: Observation, mixtures: Sequence[Batch]) -> Batch:
    """Find the image, with its label, that ``mixtures`` of the same example share, by expectation maximization.

    A pixel of a mixture is unchanged or negated, with probabilities by its expectation: the shares, by labels, of the
    image and of the others' class means. Mixtures less these are noisy views of the image, whose mean and variances
    under a normal prior decide the signs anew, at first with the prior's full uncertainty.

    ``mixtures`` are (1, C, H, W) in [0, 1] with labels (1,) or (1, K).
    """
    known, effect = observation.knowledge, mixing(observation.knowledge.defense)
    assert known.public_images is not None and effect is not None
    prior = learn_prior(known.public_images, known.public_labels, observation.num_classes)
    shares = torch.stack([_of_classes(batch.labels, observation.num_classes) for batch in mixtures]).to(prior.means)
    labeled = min(1.0, (effect.labeled or 1) / (effect.images or effect.labeled or 1))
    label = shares.sum(0).argmax()
    own = (labeled * shares[:, label]).clamp_min(_LEAST_SHARE)
    if (effect.images or 2) > 1 and bool((shares.amax(1) > 1 - _LEAST_SHARE).all()):
        own = torch.full_like(own, 1 / (effect.images or 2))  # a label of one class shows no shares
    seen = torch.stack([batch.inputs[0].flatten() for batch in mixtures]).to(prior.means)
    others = labeled * shares.clone()
    others[:, label] = 0
    image = _solved(seen, own, others, prior, label)
    shape = mixtures[0].inputs.shape
    return Batch(image.clamp(0, 1).view(shape).to(mixtures[0].inputs), label[None].to(mixtures[0].inputs.device))


def _of_classes(labels: Tensor, classes: int) -> Tensor:
    """Return the share (K,) of each class in a mixture's labels (1,) or (1, K)."""
    hot = labels[0] if labels.dim() == 2 else torch.nn.functional.one_hot(labels[0], classes)
    return hot.float().cpu()


def _solved(seen: Tensor, own: Tensor, others: Tensor, prior: PixelPrior, label: Tensor) -> Tensor:
    """Find the image (N,) behind mixtures.

    Args:
        seen: mixtures (U, N).
        own: shares (U,) of the image.
        others: shares (U, K) of images of each class.
    """
    rest = (1 - own - others.sum(1)).clamp_min(0)
    expected_others = others @ prior.of(torch.arange(others.shape[1]))[0] + rest[:, None] * prior.means.mean(0)
    means, which = prior.of(label)
    basis = prior.bases[which]
    before = after = basis.square().sum(0)  # variance of each pixel
    of_others = prior.bases.square().sum(1).mean(0) + _LEAST_VARIANCE
    power = (others.square().sum(1) + rest.square())[:, None]
    image = means
    for turn in range(_TURNS):
        expected = own[:, None] * image + expected_others
        doubt = after + before * max(_LEAST_DOUBT, 1 - turn / _DOUBTFUL)
        variance = power * of_others + own[:, None].square() * doubt + _LEAST_VARIANCE
        turned = torch.sigmoid(((seen - expected).square() - (1 - seen - expected).square()) / (2 * variance))
        unturned = torch.lerp(seen, 1 - seen, turned)
        unsure = (turned * (1 - turned) * (2 * seen - 1).square()).mean(0)
        noise = power * of_others.mean() + unsure + _LEAST_VARIANCE
        told = (own[:, None].square() / noise).sum(0)
        view = (own[:, None] * (unturned - expected_others) / noise).sum(0)
        factor = torch.linalg.cholesky(torch.eye(len(basis)).to(basis) + (basis * told) @ basis.T)
        variables = torch.cholesky_solve((basis @ (view - told * means))[:, None], factor)[:, 0]
        image = means + variables @ basis
        after = torch.linalg.solve_triangular(factor, basis, upper=False).square().sum(0)
    return image
