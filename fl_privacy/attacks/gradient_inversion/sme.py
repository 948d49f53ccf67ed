"""Surrogate model extension: match many local steps by one gradient at an intermediate model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from fl_privacy.attacks.attack import Report, part_of, seconds_left, timely, within
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, failed
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, PreparedVictim, prepare
from fl_privacy.attacks.gradient_inversion.settings import DType, Settings, expect_choices
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.checks import number, whole
from fl_privacy.errors import is_out_of_memory
from fl_privacy.models.gradients import VictimLoss, differentiable_twice
from fl_privacy.rng import cpu_threads, derive_generator
from fl_privacy.types import Batch, Reconstruction, Tensors
from fl_privacy.types.modality import modality_of

_STD, _SPREAD = 0.25, 0.2
"""Standard deviation of pixels, the unit of steps, and width of the range around gray from which the search starts."""

_TOGETHER, _VALUES = 16, 16_000_000  # most victims at once, and most values of their models together


@dataclass(frozen=True, kw_only=True)
class SurrogateModel(GroupAttack):
    """Attack that matches an update of many local steps by one gradient at an intermediate model.

    The update u of the weights w points along the images' mean gradient at some model w + a u. Signed Adam finds images
    and a together, from the angle between that gradient and the update plus total variation (Zhu et al. 2023,
    "Surrogate model extension").
    """

    iterations: int = 1000
    lr: float = 0.1  # first learning rate, in standard deviations of a pixel, 0.25
    total_variation: float = 0.01  # weight relative to the angle, which is in [0, 2]
    between: float = 0.5  # first value of a, in [0, 1]: 0 is the sent, 1 the returned model
    between_lr: float = 0.001  # learning rate of a; 0 keeps it fixed
    dtype: DType = "float32"
    device: str | None = None

    def __post_init__(self) -> None:
        whole("attack.iterations", self.iterations, at_least=1, example=1000)
        number("attack.lr", self.lr, above=0, example=0.1)
        number("attack.total_variation", self.total_variation, at_least=0, example=0.01)
        number("attack.between", self.between, at_least=0, at_most=1, example=0.5)
        number("attack.between_lr", self.between_lr, at_least=0, example=0.001)
        expect_choices(self)

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        if not modality_of(first.model).pixels:
            raise NotAttackableError("Images are expected, but got texts or rows; use attack=auto.")
        if first.knowledge.bounds is not None:
            raise NotAttackableError("Several local steps are expected, but got one of Adam; use attack=auto.")
        if first.plan.shares == "gradient":
            raise NotAttackableError("Weights after local steps are expected, but got a gradient; use attack=auto.")
        with cpu_threads(1):
            settings = Settings(objective=Cosine(), local_steps="first_order", compile="off")
            settings = replace(settings, dtype=self.dtype, device=self.device)
            prepared = prepare(settings, Group(group.observations), seed)
        results = {p: failed(group.observations[p], why) for p, why in prepared.failures.items()}
        size = max(1, _VALUES // sum(value.numel() for value in first.sent.parameters.values()))
        victims, size = prepared.victims, min(size, _TOGETHER)
        for done in range(0, len(victims), size):
            chunk = victims[done : done + size]
            shown = part_of(report, done / len(victims), (done + len(chunk)) / len(victims))
            with within(seconds_left() * len(chunk) / (len(victims) - done)):
                found = self._reconstruct(prepared, chunk, seed, shown)
            results |= dict(zip((victim.position for victim in chunk), found, strict=True))
        return results

    def _reconstruct(
        self, prepared: Prepared, victims: Sequence[PreparedVictim], seed: int, report: Report
    ) -> list[Reconstruction]:
        models = _Between.of(prepared, victims)
        streams = [derive_generator(seed, "sme", str(victim.observation.id)) for victim in victims]
        starts = torch.stack([torch.rand(prepared.shape, generator=rng) for rng in streams])
        images = (_SPREAD / _STD * (starts - 0.5)).to(models.labels.device, models.dtype).requires_grad_()
        between = torch.full((len(victims),), self.between).to(images).requires_grad_()
        groups: list[dict[str, Any]] = [{"params": [images]}, {"params": [between], "lr": self.between_lr}]
        optimizer = torch.optim.Adam(groups, lr=self.lr)
        history = list[Tensor]()
        for step in timely(range(self.iterations)):
            drops = sum(step >= share * self.iterations for share in (3 / 8, 5 / 8, 7 / 8))
            optimizer.param_groups[0]["lr"] = self.lr * 0.1**drops
            with differentiable_twice():
                angles = models.angles(0.5 + _STD * images, between)
                shown = 0.5 + _STD * images
                rough = shown.diff(dim=-2).abs().flatten(1).mean(1) + shown.diff(dim=-1).abs().flatten(1).mean(1)
                slopes = torch.autograd.grad((angles + self.total_variation * rough).sum(), [images, between])
            images.grad, between.grad = slopes[0].nan_to_num(0.0).sign(), slopes[1].nan_to_num(0.0)
            optimizer.step()
            with torch.no_grad():
                images.clamp_(-0.5 / _STD, 0.5 / _STD)
                between.clamp_(0, 1)
            history.append(angles.detach().cpu())
            report((step + 1) / self.iterations)
        found = (0.5 + _STD * images.detach()).clamp(0, 1).float().cpu()
        given = zip(victims, found, between.detach().tolist(), torch.stack(history, 1).tolist(), strict=True)
        return [_reconstruction(*one) for one in given]


def _reconstruction(victim: PreparedVictim, images: Tensor, share: float, history: list[float]) -> Reconstruction:
    assert victim.labels is not None
    finite = math.isfinite(history[-1])
    at = f"It matches the gradient at {share:.2f} of the way from the model sent to the one that came back."
    return Reconstruction(
        id=victim.observation.id,
        batch=Batch(images, victim.labels.cpu()) if finite else None,
        failure=None if finite else "A finite gradient is expected, but got none; check the update.",
        loss=history[-1],
        history=tuple(history),
        label_source=victim.label_source,
        notes=(at,),
    )


@dataclass(frozen=True, eq=False)
class _Between:
    """Models between the one sent to V victims and those returned: ``sent`` + share * ``changes``.

    ``sent``: (*shape) by parameter. ``changes``: (V, *shape) by parameter. ``labels``: (V, B) or (V, B, K). ``signed``:
    ``True`` compares mostly the signs of gradients, for clients that use Adam.
    """

    loss: VictimLoss
    sent: Tensors
    changes: Tensors
    labels: Tensor
    signed: bool
    mapped: bool

    @classmethod
    def of(cls, prepared: Prepared, victims: Sequence[PreparedVictim]) -> "_Between":
        victim_model = prepared.rounds[0].victim_model
        like = next(prepared.observer.parameters())
        updates, sent = [victim.observation.update() for victim in victims], victims[0].observation.sent.parameters
        names = list(victim_model.names)
        models = cls(
            loss=VictimLoss(victim_model),
            sent={name: sent[name].to(like) for name in names},
            changes={name: torch.stack([update[name].to(like) for update in updates]) for name in names},
            labels=torch.stack([victim.labels.to(like.device) for victim in victims if victim.labels is not None]),
            signed=victims[0].observation.plan.optimizer != "sgd",
            mapped=len(victims) > 1,
        )
        return models if not models.mapped or models._can_be_mapped(prepared.shape) else replace(models, mapped=False)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.sent.values())).dtype

    def _can_be_mapped(self, shape: tuple[int, ...]) -> bool:
        images = torch.full((len(self.labels), *shape), 0.5).to(self.labels.device, self.dtype).requires_grad_()
        try:
            with differentiable_twice():
                torch.autograd.grad(self.angles(images, images.new_full((len(images),), 0.5)).sum(), images)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return False
        return True

    def angles(self, images: Tensor, between: Tensor) -> Tensor:
        """Return 1 - cosine (V,) of updates and negative gradients at ``sent`` + ``between`` (V,) * ``changes``."""
        at = {name: sent + between.view(-1, *[1] * sent.dim()) * self.changes[name] for name, sent in self.sent.items()}
        gradients = self._gradients(at, images)
        dot = squared = observed = images.new_zeros(len(images))
        for name in self.sent:
            step, way = -gradients[name].flatten(1), self.changes[name].flatten(1)
            if self.signed:
                scale = step.square().mean(1, keepdim=True).sqrt().detach()
                step = step / (step.abs() + scale + torch.finfo(step.dtype).tiny)
            dot = dot + (step * way).sum(1)
            squared, observed = squared + step.square().sum(1), observed + way.square().sum(1)
        return 1 - dot / (squared * observed).clamp_min(torch.finfo(dot.dtype).tiny).sqrt()

    def _gradients(self, at: Tensors, images: Tensor) -> Tensors:
        if self.mapped:
            return cast(Tensors, vmap(grad(self.loss))(at, images, self.labels))
        each = []
        for place in range(len(images)):
            own = [values[place] for values in at.values()]
            loss = self.loss(dict(zip(at, own, strict=True)), images[place], self.labels[place])
            each.append(torch.autograd.grad(loss, own, create_graph=True))
        return {name: torch.stack(values) for name, values in zip(at, zip(*each, strict=True), strict=True)}
