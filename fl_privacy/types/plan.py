"""Public plan of a client's local training, and input normalization."""

import fnmatch
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from fl_privacy import checks
from fl_privacy.checks import fits, in_words, number, whole
from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """Public plan of a client's local training, known to server and attacker.

    Attributes:
        shares: content of the upload. ``gradient``: gradient of one batch (FedSGD); ``delta``: weights after local
            training minus weights sent (FedAvg); ``weights``: weights after local training, like stock Flower clients.
        lr: learning rate of the local steps; if a gradient is shared, it applies only to layers that stay private.
        lr_decay: factor on ``lr`` from one round to the next, above 0 up to 1.
        lr_drops: rounds after each of which ``lr`` is multiplied by ``lr_drop_factor``, above 0 up to 1.
        steps: number of local steps S; excludes ``epochs``.
        epochs: number of passes over the client's examples; excludes ``steps``.
        batch_size: examples per local step; ``None`` takes all.
        optimizer: ``sgd``, ``adam`` or ``adamw``; its state starts anew each round.
        momentum: momentum of SGD, in [0, 1).
        weight_decay: factor of the L2 penalty; ``adamw`` decouples it from the gradient.
        frozen: name patterns of parameters that are neither trained nor uploaded, such as ``words.*``.
        trained: name patterns of the only trained parameters; a model with adapters trains just these by default.
        batch_norm: ``train`` normalizes by the batch and updates the running statistics, ``eval`` uses those sent.
        probe_batch_norm: mode for probes, extra uploads made for the attack. Published attacks use ``eval``; in
            ``train`` a single image leaks far less.
        mode: ``train`` or ``eval`` for layers other than batch norm, such as dropout, if a gradient is shared; clients
            of a federation use ``train``.
        buffers: ``shared`` uploads the running statistics of batch norm, ``withheld`` does not.
        loss_scale: factor of a batch's mean loss.
        crop_padding: black pixels around each training image before a random crop to its size; 0 does not crop.
        flip: ``True`` mirrors each training image left to right with probability 1/2.
        augment_probes: ``True`` crops and flips probes, too, like the authors of ATS.
    """

    shares: Literal["gradient", "delta", "weights"] = "gradient"
    lr: float = 0.01
    lr_decay: float = 1.0
    lr_drops: Sequence[int] = ()
    lr_drop_factor: float = 0.1
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    frozen: Sequence[str] = ()
    trained: Sequence[str] = ()
    batch_norm: Literal["train", "eval"] = "train"
    probe_batch_norm: Literal["train", "eval"] = "eval"
    mode: Literal["train", "eval"] = "train"
    buffers: Literal["shared", "withheld"] = "shared"
    loss_scale: float = 1.0
    crop_padding: int = 0
    flip: bool = False
    augment_probes: bool = False

    def __post_init__(self) -> None:
        for name, annotation in typing.get_type_hints(LocalPlan).items():
            if not fits(value := getattr(self, name), annotation):
                raise UserError(f"plan.{name} is expected to be {in_words(annotation)}, but got {value!r}; change it.")
        for name in ("lr_drops", "frozen", "trained"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        number("plan.lr", self.lr, above=0, example=0.01)
        number("plan.loss_scale", self.loss_scale, above=0, example=1.0)
        number("plan.lr_decay", self.lr_decay, above=0, at_most=1, example=0.99)
        number("plan.lr_drop_factor", self.lr_drop_factor, above=0, at_most=1, example=0.1)
        number("plan.momentum", self.momentum, at_least=0, below=1, example=0.9)
        number("plan.weight_decay", self.weight_decay, at_least=0, example=5e-4)
        for name in ("steps", "epochs", "batch_size"):
            if (value := getattr(self, name)) is not None:
                whole(f"plan.{name}", value, at_least=1, example=1)
        whole("plan.crop_padding", self.crop_padding, at_least=0, example=4)
        for last in self.lr_drops:
            whole("plan.lr_drops", last, at_least=1, example=100)
        if self.augment_probes and not self.augments:
            raise UserError(
                "plan.augment_probes is expected with crop_padding or flip, but got neither; set plan.flip=true."
            )
        if self.nesterov and self.momentum == 0:
            raise UserError("plan.nesterov is expected with a momentum above 0, but got 0; try plan.momentum=0.9.")
        if self.steps is not None and self.epochs is not None:
            raise UserError(
                f"plan.steps and plan.epochs exclude each other, but got {self.steps} and {self.epochs};"
                " set one of them to null."
            )
        if self.shares == "gradient" and (self.epochs is not None or self.steps not in (None, 1)):
            raise UserError(
                f"A shared gradient is expected to be of one step, but got steps={self.steps}, epochs={self.epochs};"
                " use plan.shares=weights (or delta, their change), or leave out plan.steps and plan.epochs."
            )

    @property
    def augments(self) -> bool:
        return self.crop_padding > 0 or self.flip

    def held(self, names: Iterable[str]) -> frozenset[str]:
        """Return the ``names`` that the plan freezes; ``UserError`` if it freezes all, or a pattern of it fits none."""
        if not self.frozen and not self.trained:
            return frozenset()
        names = list(names)
        for pattern in self.frozen:
            if not fnmatch.filter(names, pattern):
                raise UserError(f"plan.frozen is expected to match parameters, but got {pattern!r}; try {names[0]}.")
        found = frozenset(name for pattern in self.frozen for name in fnmatch.filter(names, pattern))
        if self.trained:
            free = {name for pattern in self.trained for name in fnmatch.filter(names, pattern)}
            if not free:
                raise UserError(
                    f"plan.trained is expected to match parameters, but got {list(self.trained)}; try {names[0]}."
                )
            found |= frozenset(names) - free
        if len(found) == len(names):
            raise UserError("plan.frozen is expected to leave a parameter to train, but matches all; list fewer.")
        return found

    def in_round(self, round: int, *, probe: bool = False) -> "LocalPlan":
        """Return the plan of one ``round`` (from 1), with its learning rate and mode of batch norm.

        ``probe``: ``True`` for extra uploads made for the attack, whose mode may differ from that of training.
        """
        return _in_round(self, round, probe)


@lru_cache(maxsize=64)  # the clients of a round share a plan, whose checks take as long as a small step
def _in_round(plan: LocalPlan, round: int, probe: bool) -> LocalPlan:
    drops = sum(round > last for last in plan.lr_drops)
    lr = plan.lr * plan.lr_decay ** max(0, round - 1) * plan.lr_drop_factor**drops
    batch_norm = plan.probe_batch_norm if probe else plan.batch_norm
    return replace(plan, lr=lr, lr_decay=1.0, lr_drops=(), batch_norm=batch_norm)


@dataclass(frozen=True)
class Normalization:
    """Normalization ``(x - mean) / std`` of images in [0, 1], with a value for each channel or one for all."""

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise UserError(f"{name} is expected to be a number for each channel, but got {values!r}; try [0.5].")
            for value in values:
                checks.number(name, value, above=0 if name == "std" else None, example=0.5)
            object.__setattr__(self, name, tuple(float(value) for value in values))
        if 1 not in (len(self.mean), len(self.std)) and len(self.mean) != len(self.std):
            raise UserError(
                f"mean and std are expected to have as many values, but got {len(self.mean)} and {len(self.std)};"
                " give one for each channel, or one for all."
            )

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        mean, std = self._like(images)
        return (images - mean) / std

    def undo(self, images: torch.Tensor) -> torch.Tensor:
        mean, std = self._like(images)
        return images * std + mean

    def in_words(self) -> str:
        mean, std = (", ".join(f"{v:.4g}" for v in dict.fromkeys(values)) for values in (self.mean, self.std))
        one = len(set(self.mean)) == 1 and len(set(self.std)) == 1
        return f"(x - {mean}) / {std}" if one else f"(x - [{mean}]) / [{std}]"

    def _like(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, std = (images.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return mean, std
