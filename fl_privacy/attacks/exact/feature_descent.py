"""Descend from gray to the pixels that match what is known between the first layers, smooth images first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fl_privacy.attacks.attack import Report, even_share, part_of, timely
from fl_privacy.attacks.exact.first_layer import FirstLayer, NotFullyConnectedError, find_first_layer, probe_first_layer
from fl_privacy.attacks.exact.residual import Known, Residual
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.types import ModelState, Observation

SMOOTH = (1e-1, 1e-2, 1e-3, 1e-4)
"""Weights of the mean total variation in the successive stages, next to shares of squared lengths."""

_SURE = 1e-3
"""Outputs of a ReLU above this share of the largest determine its inputs; the others only bound them from above."""

_SPREAD = 0.02  # spread of the first pixels around 0.5
_NEAREST = 2  # blocks nearest to the image whose outputs are matched


def pixels_of(network: Residual, known: Known, *, evaluations: int, seed: int, report: Report) -> tuple[Tensor, Tensor]:
    """Descend to images (V, C, H, W), float64, with the known features and gradients of the first layers.

    Their mismatch (V,), as a mean share of squared lengths, is returned, too. ``evaluations`` are those of each victim.
    """
    missed = _loss(network, known)
    like = next(iter(known.values.values()))
    rng = torch.Generator().manual_seed(seed)
    start = 0.5 + _SPREAD * (torch.rand(1, *network.shapes[network.graph.image], generator=rng, dtype=like.dtype) - 0.5)
    images = start.to(like.device).repeat(len(like), 1, 1, 1)
    each = max(1, evaluations // len(SMOOTH))
    for stage, weight in enumerate(timely(SMOOTH)):

        def loss(images: Tensor, weight: float = weight) -> Tensor:
            return (
                missed(images)
                + weight * (images.diff(dim=-1).abs().flatten(1).mean(1) + images.diff(dim=-2).abs().flatten(1).mean(1))
                + (F.relu(-images) + F.relu(images - 1)).square().flatten(1).mean(1)
            )

        shown = part_of(report, stage / len(SMOOTH), (stage + 1) / len(SMOOTH))
        with even_share(len(SMOOTH) - stage):
            images = _descended(loss, images, each, shown)
    with torch.no_grad():
        return images, missed(images)


def _loss(network: Residual, known: Known) -> Callable[[Tensor], Tensor]:
    """Return the mismatch (V,) of images (V, C, H, W) with the known values nearest to them."""
    graph = network.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    nearest = sorted(known.values, key=order.__getitem__)[: 2 * _NEAREST - 1]
    targets = {node: known.values[node] for node in nearest}
    sizes = {node: _squares(values) for node, values in targets.items()}
    moved = [(node, own, own.left, own.right, _squares(own.right)) for node, own in known.equations]
    furthest = max([*nearest, *(node for node, *_ in moved)], key=order.__getitem__)

    def missed(images: Tensor) -> Tensor:
        found = graph.values({graph.image: images}, furthest)
        parts = [_unlike(network, node, found, values) / sizes[node] for node, values in targets.items()]
        parts += [_squares(left @ found[node].flatten(2).mT - right) / size for node, _, left, right, size in moved]
        return torch.stack(parts).sum(0)

    return missed


def _unlike(network: Residual, node: fx.Node, found: Mapping[fx.Node, Tensor], values: Tensor) -> Tensor:
    """Return the squared distance (V,) of a node's values, in front of an active ReLU."""
    if network.graph.kind(node) != "relu":
        return _squares(found[node] - values)
    (given,) = node.all_input_nodes
    sure = values > _SURE * values.flatten(1).amax(1)[:, None, None, None]
    return _squares(torch.where(sure, found[given], F.relu(found[given])) - values)


def _squares(values: Tensor) -> Tensor:
    return values.flatten(1).square().sum(1)


