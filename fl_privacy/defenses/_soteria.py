"""Soteria: zeroed columns of the last linear layer's gradient; and its successor, noise on slices."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from fl_privacy import checks
from fl_privacy.defenses._dp_noise import sample_noise
from fl_privacy.defenses._pruning import keep_largest
from fl_privacy.defenses.defense import Defense, LocalStep
from fl_privacy.effects import MutedFeatures, Part, SlicedNoise
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import plain_attention
from fl_privacy.models.gradients.hooks import ModuleCall, entering, leaving
from fl_privacy.models.gradients.memory import written_by
from fl_privacy.progress import counted
from fl_privacy.types import Batch, ModelState, Tensors

# PyTorch's own rules for ``jvp`` are of TorchScript; users who defend clients cannot change that.
warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")


def find_head(model: nn.Module, state: ModelState, inputs: Tensor) -> str:
    """Return the name of the linear layer whose output is the logits, by a forward pass on ``inputs``.

    If there is no such layer, the linear layer called last is taken; ``UserError`` if none is called.
    """
    with torch.no_grad(), leaving(linear_layers(model)) as calls:
        logits = _forward(model, state, inputs)
    if not calls:
        raise UserError(
            "Soteria is expected to get a model with a linear layer, but no torch.nn.Linear is called;"
            " choose another model or defense."
        )
    return maker_of(logits, calls)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def maker_of(logits: Tensor, calls: Sequence[ModuleCall]) -> str:
    """Return the name of the layer in ``calls`` that returned ``logits``; if there is none, of the last one called."""
    return next((call.name for call in reversed(calls) if call.output is logits), calls[-1].name)


def representation(model: nn.Module, state: ModelState, inputs: Tensor, head: str) -> Tensor:
    """Return the inputs (B, D), differentiable, of the layer ``head`` in evaluation mode, as in Soteria's code."""
    with entering({head: model.get_submodule(head)}) as calls:
        _forward(model, state, inputs)
    features = calls[-1].inputs
    if features.dim() != 2:
        raise UserError(
            f"Soteria expects one vector per example as input of the layer {head}, but got the shape"
            f" {tuple(features.shape)}; choose another model or defense."
        )
    return features


def _forward(model: nn.Module, state: ModelState, inputs: Tensor) -> Tensor:
    model.eval()
    values = {name: t.detach() for name, t in {**state.parameters, **state.buffers}.items()}
    return cast(Tensor, functional_call(model, values, (inputs,)))


Features = Callable[[Tensor], Tensor]  # (B, ...) -> (B, D), each example by itself
_CHUNK_ELEMENTS = 1 << 20  # input elements of the products computed together, which bounds the memory
_KEPT_BYTES = 1 << 25  # most bytes that the batched forward pass of ``exact_row_norms`` writes


