"""Reconstruct a batch's images from a fully connected first layer, by independent component analysis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from fl_privacy.attacks.attack import Report, in_parts, part_of, timely
from fl_privacy.attacks.exact.certificate import Read, Reproduction, certified, is_muted, model_as_sent
from fl_privacy.attacks.exact.first_layer import FirstLayer, NotFullyConnectedError, find_first_layer, residual
from fl_privacy.attacks.exact.spear import AGREEMENT, column_space, factors_near
from fl_privacy.attacks.exact.unmixing import Behind, misfit, mixture_of, unmixed_by_network
from fl_privacy.attacks.gradient_inversion.execution import fitting_threads
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, expect_gradient, failed
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, as_gradient, expect_images
from fl_privacy.checks import whole
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

_RANK = 1e-6  # singular values below this share of the largest are rounding errors
_LEAST_CURVATURE = 0.1  # least curvature of the likelihood in a pair of components; smaller ones are replaced by it
_LONGEST_STEP = 0.3  # largest relative change of a component in one step


def unmixed(basis: Tensor, directions: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """Return V victims' layer inputs (V, B, N): ``directions`` (V, B, B) times ``basis`` (V, B, N), rescaled.

    The scale of each input follows from the gradients ``weights`` (V, M, N) and ``biases`` (V, M).
    """
    columns = weights.double() @ basis.mT
    balance = torch.linalg.solve_ex(columns.mT @ columns, columns.mT @ biases.double()[..., None])[0]
    return cast(Tensor, directions / (directions @ balance) @ basis)


def neighbors(images: Tensor) -> Tensor:
    """Return the differences (V, B, n) between neighboring pixels of images (V, B, C, H, W).

    They are taken in the gray image, and in all channels but the last minus gray, and scaled to mean square 1.
    """
    gray = images.mean(2, keepdim=True)
    kinds = [gray] if images.shape[2] == 1 else [gray, images[:, :, :-1] - gray]
    flat = [kind.diff(dim=dim).flatten(2) for kind in kinds for dim in (-1, -2)]
    return torch.cat([each / each.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12) for each in flat], 2)


def unlikeliness(features: Tensor, directions: Tensor) -> Tensor:
    """Return -log likelihood, plus a constant, of ``directions`` @ ``features`` as independent Cauchy components."""
    found = directions @ features
    scale = found.square().mean(1, keepdim=True).sqrt()
    each = (1 + (found / scale).square()).log().mean(1) + scale[:, 0].log()
    return cast(Tensor, features.shape[1] * (each.sum() - torch.linalg.slogdet(directions)[1]))


def independent_directions(features: Tensor, start: Tensor, *, iterations: int) -> Tensor:
    """Find V victims' directions (V, B, B) whose products with ``features`` (V, B, n) are independent.

    The products are also heavy-tailed. ``start``: orthogonal directions (V, B, B). ``iterations``: number of steps of
    FastICA (Hyvarinen 1999), and of quasi-Newton steps after it (Ablin et al. 2018, "Picard").
    """
    centered = features - features.mean(2, keepdim=True)
    values, vectors = torch.linalg.eigh(centered @ centered.mT / centered.shape[2])
    scale = values.clamp_min(_RANK**2 * values[:, -1:]).rsqrt()
    whitening = vectors * scale[:, None] @ vectors.mT
    white, directions = whitening @ centered, start
    for _ in range(iterations):  # with the hyperbolic tangent
        bent = (directions @ white).tanh()
        slope = (1 - bent.square()).mean(2, keepdim=True)
        left, _, right = torch.linalg.svd(bent @ white.mT / white.shape[2] - slope * directions)
        directions = left @ right
    return cast(Tensor, _most_likely(white, directions, iterations) @ whitening)


def _most_likely(white: Tensor, directions: Tensor, iterations: int) -> Tensor:
    found = directions @ white
    one = torch.eye(white.shape[1], dtype=white.dtype, device=white.device)
    for _ in range(iterations):
        scale = found.square().mean(2, keepdim=True).sqrt()
        directions, found = directions / scale, found / scale
        inverse = 1 / (1 + found.square())
        score, slope = 2 * found * inverse, 2 * (1 - found.square()) * inverse.square()
        factor = 1 / (score * found).mean(2, keepdim=True)
        gradient = factor * (score @ found.mT / found.shape[2])
        curvature = (factor[..., 0] * slope.mean(2)).clamp_min(0.01)[..., None]
        together = (curvature * curvature.mT - 1).clamp_min(_LEAST_CURVATURE)
        step = (curvature.mT * gradient - gradient.mT) / together * (1 - one)
        step = step * (_LONGEST_STEP / step.norm(dim=2).amax(1).clamp_min(_LONGEST_STEP))[:, None, None]
        directions, found = directions - step @ directions, found - step @ found
    return directions


_ROUNDS = 10
_SURE = (0.8, 0.95)  # share of negative outputs, the lowest, taken for silent in the first and in the last round


def unmixed_by_silence(columns: Tensor, bias: Tensor, start: Tensor, projected: Tensor, shift: Tensor) -> Tensor | None:
    """Refine the matrix A (B, B) that unmixes a batch, using neurons that a ReLU sets to zero; ``None`` if that fails.

    The layer's inputs are A R, for a basis R of the rows of the weight's gradient G. ``columns``: G R^T (M, B).
    ``bias``: bias's gradient (M,). ``start``: first A. ``projected``: R W^T (B, M), W the weight. ``shift``: bias (M,).
    """
    # D^T = C A^-1 for the outputs' gradient D, zero at neurons silent for an image; C A^-1 1 = g gives sign and scale
    # G = D X^T and g = D 1, with X^T = A R for the orthonormal basis R (B, N) of the rows of G
    rows, triangle = torch.linalg.qr(columns)
    mixing = start
    for number in timely(range(_ROUNDS)):
        share = _SURE[0] + (_SURE[1] - _SURE[0]) * number / (_ROUNDS - 1)
        outputs = mixing @ projected + shift
        silent = outputs.argsort(1).argsort(1) < share * (outputs < 0).sum(1, keepdim=True)
        directions = torch.linalg.eigh(torch.stack([rows[own].T @ rows[own] for own in silent]))[1][..., 0].T
        scales = torch.linalg.lstsq(rows @ directions, bias[:, None]).solution[:, 0]
        mixing, failed = torch.linalg.inv_ex(torch.linalg.solve_triangular(triangle, directions * scales, upper=True))
        if failed or not mixing.isfinite().all():
            return None
    return mixing


_DIFFERENT = 1e-4  # least singular value of linearly independent images, as a share of the largest
_SILENT = 0.1  # share of zeros among the layer's signals above which a ReLU follows it
_RELABELED = 3  # number of searches for images with the labels of the images found before
_ALONE = 1 / 16  # share of differences of neighboring pixels that count as independent; less relies on noisy equations
_COMPONENTS = 0.5  # approximate share of the work that the search for components takes
_CHUNK_ELEMENTS = 1 << 24  # elements of weight gradients processed at a time (128 MB of float64)


@dataclass(frozen=True, kw_only=True)
class CocktailParty(GroupAttack):
    """Attack that separates the images of a batch in a first layer's gradient by independent component analysis.

    Components are chosen whose differences of neighboring pixels are independent and heavy-tailed (Kariyappa et al.,
    ICML 2023, "Cocktail Party Attack"). They are then refined until they reproduce the gradient, by the zeros of a ReLU
    after the layer or by the rest of the network. The layer needs as many outputs as examples or more, and images like
    photographs.

    Attributes:
        iterations: number of steps of FastICA, and of quasi-Newton steps after it.
        steps: largest number of Gauss-Newton steps; 0 skips the refinement.
    """

    of_rounds = "apart"

    iterations: int = 60
    steps: int = 20

    def __post_init__(self) -> None:
        whole("attack.iterations", self.iterations, at_least=1, example=60)
        whole("attack.steps", self.steps, at_least=0, example=20)

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        expect_images(first)
        expect_gradient(first)
        fixed = first.plan.batch_norm == "eval"
        layer = find_first_layer(first.model, first.assumed(), first.input_shape, fixed_norms=fixed)
        if missing := set(layer.names) - first.upload.tensors.keys():
            raise NotFullyConnectedError(f"{min(missing)} is expected, but was withheld; use attack=auto.")
        (outputs, pixels), count = first.upload.tensors[layer.weight].shape, first.upload.num_examples
        if outputs < count:
            raise NotAttackableError(
                f"At least {count} outputs of {layer.weight} are expected, one for each example, but got {outputs};"
                " use smaller batches."
            )
        if pixels < count:
            raise NotAttackableError(
                f"At least {count} inputs of {layer.weight} are expected, one for each example, but got {pixels};"
                " use smaller batches."
            )
        channels, height, width = first.input_shape
        if (pairs := (channels + (channels > 1)) * (height * (width - 1) + (height - 1) * width)) <= count:
            raise NotAttackableError(
                f"Over {count} pairs of neighboring pixels are expected, but got {pairs}; use smaller batches."
            )
        model = model_as_sent(first)

        def attacked(chunk: dict[int, Observation], shown: Report) -> dict[int, Reconstruction]:
            return self._taken_apart(chunk, layer, model, seed, shown)

        at_once = max(1, _CHUNK_ELEMENTS // first.upload.tensors[layer.weight].numel())
        with fitting_threads(count**2 * layer.shift.numel()):
            return in_parts(group.observations, at_once, "cocktail party", report, attacked)

    def _taken_apart(
        self, observations: Mapping[int, Observation], layer: FirstLayer, model: nn.Module, seed: int, report: Report
    ) -> dict[int, Reconstruction]:
        basis, inputs, enough = self._components(list(observations.values()), layer, seed)
        rows = {position: row for row, position in enumerate(observations)}

        def attacked(alone: dict[int, Observation], shown: Report) -> dict[int, Reconstruction]:
            ((position, observation),) = alone.items()
            shown(0.0)
            if not enough[row := rows[position]]:
                rank = len(basis[row])
                reason = f"A gradient of {layer.weight} of rank {rank} is expected, but got less; use attack=auto."
                return {position: failed(observation, reason)}
            mixed = _Mixed(Reproduction(observation, model), layer, basis[row])
            return {position: self._finished(mixed, inputs[row], shown)}

        results = in_parts(observations, 1, "victim", part_of(report, _COMPONENTS, 1.0), attacked)
        report(1.0)
        return results

    def _components(
        self, observations: Sequence[Observation], layer: FirstLayer, seed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Separate the inputs of ``layer`` by their independence, for V updates of B examples each.

        Return bases (V, B, N) of the gradients' rows, inputs (V, B, N), and a mask (V,) of gradients with full rank B.
        """
        count, shape = observations[0].upload.num_examples, observations[0].input_shape
        gradients = [as_gradient(observation) for observation in observations]
        weights, biases = (torch.stack([gradient[name] for gradient in gradients]) for name in layer.names)
        values, vectors = torch.linalg.eigh(weights.double() @ weights.double().mT)
        basis = torch.linalg.qr((vectors[..., -count:].mT @ weights.double()).mT)[0].mT
        enough = values[:, -count] > _RANK**2 * values[:, -1]
        starts = []
        for observation in observations:
            rng = derive_generator(seed, "cocktail_party", str(observation.id))
            starts.append(torch.linalg.qr(torch.randn(count, count, generator=rng, dtype=torch.float64))[0])
        features = neighbors((basis / layer.scale).reshape(-1, count, *shape))
        directions = independent_directions(features, torch.stack(starts).to(basis), iterations=self.iterations)
        return basis, unmixed(basis, directions, weights, biases), enough

    def _finished(self, mixed: "_Mixed", inputs: Tensor, report: Report) -> Reconstruction:
        unique = False
        if self.steps and mixed.differ(inputs) and (labels := mixed.classes(inputs)) is not None:
            found = mixed.behind_zeros(inputs, labels)
            if found is None:
                inputs = mixed.behind_network(inputs, labels, self.steps, report)
                found = mixed.behind_zeros(inputs, labels)
            if found is not None:
                inputs, unique = found, True
        shade = mixed.layer.pixels(torch.zeros_like(mixed.layer.shift))
        loss = float(residual(mixed.weight[None], mixed.bias[None], inputs[None]))
        read = Read(mixed.images(inputs), unique and not is_muted(mixed.weight, shade), loss)
        result, classes = certified(mixed.reproduction, read, ordered=False), mixed.classes(inputs)
        if result.batch is None or classes is None or result.certainty is not Certainty.APPROXIMATE:
            return result
        return replace(result, batch=Batch(result.batch.inputs, classes.cpu()))


