"""DM: condensed images whose features have the mean of the real ones."""

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses.condensation.augmentation import siamese_by_class, unaugmented
from fl_privacy.defenses.condensation.classes import Classes, Start, exchanging, of_each_present
from fl_privacy.defenses.condensation.network import CondensationNet, fresh_network
from fl_privacy.defenses.defense import Defense, LocalData
from fl_privacy.effects import OtherImages, Part
from fl_privacy.progress import counted
from fl_privacy.types import Batch


def dm(
    *,
    images_per_class: int = 10,
    iterations: int = 15,
    lr: float = 1.0,
    real_batch: int = 32,
    width: int = 32,
    augment: bool = True,
    start: Start = "real",
) -> Defense:
    """Train on condensed images made by distribution matching (Zhao and Bilen 2023), once on each client.

    In every iteration a fresh random network looks at real and condensed images of each class; the condensed ones move
    towards the mean of the real ones' features. The paper takes 20,000 iterations, 256 real images a class and a width
    of 128; the defaults are for CPUs.

    The published images start as real ones of the client, to which few iterations leave them close: nothing but
    distance hides these. What is read of one counts as an attempt at the client's nearest own image of its class.

    Args:
        images_per_class: for each class that the client holds.
        iterations: networks.
        lr: of the images, normalized to a deviation of 0.25, by SGD with momentum 0.5.
        real_batch: real images a class in each iteration.
        width: of the networks.
        augment: siamese augmentation of both, drawn for each class.
        start: of the condensed images: ``real`` ones of the client, as published, or ``noise``.
    """
    settings = dict(locals())
    for name, value in (("images_per_class", images_per_class), ("real_batch", real_batch), ("width", width)):
        checks.whole(f"defense.{name}", value, at_least=1, example=50)
    checks.whole("defense.iterations", iterations, at_least=0, example=200)
    checks.number("defense.lr", lr, above=0, example=1.0)
    checks.one_of("defense.augment", augment, (True, False))
    checks.one_of("defense.start", start, ("noise", "real"))

    def make(batch: Batch, data: LocalData) -> Batch:
        classes, rng = Classes.of(batch), data.rng
        images = classes.start(images_per_class, start, rng).requires_grad_()
        optimizer = torch.optim.SGD([images], lr=lr, momentum=0.5)
        for _ in counted("condensing images", range(iterations)):
            network = fresh_network(CondensationNet, images, data.num_classes, rng, width=width).requires_grad_(False)
            change = siamese_by_class(len(images), rng) if augment else unaugmented
            real, made = change(classes.draw(real_batch, rng)), change(images)
            with torch.no_grad():
                wanted = mean_features(network, real)
            found = mean_features(network, made)
            (images.grad,) = torch.autograd.grad((found - wanted).square().sum(), images)
            optimizer.step()
        return classes.finished(images)

    effect = OtherImages()
    return exchanging(Part("dm", settings, effect), make, outcome=of_each_present(images_per_class))


def mean_features(network: CondensationNet, images: Tensor) -> Tensor:
    """(P, D) of the images (P, I, C, H, W) of each class."""
    features = network.embed(images.flatten(0, 1))
    return features.reshape(*images.shape[:2], -1).mean(1)
