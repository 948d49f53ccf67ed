"""A small client step, and a defense run on it the way a client runs it."""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from fl_privacy.defenses import ClientState, Defense, LocalStep
from fl_privacy.federation.training import join_private
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.pretrained.evaluator import EvaluatorPlan, train_evaluator
from fl_privacy.models.pretrained.evaluator_files import save_evaluator
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors


def small_model() -> nn.Module:
    """3x16x16 images, 5 classes, 144 features in front of the head; 2,618 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 9, 3, stride=2, padding=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(144, 5),
    )


def local_step(model: nn.Module | None = None, *, seed: int = 0, examples: int = 4) -> LocalStep:
    model = model or small_model()
    images = torch.rand(examples, 3, 16, 16, generator=derive_generator(1, "images"))
    batch = Batch(images, torch.arange(examples) % 5)
    rng = derive_generator(seed, "defense")
    return LocalStep(
        model=model, sent=ModelState.of(model), batch=batch, plan=LocalPlan(), state=ClientState(), rng=rng
    )


def clean_gradient(step: LocalStep) -> Tensors:
    return loss_gradients(step.model, step.sent, step.batch, batch_norm=step.plan.batch_norm).gradients


def run(defense: Defense, tensors: Tensors, step: LocalStep) -> Tensors:
    """Compute what is uploaded instead of ``tensors``, the clean gradient of ``step``.

    Of a defense with private layers, whose model is another one, only the hooks on what is shared are run.
    """
    public = step.sent.parameters
    own_loss = bool(defense.loss) and not defense.private
    if own_loss:
        step = private_step(defense, step)
        tensors = changed_gradient(defense, step, public)
    for gradient_hook in defense.gradient:
        tensors = gradient_hook(tensors, step)
    if own_loss:
        tensors = {name: t for name, t in tensors.items() if name in public}
    for upload_hook in defense.upload:
        tensors = upload_hook(tensors, step.state, step.rng)
    return tensors


def private_step(defense: Defense, step: LocalStep) -> LocalStep:
    """``step`` of the client's own model and loss."""
    model = step.model
    for hook in defense.model:
        model = hook(model, step.state, derive_generator(0, "private"))
    return replace(step, model=model, sent=join_private(model, step.sent, step.state), changes=defense.loss)


def changed_gradient(defense: Defense, step: LocalStep, names: Iterable[str] | None = None) -> Tensors:
    """Of the defense's own loss by the parameters ``names``, those of ``step`` if not told."""
    own = step if step.changes else private_step(defense, step)
    gradients = loss_gradients(own.model, own.sent, own.batch, changes=own.changes).gradients
    return {name: gradients[name] for name in names or step.sent.parameters}


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def large_update(seed: int = 3) -> Tensors:
    """20,000 elements in two tensors of different size and scale, for statistical tests."""
    rng = derive_generator(seed, "update")
    return {
        "a.weight": torch.randn(150, 120, generator=rng),
        "b.weight": 0.1 * torch.randn(20, 10, 10, generator=rng),
    }


@cache
def small_evaluator() -> str:
    """File of an evaluation network for 3x16x16 images, trained on random colors in enlarged patches."""
    patches = torch.rand(192, 3, 4, 4, generator=derive_generator(2, "patches"))
    images = torch.nn.functional.interpolate(patches, size=16, mode="bicubic").clamp(0, 1)
    plan = EvaluatorPlan(widths=(8, 16, 16), epochs=3, lr=1e-2, batch_size=64)
    file = Path(tempfile.mkdtemp()) / "evaluator.safetensors"
    save_evaluator(train_evaluator((images * 255).byte(), plan, seed=0), file, {})
    return str(file)
