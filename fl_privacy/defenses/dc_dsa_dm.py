"""DC, DSA and DM: training on condensed images whose gradients or features match those of real images."""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fl_privacy import checks
from fl_privacy.defenses.defense import Defense, LocalData
from fl_privacy.effects import OtherImages, Part
from fl_privacy.files import computed_once
from fl_privacy.measure.matching import hard_labels
from fl_privacy.models import build_model
from fl_privacy.models.layers import require_pixels
from fl_privacy.progress import counted
from fl_privacy.types import Batch, Tensors

MIDDLE, SPREAD = 0.5, 0.25  # condensed images are optimized normalized: pixels minus 0.5, over 0.25


Start = Literal["noise", "real"]
"""Initial condensed images: normal noise around 0.5, or real images of the client."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Examples of one client, grouped by class."""

    images: Tensor  # (N, C, H, W) normalized
    present: Tensor  # (P,) classes of the client
    first: Tensor  # (P,) place of each class's first example in ``order``
    counts: Tensor  # (P,) examples of each class
    order: Tensor  # (N,) examples sorted by class

    @classmethod
    def of(cls, batch: Batch) -> "Classes":
        labels = hard_labels(batch.labels)
        present, counts = torch.unique(labels, return_counts=True)
        first = counts.cumsum(0) - counts
        return cls((batch.inputs - MIDDLE) / SPREAD, present, first, counts, labels.argsort(stable=True))

    def draw(self, number: int, rng: torch.Generator) -> Tensor:
        chance = torch.rand(len(self.present), number, generator=rng, device=rng.device).to(self.images.device)
        return self.images[self.order[self.first.unsqueeze(1) + (chance * self.counts.unsqueeze(1)).long()]]

    def start(self, number: int, how: Start, rng: torch.Generator) -> Tensor:
        if how == "real":
            return self.draw(number, rng)
        shape = (len(self.present), number, *self.images.shape[1:])
        return torch.randn(shape, generator=rng, device=rng.device).to(self.images)

    def finished(self, images: Tensor) -> Batch:
        """Convert I images (P, I, C, H, W) of each of P classes, normalized, to a batch in [0, 1] with 256 levels."""
        pixels = (MIDDLE + SPREAD * images.detach()).clamp(0, 1)
        return Batch((pixels.flatten(0, 1) * 255).round() / 255, self.present.repeat_interleave(images.shape[1]))


Make = Callable[[Batch, LocalData], Batch]  # function from a client's examples to their substitutes


def exchanging(part: Part, make: Make, *, images_per_class: int, every_class: bool = False) -> Defense:
    """Build a defense that trains on synthetic images in place of the client's examples.

    ``part``: description of the defense. ``make``: function (client's Batch, LocalData) -> synthetic Batch, called once
    for a client. ``images_per_class``: images of each of the client's classes or, if ``every_class``, of all classes.
    """
    images, labels = f"{part.name}/images", f"{part.name}/labels"

    def hook(batch: Batch, data: LocalData) -> Batch:
        kept, device = data.state.tensors, batch.inputs.device
        if images not in kept:

            def compute() -> bytes:
                made = make(batch, data)
                pixels = (made.inputs * 255).round().to(torch.uint8)
                return save({images: pixels, labels: made.labels, "rng": data.rng.get_state()})

            tensors = batch.inputs, batch.labels, data.rng.get_state()
            given = [(str(t.dtype), t.shape, hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest()) for t in tensors]
            key = [part.name, part.settings, data.num_classes, given, str(device), torch.get_num_threads()]
            started = time.perf_counter()
            content, seconds = computed_once(json.dumps(key, default=str).encode(), compute)
            data.spared.append(max(0.0, seconds - (time.perf_counter() - started)))
            found = load(content)
            data.rng.set_state(found.pop("rng"))  # as if drawn here
            kept.update(found)
        return Batch(kept[images].to(device).to(batch.inputs.dtype) / 255, kept[labels].to(device))

    def outcome(labels: Tensor, num_classes: int) -> Tensor:
        classes: Tensor = torch.arange(num_classes) if every_class else torch.unique(labels)
        return classes.repeat_interleave(images_per_class)

    return Defense(parts=(part,), examples=(hook,), outcome=(outcome,))


Augmentation = Callable[[Tensor], Tensor]  # (..., C, H, W) -> the same, differentiable


def siamese(rng: torch.Generator) -> Augmentation:
    """Return a random augmentation: color, crop, cutout, flip, scale or rotation (Zhao and Bilen 2021)."""
    kinds = ("color", "crop", "cutout", "flip", "scale", "rotation")
    kind = kinds[int(torch.randint(len(kinds), (1,), generator=rng, device=rng.device))]
    draws = torch.rand(3, generator=rng, device=rng.device)
    return lambda images: _augmented(images, kind, draws)


def siamese_by_class(classes: int, rng: torch.Generator) -> Augmentation:
    """Return a random augmentation of images (P, ...): a different one for each of P ``classes``."""
    changes = [siamese(rng) for _ in range(classes)]
    return lambda images: torch.stack([change(of_class) for change, of_class in zip(changes, images, strict=True)])