def _descended(loss: Callable[[Tensor], Tensor], images: Tensor, evaluations: int, report: Report) -> Tensor:
    """Descend by L-BFGS, each victim alone, and return the best images."""
    shape, variables = images.shape, images.flatten(1)
    best, least = variables, torch.full_like(variables[:, 0], torch.inf)
    settings = LBFGS(inner=20, history=50, line_search="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0)
    run = settings.start(variables, iterations=evaluations, images=variables.shape[1])
    for number in timely(range(evaluations)):
        inputs = variables.detach().requires_grad_(True)
        values = loss(inputs.view(shape))
        (gradient,) = torch.autograd.grad(values.sum(), inputs)
        values = values.detach()
        better = values < least
        best, least = torch.where(better[:, None], variables, best), torch.where(better, values, least)
        variables, _, finished = run.step(variables, values, gradient)
        report(number / evaluations)
        if finished.all():
            break
    return best.view(shape)


@dataclass(frozen=True, eq=False)
class NormalizedLayer(FirstLayer):
    """A first fully connected layer behind batch norm in training mode.

    ``center`` (N,) is the mean input, ``spread`` (N,) the distance of two examples from it; ``None`` if several values
    share a mean and a variance.
    """

    center: Tensor
    spread: Tensor | None


def find_normalized_layer(observation: Observation) -> NormalizedLayer | None:
    """Find the layer behind batch norm; ``None`` without it, or if its batch is not known."""
    plan, sent, shape = observation.plan, observation.assumed(), observation.input_shape
    size = observation.upload.num_examples
    if plan.batch_norm != "train" or (plan.shares != "gradient" and number_of_steps(size, plan) != 1):
        return None
    try:
        first = probe_first_layer(observation.model, sent, shape)
    except NotFullyConnectedError:
        return None
    norm = first.module
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or not first.one_by_one or norm.running_var is None:
        return None
    names = [f"{first.name}.running_mean", f"{first.name}.running_var"]
    if not all(name in sent.buffers and name in observation.upload.buffers for name in names):
        return None
    if (share := norm.momentum) is None:
        share = 1 / (float(sent.buffers[f"{first.name}.num_batches_tracked"]) + 1)
    mean, variance = (
        (observation.upload.buffers[name].double() - (1 - share) * sent.buffers[name].double()) / share
        for name in names
    )
    each = first.random.numel() // len(mean)
    values = size * first.random.numel() // len(mean)
    variance = (variance * (values - 1) / values).clamp_min(0)
    found = dict(zip(names, (each.to(sent.buffers[names[0]]) for each in (mean, variance)), strict=True))
    state = ModelState(sent.parameters, {**sent.buffers, **found})
    layer = find_first_layer(observation.model, state, shape, fixed_norms=True)
    weight = sent.parameters.get(f"{first.name}.weight", torch.ones_like(mean)).double()
    bias = sent.parameters.get(f"{first.name}.bias", torch.zeros_like(mean)).double()
    spread = weight * (variance / (variance + norm.eps)).sqrt() if each == 1 else None
    return NormalizedLayer(*layer.names, layer.shift, layer.scale, bias.repeat_interleave(each), spread)


def two_examples(layer: NormalizedLayer, weight: Tensor, bias: Tensor) -> Tensor | None:
    """Solve for two inputs (2, N), the center plus and minus the spread, by the signs of the gradients (M, N), (M,)."""
    if layer.spread is None:
        return None
    direction = torch.linalg.svd(weight.double() - bias.double()[:, None] * layer.center, full_matrices=False)[2][0]
    off = direction.sign() * layer.spread.abs()
    return torch.stack([layer.center + off, layer.center - off])


def with_the_bias(layer: FirstLayer, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the weight's gradient (M, N), joined with the bias's (M, 1) behind batch norm in training mode.

    Examples relative to their mean take one from the rank of the weight's gradient.
    """
    return torch.cat([weight, bias[:, None]], 1) if isinstance(layer, NormalizedLayer) else weight
