"""DC, DSA and DM: training on condensed images, made by matching gradients or mean features."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fl_privacy import checks
from fl_privacy.defenses.condensation import (
    Augmentation,
    Classes,
    CondensationNet,
    Start,
    exchanging,
    fresh_network,
    siamese_by_class,
)
from fl_privacy.defenses.defense import Defense, LocalData
from fl_privacy.effects import OtherImages, Part
from fl_privacy.progress import counted
from fl_privacy.types import Batch, Tensors


def dc(
    *,
    images_per_class: int = 10,
    networks: int = 1,
    outer_steps: int = 3,
    inner_steps: int = 5,
    lr: float = 0.1,
    real_batch: int = 16,
    width: int = 32,
    start: Start = "noise",
) -> Defense:
    """Train on condensed images made by gradient matching (Zhao et al. 2021), once on each client.

    While a fresh network is trained on them, condensed images move to match the direction of each class's real
    gradient. The paper takes 1,000 networks, for 50 images a class 50 outer and 10 inner steps, 256 real images a class
    and a width of 128; the defaults are for CPUs. Few updates leave images close to real ones they start from. A
    reconstruction is compared with the client's nearest own image of its class.

    Args:
        images_per_class: condensed images of each class that the client has.
        networks: number of fresh networks.
        outer_steps: updates of the images along the training of one network.
        inner_steps: updates of the network after each.
        lr: learning rate of the images, normalized to a deviation of 0.25, by SGD with momentum 0.5.
        real_batch: real images a class at each update.
        width: channels of the networks.
        start: initial images: ``noise``, as published, or ``real`` ones of the client.
    """
    return _matching("dc", _Plan(**locals(), augment=False))


def dsa(
    *,
    images_per_class: int = 10,
    networks: int = 1,
    outer_steps: int = 3,
    inner_steps: int = 5,
    lr: float = 0.1,
    real_batch: int = 16,
    width: int = 32,
    start: Start = "real",
) -> Defense:
    """Condense like ``dc``, with differentiable siamese augmentation of all images (Zhao and Bilen 2021).

    The authors start from real images; ``start="noise"`` hides these better. Each class shares one augmentation per
    step.
    """
    return _matching("dsa", _Plan(**locals(), augment=True))


def gradient_distance(found: Tensors, wanted: Tensors) -> Tensor:
    """Sum one minus the cosine over classes (P, O, ...), weights and output units, without biases and norms."""
    pairs = [(gradient.flatten(2), wanted[name].flatten(2)) for name, gradient in found.items() if gradient.dim() > 2]
    return torch.stack([(1 - F.cosine_similarity(one, other, dim=2)).sum() for one, other in pairs]).sum()


def class_gradients(network: CondensationNet, images: Tensor, labels: Tensor) -> Tensors:
    """Compute gradients (P, *shape) of the mean loss of each class's images (P, I, C, H, W), labels (P,)."""
    parameters = dict(network.named_parameters())

    def loss(values: Tensors, inputs: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, dict(values), (inputs,)), label.expand(len(inputs)))

    gradients: Tensors = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, images, labels)
    return gradients


@dataclass(frozen=True, kw_only=True)
class _Plan:
    images_per_class: int
    networks: int
    outer_steps: int
    inner_steps: int
    lr: float
    real_batch: int
    width: int
    start: Start
    augment: bool

    def __post_init__(self) -> None:
        checks.whole("defense.networks", self.networks, at_least=0, example=2)
        checks.number("defense.lr", self.lr, above=0, example=0.1)
        checks.one_of("defense.start", self.start, ("noise", "real"))
        for name in ("images_per_class", "outer_steps", "inner_steps", "real_batch", "width"):
            checks.whole(f"defense.{name}", getattr(self, name), at_least=1, example=10)


def _matching(name: str, plan: _Plan) -> Defense:
    def make(batch: Batch, data: LocalData) -> Batch:
        classes, rng = Classes.of(batch), data.rng
        images = classes.start(plan.images_per_class, plan.start, rng).requires_grad_()
        optimizer = torch.optim.SGD([images], lr=plan.lr, momentum=0.5)

        def draw() -> Augmentation:
            return siamese_by_class(len(images), rng) if plan.augment else lambda images: images

        for _ in counted("network", range(plan.networks)):
            network = fresh_network(CondensationNet, images, data.num_classes, rng, width=plan.width)
            for step in counted("condensing images", range(plan.outer_steps)):
                change = draw()
                wanted = class_gradients(network, change(classes.draw(plan.real_batch, rng)), classes.present)
                found = class_gradients(network, change(images), classes.present)
                distance = gradient_distance(found, {key: value.detach() for key, value in wanted.items()})
                (images.grad,) = torch.autograd.grad(distance, images)
                optimizer.step()
                if step + 1 < plan.outer_steps:
                    _train(network, images.detach(), classes.present, plan.inner_steps, draw)
        return classes.finished(images)

    settings = {key: value for key, value in asdict(plan).items() if key != "augment"}
    return exchanging(Part(name, settings, OtherImages()), make, images_per_class=plan.images_per_class)


def _train(
    network: CondensationNet, images: Tensor, present: Tensor, steps: int, draw: Callable[[], Augmentation]
) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.5, weight_decay=5e-4)
    labels = present.repeat_interleave(images.shape[1])
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(network(draw()(images).flatten(0, 1)), labels))
        optimizer.step()


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

    In every iteration, with a fresh random network, they move towards the mean features of the real images of their
    class. The paper takes 20,000 iterations, 256 real images a class and a width of 128; the defaults are for CPUs. The
    published images start as real ones, to which few iterations leave them close. A reconstruction is compared with the
    client's nearest own image of its class.

    Args:
        images_per_class: condensed images of each class that the client has.
        iterations: number of networks.
        lr: learning rate of the images, normalized to a deviation of 0.25, by SGD with momentum 0.5.
        real_batch: real images a class in each iteration.
        width: channels of the networks.
        augment: ``True`` augments both, with one draw per class.
        start: initial images: ``real`` ones of the client, as published, or ``noise``.
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
            real, made = classes.draw(real_batch, rng), images
            if augment:
                change = siamese_by_class(len(images), rng)
                real, made = change(real), change(made)
            with torch.no_grad():
                wanted = mean_features(network, real)
            (images.grad,) = torch.autograd.grad((mean_features(network, made) - wanted).square().sum(), images)
            optimizer.step()
        return classes.finished(images)

    return exchanging(Part("dm", settings, OtherImages()), make, images_per_class=images_per_class)


def mean_features(network: CondensationNet, images: Tensor) -> Tensor:
    """Return mean features (P, D) of the images (P, I, C, H, W) of each class."""
    return network.embed(images.flatten(0, 1)).reshape(*images.shape[:2], -1).mean(1)