class _Mixed:
    """A layer whose weight gradient mixes its N inputs; ``basis`` (B, N): orthonormal basis of the gradient's rows."""

    def __init__(self, reproduction: Reproduction, layer: FirstLayer, basis: Tensor) -> None:
        self.reproduction, self.layer, self.basis = reproduction, layer, basis
        observation = reproduction.observation
        gradient, sent = as_gradient(observation), observation.assumed().parameters
        self.weight, self.bias = gradient[layer.weight], gradient[layer.bias]  # G (M, N), g (M,)
        self._values = sent[layer.weight], sent[layer.bias]  # W (M, N), b (M,)
        path, self._shape = layer.weight.rpartition(".")[0], observation.input_shape
        behind = Behind(reproduction.model, path, self._shape, reproduction.loss)
        self._mixture = mixture_of(self.weight, self.bias, self._values, basis, behind)

    def images(self, inputs: Tensor) -> Tensor:
        return self.layer.pixels(inputs).reshape(len(inputs), *self._shape)

    def differ(self, inputs: Tensor) -> bool:
        values = torch.linalg.svdvals(inputs @ self.basis.T) if inputs.isfinite().all() else inputs.new_zeros(1)
        return bool(values[-1] > _DIFFERENT * values[0])

    def classes(self, inputs: Tensor) -> Tensor | None:
        return self.reproduction.classes(self.images(inputs).clamp(0, 1))

    def _is_silent(self, mixing: Tensor, labels: Tensor) -> bool:
        return float((self._mixture.signal(mixing, labels)[1] == 0).float().mean()) >= _SILENT

    def behind_zeros(self, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """Refine ``inputs`` (B, N) until inactive ReLUs explain the gradient's zeros; ``None`` if this fails."""
        mixing, count = inputs @ self.basis.T, len(inputs)
        if not self._is_silent(mixing, labels) or (columns := column_space(self.weight, count)) is None:
            return None
        guess = torch.linalg.solve_ex(mixing.T, (self.weight.double() @ self.basis.T).T)[0].T
        found = factors_near(guess, self.weight, self.bias, self._values, columns)
        return None if found is None or found.agreement < AGREEMENT else found.inputs

    def behind_network(self, inputs: Tensor, labels: Tensor, steps: int, report: Report) -> Tensor:
        """Fit ``inputs`` (B, N) to the observed gradient through the later layers, in at most ``steps`` steps.

        Return these or ``inputs``, whichever are likelier given the gradient and how photographs look.
        """
        first, mixture = inputs @ self.basis.T, self._mixture
        starts = [(first, labels)]
        if self._is_silent(first, labels):
            columns, bias = mixture.observed[:, :-1], mixture.observed[:, -1]
            found = unmixed_by_silence(columns, bias, first, mixture.projected, mixture.bias)
            classes = None if found is None else self.classes(found @ self.basis)
            starts += [] if found is None or classes is None else [(found, classes)]
        start = min(starts, key=self._unlikeliness)
        (mixing, labels), reached = start, []
        for number in timely(range(_RELABELED)):
            report((1 + number) / (2 + _RELABELED))
            mixing = unmixed_by_network(self._mixture, mixing, labels, steps=steps)
            reached.append((mixing, labels))
            following = self.classes(mixing @ self.basis)
            if following is None or torch.equal(following, labels):
                break
            labels = following
        end = min(reached, key=lambda tried: _or_worst(misfit(self._mixture, *tried)))
        return min(start, end, key=self._unlikeliness)[0] @ self.basis

    def _unlikeliness(self, tried: tuple[Tensor, Tensor]) -> float:
        equations, left = self._mixture.observed.numel(), _or_worst(misfit(self._mixture, *tried))
        fit = equations / 2 * math.log(left) if left > 0 else -math.inf
        return _or_worst(fit + _ALONE * float(unlikeliness(self._features, tried[0])))

    @cached_property
    def _features(self) -> Tensor:
        return neighbors((self.basis / self.layer.scale).reshape(1, len(self.basis), *self._shape))[0]


def _or_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
