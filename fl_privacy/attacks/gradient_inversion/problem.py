"""What is minimized: the attack's objective for V victims, and its gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive.assumed_transform import Disguise
from fl_privacy.attacks.adaptive.clip import Clips
from fl_privacy.attacks.gradient_inversion.objectives import Objective
from fl_privacy.attacks.gradient_inversion.priors import Guess, Prior, TotalVariation, batch_statistics
from fl_privacy.attacks.gradient_inversion.space import Projection, Space, project
from fl_privacy.attacks.gradient_inversion.statistics import Explicit, LayerStatistics, Products, Target
from fl_privacy.gradients import Layered, VictimGradients, differentiable_twice
from fl_privacy.gradients.low_rank import Factors
from fl_privacy.types import Tensors


@dataclass(frozen=True, eq=False)
class _Zero:
    """Statistics of a gradient that is zero everywhere."""

    target: Target

    @property
    def squared(self) -> Tensor:
        return torch.zeros_like(self.target.squared)

    def apart(self, scale: Tensor, observed_scale: Tensor) -> Tensor:
        return observed_scale.square() * self.target.squared

    @property
    def distance(self) -> Tensor:
        return self.target.squared

    @property
    def absolute(self) -> Tensor:
        return self.target.value.abs().sum(1)


_roughness = TotalVariation(weight=1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The objective as a function of the variables (V, N).

    Variables are the pixels, then label logits where labels are optimized, then what a private loss sends back into the
    features in each round, where there is one.

    Attributes:
        gradients: of the victims' losses.
        objective: distance to the observed gradients.
        priors: on images.
        space: of the pixels.
        shape: (B, C, H, W) of one victim.
        num_classes: K.
        targets: observed tensors.
        factors: of the observed tensors whose gradients are not formed; with them ``gradients`` is :class:`Layered`.
        labels: (V, B) or (V, B, K), or ``None`` where they are optimized.
        observer: the model in evaluation mode, with its running statistics.
        attempts: so many neighboring victims are attempts at the same one.
        clip: what the client did to its gradient, done to the guessed one too.
        disguise: what the client did to its images, done to the guessed ones too. Priors of natural images look at the
            guess without it, those of what the model is used to at the guess with it.
        smoothness: (V,) weight of the images' total variation, beside the priors.
        secret_features: F, how many features a private loss sends gradients into; 0 where there is none. With them
            ``gradients`` is :class:`Layered`.
        secret_unit: of these gradients.
        others: the same victims in other rounds, whose objectives are added.
    """

    gradients: VictimGradients
    objective: Objective
    priors: Sequence[Prior]
    space: Space
    shape: tuple[int, ...]
    num_classes: int
    targets: Mapping[str, Target]
    factors: Mapping[str, Factors]
    labels: Tensor | None
    observer: nn.Module
    attempts: int
    clip: Clips | None = None
    disguise: Disguise | None = None
    smoothness: Tensor | None = None
    secret_features: int = 0
    secret_unit: float = 1.0
    others: Sequence["Problem"] = ()

    @property
    def pixels(self) -> int:
        """How many of the variables are pixels."""
        return int(torch.Size(self.shape).numel())

    def images(self, variables: Tensor) -> Tensor:
        """(V, B, C, H, W)."""
        return self.space.to_images(variables[:, : self.pixels].reshape(-1, *self.shape))

    def guessed_labels(self, variables: Tensor) -> Tensor:
        """Labels (V, B) or probabilities (V, B, K)."""
        if self.labels is not None:
            return self.labels
        logits = variables[:, self.pixels : self._known]
        return logits.reshape(-1, self.shape[0], self.num_classes).softmax(-1)

    def secrets(self, variables: Tensor) -> Sequence[Tensor | None]:
        """What a private loss sends back into the features, (V, B, F) for each round; ``None`` where there is none."""
        if not self.secret_features:
            return [None] * (1 + len(self.others))
        rounds = (1 + len(self.others), self.shape[0], self.secret_features)
        return (self.secret_unit * variables[:, self._known :].reshape(-1, *rounds)).unbind(1)

    @property
    def _known(self) -> int:
        """Number of the first variable that is neither pixel nor label."""
        return self.pixels + (self.shape[0] * self.num_classes if self.labels is None else 0)

    def loss(self, variables: Tensor) -> Tensor:
        """(V,)."""
        images = self.images(variables)
        seen = self.disguise(images) if self.disguise else images
        loss = self.mismatch(seen, self.guessed_labels(variables), self.secrets(variables))
        guess = Guess(images, self.attempts, lambda: batch_statistics(self.observer, seen))
        for prior in self.priors:
            loss = loss + prior(guess)
        return loss if self.smoothness is None else loss + self.smoothness * _roughness(guess)

    def mismatch(self, images: Tensor, labels: Tensor, secrets: Sequence[Tensor | None]) -> Tensor:
        """The objective (V,), added up over the rounds, of images as the model is to see them."""
        rounds = zip([self, *self.others], secrets, strict=True)
        return torch.stack([r.objective(r._statistics(images, labels, secret)) for r, secret in rounds]).sum(0)

    def _statistics(self, images: Tensor, labels: Tensor, secret: Tensor | None) -> dict[str, LayerStatistics]:
        if not self.factors:
            gradients = self._gradients(images, labels, secret)
            gradients = self.clip(gradients) if self.clip else gradients
            return {name: Explicit(gradients[name], target) for name, target in self.targets.items()}
        assert isinstance(self.gradients, Layered)
        gradients, products = self.gradients.gradients_and_products(images, labels, self.factors.keys(), secret)
        return {
            name: Products(*products[name], self.factors[name], target)
            if name in self.factors
            else Explicit(gradients[name], target)
            for name, target in self.targets.items()
        }

    def _gradients(self, images: Tensor, labels: Tensor, secret: Tensor | None) -> Tensors:
        if secret is None:
            return self.gradients(images, labels)
        assert isinstance(self.gradients, Layered)
        return self.gradients(images, labels, secret)

    def zero_loss(self) -> Tensor:
        """The objective (V,) of a gradient that is zero everywhere: what the other losses are measured by."""
        return torch.stack(
            [r.objective({name: _Zero(target) for name, target in r.targets.items()}) for r in (self, *self.others)]
        ).sum(0)

    def evaluate(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (V,) and gradient (V, N)."""
        with differentiable_twice():
            leaf = variables.detach().requires_grad_()
            loss = self.loss(leaf)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), gradient

    def projected(self, variables: Tensor, how: Projection) -> Tensor:
        """The variables with their images brought to [0, 1]."""
        pixels = self.space.to_variables(project(self.images(variables), how)).flatten(1)
        return torch.cat([pixels, variables[:, self.pixels :]], 1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        """With every tensor changed whose rows are victims."""
        return replace(
            self,
            targets={name: target.map(change) for name, target in self.targets.items()},
            factors={name: factors.map(change) for name, factors in self.factors.items()},
            labels=None if self.labels is None else change(self.labels),
            clip=None if self.clip is None else self.clip.map(change),
            disguise=None if self.disguise is None else self.disguise.map(change),
            smoothness=None if self.smoothness is None else change(self.smoothness),
            others=[other.map(change) for other in self.others],
        )

    def select(self, rows: Tensor) -> "Problem":
        """Of the victims ``rows``."""
        return self.map(lambda values: values[rows])