def exact_row_norms(features: Features, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return norms (B, D) of the derivatives d r_i / d x of D features r at x = ``inputs``, and the features (B, D)."""
    size, one = len(inputs), inputs[:1].detach()
    with torch.no_grad():
        copies = _KEPT_BYTES // max(1, size * written_by(lambda: features(one)))
        copies = max(1, min(copies, features(one).shape[1]))
    x = inputs.detach().repeat(copies, *(1 for _ in inputs.shape[1:])).requires_grad_()
    with torch.enable_grad():
        r = features(x)
    rows = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
    norms = []
    for chunk in counted("sensitivity of features", torch.split(rows, copies)):
        cotangents = F.pad(chunk, (0, 0, 0, copies - len(chunk))).repeat_interleave(size, 0)
        (products,) = torch.autograd.grad(r, x, cotangents, retain_graph=True)
        norms.append(products.flatten(1).norm(dim=1).view(copies, size)[: len(chunk)])
    return torch.cat(norms).T, r[:size].detach()


def estimated_row_norms(
    features: Features, inputs: Tensor, *, directions: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return estimated norms (B, D) of the features' derivatives by the inputs, and the features (B, D).

    The estimate takes ``directions`` products of the derivatives with random signs; its relative error is about 1 /
    sqrt(2 directions).
    """
    x = inputs.detach()

    def product(signs: Tensor) -> Tensor:
        return cast(Tensor, jvp(features, (x,), (signs,))[1])

    with torch.no_grad(), plain_attention():
        r = features(x)
        squares = torch.zeros_like(r)
        for signs in _random_signs(x, directions, rng, "sensitivity of features"):
            squares += vmap(product)(signs).square().sum(0)
    return (squares / directions).sqrt(), r


def _random_signs(like: Tensor, directions: int, rng: torch.Generator, progress: str) -> Iterator[Tensor]:
    chunk = max(1, _CHUNK_ELEMENTS // like.numel())
    for start in counted(progress, range(0, directions, chunk)):
        size = (min(chunk, directions - start), *like.shape)
        yield torch.randint(0, 2, size, generator=rng, device=rng.device).to(like) * 2 - 1


Form = Literal["paper", "code"]  # withheld features: by the paper's definition, or by the authors' scripts
_EPSILONS: Mapping[Form, float] = {"paper": 1e-10, "code": 0.1}


def soteria(
    *,
    rate: float = 0.8,
    scores: Literal["exact", "estimated"] = "exact",
    directions: int | None = None,
    form: Form = "paper",
    epsilon: float | None = None,
) -> Defense:
    """Zero the columns of the last linear layer's weight gradient with the lowest scores (Sun et al. 2021).

    Feature i has as score the sum over the batch of ||d r_i / d x|| / (|r_i| + epsilon), where r is the layer's input
    (Soteria, section 4). The bias gradient and all other layers stay.

    Args:
        rate: share of the features that are zeroed, in [0, 1).
        scores: ``exact`` takes a backward pass per feature, ``estimated`` a forward product per direction.
        directions: number of directions of the estimate; ``None`` takes 256 / B for a batch of B, at least 32, which
            zeroes at least 96 % of the same features.
        form: ``paper`` as above, or ``code`` as in the authors' scripts for the cosine attack: scores have r_i instead
            of |r_i|, and features are zeroed if their score's magnitude is below the quantile ``rate``.
        epsilon: added constant, above 0; ``None`` takes 1e-10 for ``paper``, which has none, and 0.1 for ``code``.
    """
    checks.number("defense.rate", rate, at_least=0, below=1, example=0.8)
    checks.one_of("defense.scores", scores, ("exact", "estimated"))
    if directions is not None:
        checks.whole("defense.directions", directions, at_least=1, example=256)
    checks.one_of("defense.form", form, ("paper", "code"))
    if epsilon is not None:
        checks.number("defense.epsilon", epsilon, above=0, example=1e-10)
    added = _EPSILONS[form] if epsilon is None else epsilon

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        head = find_head(step.model, step.sent, step.batch.inputs[:1])
        weight = f"{head}.weight"
        if weight not in tensors:
            raise UserError(f"Soteria expects the gradient of {weight}, but it was withheld; compose Soteria first.")
        estimate = (directions or max(32, 256 // len(step.batch))) if scores == "estimated" else None
        scored = feature_scores(step, head, directions=estimate, epsilon=added, form=form)
        keep = feature_mask(scored, rate) if form == "paper" else published_mask(scored, rate)
        return {**tensors, weight: tensors[weight].masked_fill(~keep, 0.0)}

    settings = {"rate": rate, "layer": "last linear", "scores": scores, "form": form, "epsilon": added}
    part = Part("soteria", settings, MutedFeatures(dropped=rate), strength="rate")
    return Defense(parts=(part,), gradient=(on_gradient,))


def feature_scores(
    step: LocalStep, head: str, *, directions: int | None = None, epsilon: float = 1e-10, form: Form = "paper"
) -> Tensor:
    """Return the score of each feature: the sum over the batch of ||d r_i / d x|| / (|r_i| + epsilon).

    r are the features, inputs of the layer ``head``; x is the model's input. ``form``: ``paper`` as above, ``code``
    with r_i instead of |r_i|. ``directions``: number of directions of an estimate; ``None`` computes exact norms.
    """

    def features(inputs: Tensor) -> Tensor:
        return representation(step.model, step.sent, inputs, head)

    if directions is None:
        norms, r = exact_row_norms(features, step.batch.inputs)
    else:
        norms, r = estimated_row_norms(features, step.batch.inputs, directions=directions, rng=step.rng)
    return (norms / ((r.abs() if form == "paper" else r) + epsilon)).sum(0)


def feature_mask(scores: Tensor, rate: float) -> Tensor:
    """Return booleans (D,), false at the floor(rate * D) lowest ``scores`` (D,)."""
    return keep_largest({"features": scores}, drop=rate, scope="layer")["features"]


def published_mask(scores: Tensor, rate: float) -> Tensor:
    """Return booleans, ``False`` where the magnitude of ``scores`` is below their quantile ``rate``."""
    return scores.abs() >= scores.quantile(rate)


def soteria_mixing(*, rate: float = 0.5, slices: int = 10, noise_scale: float = 0.01, directions: int = 4) -> Defense:
    """Add Gaussian noise to random slices of the gradient (Wang et al., INFOCOM 2022; Refiner calls it "Soteria").

    Slices of the flattened gradient have equal sensitivity: more revealing layers are cut finer. Each step draws the
    slices anew, so that an attacker cannot know which layers have no noise.

    Args:
        rate: share of the slices with noise, in [0, 1].
        slices: number of slices, at least 1.
        noise_scale: standard deviation of the noise, in units of the gradient, at least 0.
        directions: number of random directions in which a layer's sensitivity is estimated, at least 1.
    """
    checks.number("defense.rate", rate, at_least=0, at_most=1, example=0.5)
    checks.whole("defense.slices", slices, at_least=1, example=10)
    checks.number("defense.noise_scale", noise_scale, at_least=0, example=0.01)
    checks.whole("defense.directions", directions, at_least=1, example=4)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        sensitivity = gradient_sensitivity(step, directions=directions, rng=step.rng)
        chosen = torch.randperm(slices, generator=step.rng, device=step.rng.device)[: round(rate * slices)]
        perturbed = torch.zeros(slices, dtype=torch.bool).index_fill_(0, chosen.cpu(), True)
        members = slice_members(tensors, {name: sensitivity[name] for name in tensors}, slices)
        added = {name: sample_noise(t, "gaussian", noise_scale, step.rng) for name, t in tensors.items()}
        return {name: t + added[name] * perturbed.to(t.device)[members[name]] for name, t in tensors.items()}

    settings = {"rate": rate, "slices": slices, "noise": "gaussian", "noise_std": noise_scale}
    part = Part("soteria_mixing", settings, SlicedNoise(std=noise_scale), strength="rate")
    return Defense(parts=(part,), gradient=(on_gradient,))


def slice_members(tensors: Tensors, sensitivity: dict[str, float], slices: int) -> dict[str, Tensor]:
    """Divide the elements of ``tensors`` into slices of equal sensitivity; return each element's slice number.

    A tensor's ``sensitivity`` is spread evenly over its elements; if all are zero, elements count equally.
    """
    known = sum(sensitivity.values()) > 0
    weights = sensitivity if known else {name: float(t.numel()) for name, t in tensors.items()}
    total = sum(weights.values())
    members, before = {}, 0.0
    for name, t in tensors.items():
        middles = (torch.arange(t.numel(), dtype=torch.float64, device=t.device) + 0.5) / max(1, t.numel())
        position = (before + weights[name] * middles) / total * slices
        members[name] = position.floor().clamp(0, slices - 1).long().view(t.shape)
        before += weights[name]
    return members


def gradient_sensitivity(step: LocalStep, *, directions: int, rng: torch.Generator) -> dict[str, float]:
    """Estimate, by parameter name, the Frobenius norm of the derivative of a gradient with respect to the inputs.

    It uses ``directions`` products with random sign vectors. Batch-norm layers are in evaluation mode.
    """
    parameters = {name: p.detach() for name, p in step.sent.parameters.items()}

    def loss(values: Tensors, inputs: Tensor) -> Tensor:
        state, batch = ModelState(values, step.sent.buffers), Batch(inputs, step.batch.labels)
        return replace(step, sent=state, batch=batch).loss(batch_norm="eval")

    def gradient(inputs: Tensor) -> Tensors:
        return cast(Tensors, grad(loss)(parameters, inputs))

    x = step.batch.inputs

    def product(signs: Tensor) -> Tensors:
        return cast(Tensors, jvp(gradient, (x,), (signs,))[1])

    squares = dict.fromkeys(parameters, 0.0)
    for signs in _random_signs(x, directions, rng, "sensitivity of layers"):
        with plain_attention():
            along = vmap(product)(signs)
        for name, changes in along.items():
            squares[name] += float(changes.square().sum()) / directions
    return {name: square**0.5 for name, square in squares.items()}
