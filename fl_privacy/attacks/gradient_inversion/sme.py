"""Many local steps at the price of one: the gradient at a model between the one sent and the one that came back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Progress, Report, no_progress, timely
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.grouping import Group, attack_in_groups, failed
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, PreparedVictim, prepare
from fl_privacy.attacks.gradient_inversion.settings import DType, Settings
from fl_privacy.checks import number, one_of, whole
from fl_privacy.gradients import VictimLoss, differentiable_twice
from fl_privacy.modality import modality_of
from fl_privacy.rng import cpu_threads, derive_generator
from fl_privacy.types import Batch, Observation, Reconstruction, Tensors

_STD = 0.25
"""Of pixels, in units of which the images are moved."""

_SPREAD = 0.2
"""Of the pixels around gray that a descent starts from."""

_DROPS = (3 / 8, 5 / 8, 7 / 8)
"""Shares of the iterations after which the learning rate is a tenth."""


@dataclass(frozen=True, kw_only=True)
class SurrogateModel:
    """Match an update of many local steps by one gradient of all the client's images, at a model on the way.

    The way from the weights sent, w, to those that came back, w + u, points along the mean gradient of the client's
    images at some model w + a u between the two. Images and a are found together, by signed Adam on the angle between
    that gradient and the update with total variation on the images (Zhu et al. 2023, "Surrogate model extension").
    An iteration costs one pass over the images, however many steps the client took, and no order of them is assumed.
    Behind Adam, which divides gradients by their own size, signs count more than sizes: each gradient value is divided
    by its size plus the root mean square of its tensor before it is compared.

    Attributes:
        iterations: of the descent.
        lr: its first learning rate, in standard deviations of a pixel, 0.25.
        total_variation: weight beside the angle, which is between 0 and 2.
        between: first value of a, in [0, 1]: 0 is the model sent, 1 the one that came back.
        between_lr: learning rate of a; 0 leaves it as it is.
        dtype: of the computation.
        device: of the computation; that of the values sent if ``None``.
    """

    iterations: int = 1000
    lr: float = 0.1
    total_variation: float = 0.01
    between: float = 0.5
    between_lr: float = 0.001
    dtype: DType = "float32"
    device: str | None = None

    def __post_init__(self) -> None:
        whole("attack.iterations", self.iterations, at_least=1, example=1000)
        number("attack.lr", self.lr, above=0, example=0.1)
        number("attack.total_variation", self.total_variation, at_least=0, example=0.01)
        number("attack.between", self.between, at_least=0, at_most=1, example=0.5)
        number("attack.between_lr", self.between_lr, at_least=0, example=0.001)
        one_of("attack.dtype", self.dtype, ("float32", "float64"))

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """Attack all ``observations``; see :class:`fl_privacy.attacks.ReconstructionAttack`."""

        def attack(group: Group, report: Report) -> dict[int, Reconstruction]:
            return self.solve(group, seed, report)

        return attack_in_groups(observations, attack, progress=progress)

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        """Attack the victims of a ``group``, one after the other, each at a model of its own.

        Returns:
            What was found, by position.

        Raises:
            NotAttackableError: the update is a gradient, or not of images.
        """
        first = group.first
        if not modality_of(first.model).pixels:
            raise NotAttackableError("Images are expected behind the local steps, but got texts or rows.")
        if first.knowledge.bounds is not None:
            raise NotAttackableError(
                "Several local steps are expected, but the client took one of Adam; use attack=auto."
            )
        if first.plan.shares == "gradient":
            raise NotAttackableError(
                "The change of the weights by local steps is expected, but a gradient was shared; use attack=auto."
            )
        with cpu_threads(1):
            prepared = prepare(self._settings, Group(group.observations), seed)
        results = {p: failed(group.observations[p], why) for p, why in prepared.failures.items()}
        for place, victim in enumerate(prepared.victims):

            def meter(share: float, place: int = place) -> None:
                report((place + share) / len(prepared.victims))

            results[victim.position] = self._reconstruct(prepared, victim, seed, meter)
        return results

    @property
    def _settings(self) -> Settings:
        return Settings(
            objective=Cosine(), local_steps="first_order", compile="off", dtype=self.dtype, device=self.device
        )

    def _reconstruct(self, prepared: Prepared, victim: PreparedVictim, seed: int, report: Report) -> Reconstruction:
        model = _Between.of(prepared, victim.observation)
        rng = derive_generator(seed, "sme", str(victim.observation.id))
        start = _SPREAD / _STD * (torch.rand(prepared.shape, generator=rng) - 0.5)
        images = start.to(model.sent[model.names[0]]).requires_grad_()
        between = torch.tensor(self.between).to(images).requires_grad_()
        assert victim.labels is not None
        groups: list[dict[str, Any]] = [{"params": [images]}, {"params": [between], "lr": self.between_lr}]
        optimizer = torch.optim.Adam(groups, lr=self.lr)
        history = list[float]()
        for step in timely(range(self.iterations)):
            drops = sum(step >= share * self.iterations for share in _DROPS)
            optimizer.param_groups[0]["lr"] = self.lr * 0.1**drops
            with differentiable_twice():
                angle = model.angle(0.5 + _STD * images, victim.labels, between)
                loss = angle + self.total_variation * _roughness(0.5 + _STD * images)
                slopes = torch.autograd.grad(loss, [images, between])
            images.grad, between.grad = slopes[0].nan_to_num(0.0).sign(), slopes[1].nan_to_num(0.0)
            optimizer.step()
            with torch.no_grad():
                images.clamp_(-0.5 / _STD, 0.5 / _STD)
                between.clamp_(0, 1)
            history.append(float(angle.detach()))
            report((step + 1) / self.iterations)
        found = Batch((0.5 + _STD * images.detach()).clamp(0, 1).float().cpu(), victim.labels.cpu())
        share = float(between.detach())
        at = f"It matches the gradient at {share:.2f} of the way from the model sent to the one that came back."
        return Reconstruction(
            id=victim.observation.id,
            batch=found if math.isfinite(history[-1]) else None,
            failure=None if math.isfinite(history[-1]) else "The gradient is not finite; check the update.",
            loss=history[-1],
            history=tuple(history),
            label_source=victim.label_source,
            notes=(at,),
        )


@dataclass(frozen=True, eq=False)
class _Between:
    """The models between two, and how far their gradients are from the way between them.

    Attributes:
        loss: of the client's images at any parameters.
        sent: values (*shape) by name.
        way: what the client added to them.
        signed: whether signs count more than sizes.
    """

    loss: VictimLoss
    sent: Tensors
    way: Tensors
    signed: bool

    @classmethod
    def of(cls, prepared: Prepared, observation: Observation) -> "_Between":
        """Build the models between that of ``observation`` and its update."""
        victim_model = prepared.rounds[0].victim_model
        like = next(prepared.observer.parameters())
        update, sent = observation.update(), observation.sent.parameters
        names = list(victim_model.names)
        return cls(
            loss=VictimLoss(victim_model),
            sent={name: sent[name].to(like) for name in names},
            way={name: update[name].to(like) for name in names},
            signed=observation.plan.optimizer != "sgd",
        )

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self.sent)

    def angle(self, images: Tensor, labels: Tensor, between: Tensor) -> Tensor:
        """Return 1 - cosine of the way and the downward gradient of ``images`` (B, C, H, W) at a share of the way."""
        at = {name: self.sent[name] + between * self.way[name] for name in self.names}
        gradients = torch.autograd.grad(self.loss(at, images, labels), list(at.values()), create_graph=True)
        dot = squared = observed = images.new_zeros(())
        for name, gradient in zip(self.names, gradients, strict=True):
            step = -gradient
            if self.signed:
                step = step / (step.abs() + step.square().mean().sqrt().detach() + torch.finfo(step.dtype).tiny)
            dot = dot + (step * self.way[name]).sum()
            squared, observed = squared + step.square().sum(), observed + self.way[name].square().sum()
        return 1 - dot / (squared * observed).clamp_min(torch.finfo(dot.dtype).tiny).sqrt()


def _roughness(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighboring pixels of images (B, C, H, W), of both directions together."""
    down, right = images.diff(dim=-2), images.diff(dim=-1)
    return down.abs().mean() + right.abs().mean()