def _augmented(images: Tensor, kind: str, draws: Tensor) -> Tensor:
    first, second, third = draws.tolist()
    height, width = images.shape[-2:]
    if kind == "color":  # brightness, saturation, contrast
        images = images + (first - 0.5)
        grey = images.mean(-3, keepdim=True)
        images = grey + (images - grey) * (2 * second)
        middle = images.mean((-3, -2, -1), keepdim=True)
        return cast(Tensor, middle + (images - middle) * (third + 0.5))
    if kind == "crop":
        reach_y, reach_x = round(height / 8), round(width / 8)
        top, left = int(draws[0] * (2 * reach_y + 1)), int(draws[1] * (2 * reach_x + 1))
        return F.pad(images, (reach_x, reach_x, reach_y, reach_y))[..., top : top + height, left : left + width]
    if kind == "cutout":
        top, left = int(draws[0] * (height // 2 + 1)), int(draws[1] * (width // 2 + 1))
        mask = torch.ones(height, width, device=images.device)
        mask[top : top + height // 2, left : left + width // 2] = 0
        return images * mask
    if kind == "flip":
        return images.flip(-1) if first < 0.5 else images
    if kind == "scale":
        matrix = [[1.2 ** (2 * first - 1), 0.0, 0.0], [0.0, 1.2 ** (2 * second - 1), 0.0]]
    else:
        angle = math.radians(15 * (2 * first - 1))
        cosine, sine = math.cos(angle), math.sin(angle)
        matrix = [[cosine, -sine, 0.0], [sine, cosine, 0.0]]
    flat = images.reshape(-1, *images.shape[-3:])
    grid = F.affine_grid(flat.new_tensor(matrix).expand(len(flat), 2, 3), list(flat.shape), align_corners=False)
    return F.grid_sample(flat, grid, align_corners=False).reshape(images.shape)


Network = TypeVar("Network", bound=nn.Module)
_BLOCKS = 3


class InstanceNorm(nn.Module):
    """Instance normalization that can be differentiated twice under ``vmap``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        centered = inputs - inputs.mean((-2, -1), keepdim=True)
        scale = (centered.square().mean((-2, -1), keepdim=True) + 1e-5).rsqrt()
        return centered * scale * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class CondensationNet(nn.Module):
    """Three blocks of convolution, instance norm, ReLU and average pooling, then a linear layer (Zhao et al. 2021)."""

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, width: int) -> None:
        super().__init__()
        require_pixels("Condensation", image_size, least=2**_BLOCKS)
        side = image_size // 2**_BLOCKS
        layers: list[nn.Module] = []
        for channels in (in_channels, *[width] * (_BLOCKS - 1)):
            layers += [nn.Conv2d(channels, width, 3, padding=1), InstanceNorm(width), nn.ReLU(), nn.AvgPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * side * side, num_classes)

    def embed(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.features(inputs).flatten(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.embed(inputs)))


def fresh_network(
    kind: type[Network], images: Tensor, num_classes: int, rng: torch.Generator, **options: int
) -> Network:
    """Build a network of the class ``kind`` for images (..., C, H, W), initialized from ``rng``."""
    seed, (channels, size, _) = int(torch.randint(2**62, (1,), generator=rng, device=rng.device)), images.shape[-3:]
    network = build_model(kind, seed=seed, in_channels=channels, image_size=size, num_classes=num_classes, **options)
    assert isinstance(network, kind)
    return network.to(images.device)


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
    """Train on condensed images, made once on each client by gradient matching (DC, Zhao et al. 2021).

    Condensed images are optimized until their gradients have the direction of the real images' gradients, class by
    class, for networks trained on the condensed images. The paper takes 1,000 networks, 256 real images a class, a
    width of 128 and, for 50 images a class, 50 outer and 10 inner steps; the defaults are for CPUs. Few updates leave
    images close to their start. A reconstruction is compared with the client's nearest image of its class.

    Args:
        images_per_class: condensed images of each class that the client has.
        networks: number of fresh networks.
        outer_steps: updates of the images per network.
        inner_steps: updates of the network after each update of the images.
        lr: learning rate of SGD with momentum 0.5 for the images, whose pixels x are scaled to (x - 0.5) / 0.25.
        real_batch: real images per class at each update.
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
    """Train like :func:`dc`, with one random augmentation per class and step (DSA, Zhao and Bilen 2021)."""
    return _matching("dsa", _Plan(**locals(), augment=True))


def gradient_distance(found: Tensors, wanted: Tensors) -> Tensor:
    """Return the distance of two gradients of P classes, given by name as tensors (P, O, ...): a sum of 1 - cosine.

    The sum is over classes, weights and their O outputs; bias gradients do not count.
    """
    pairs = [(gradient.flatten(2), wanted[name].flatten(2)) for name, gradient in found.items() if gradient.dim() > 2]
    return torch.stack([(1 - F.cosine_similarity(one, other, dim=2)).sum() for one, other in pairs]).sum()


def class_gradients(network: CondensationNet, images: Tensor, labels: Tensor) -> Tensors:
    """Return the gradients (P, *shape) of P classes' mean loss; each has I ``images`` (P, I, C, H, W), and a label."""
    parameters = dict(network.named_parameters())

    def loss(values: Tensors, inputs: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, dict(values), (inputs,)), label.expand(len(inputs)))

    return cast(Tensors, vmap(grad(loss), in_dims=(None, 0, 0))(parameters, images, labels))


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
    """Train on condensed images, made once on each client by distribution matching (DM, Zhao and Bilen 2023).

    In every iteration, with a fresh random network, the mean features of the condensed images of a class move towards
    those of its real images. The paper takes 20,000 iterations, 256 real images a class and a width of 128; the
    defaults are for CPUs. Few iterations leave condensed images close to their start. A reconstruction is compared with
    the client's nearest own image of its class.

    Args:
        images_per_class: condensed images of each class that the client has.
        iterations: number of iterations, each with a fresh network.
        lr: learning rate of SGD with momentum 0.5 for the images, whose pixels x are scaled to (x - 0.5) / 0.25.
        real_batch: real images per class in each iteration.
        width: channels of the networks.
        augment: ``True`` augments real and condensed images, with one draw per class.
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
    """Return the D mean features (P, D) of I images of each of P classes, (P, I, C, H, W)."""
    return network.embed(images.flatten(0, 1)).reshape(*images.shape[:2], -1).mean(1)
