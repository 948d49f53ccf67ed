"""Solve for a batch's activations, also if batch norm in training mode mixes its examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.exact import certificate, first_layer, residual
from fl_privacy.attacks.exact.certificate import least_squares
from fl_privacy.attacks.exact.convolution import (
    MOST_NUMBERS,
    Convolution,
    Equations,
    Shown,
    Slopes,
    above_noise,
    conjugate_gradients,
    inputs_up_to_a_factor,
    solve,
    turn_gates,
)
from fl_privacy.attacks.exact.residual import (
    FITS,
    Known,
    Link,
    OwnStatistics,
    Residual,
    Step,
    enough,
    followed,
    heard,
    input_of,
    links,
    misses,
)
from fl_privacy.attacks.exact.spear import TURNED
from fl_privacy.attacks.gradient_inversion.infer_client import DRAWS
from fl_privacy.attacks.gradient_inversion.priors import of_batch
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.models.gradients.hooks import entering
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.types import Observation, Tensors

_ROUNDS = 12  # most corrections of the silent values; five reach the rounding of single precision
_SCALED = 1e-2  # largest relative residual of a norm's equations for the images' scales; rounding leaves 1e-5
_MISSED = 1e-3  # largest relative residual of a convolution between blocks
_SOLVED = 1e-6  # relative residual at which they stop
_KEPT = 1e-4  # eigenvalues below this share of the largest are directions that the gradient does not show
_FALLS = 0.9  # least factor by which a correction lowers the residual
_NONE = 1e-10  # eigenvalues below this share of the largest are rounding
_MOST_OPEN = 0.7  # largest number of unknowns along such directions for each known output
_LEAST_WEIGHT = 1e-4  # weights of a norm below this share of the largest show no values in front of it
_ROUNDED = 1e-6  # singular values below this share of the largest are rounding in single precision
_MOST_SCALE = 3.0  # largest factor by which silent values are scaled to their variance


@torch.no_grad()
def known_by_statistics(network: Residual, gradients: Tensors) -> Known:
    """Solve for the activations of a batch of B images, block by block toward the images.

    ``network`` holds its batch norms' statistics. ``gradients``: gradient (1, *shape) of each parameter, by name.
    """
    own = {name: value.double() for name, value in gradients.items()}
    none = torch.zeros(network.count, dtype=torch.bool, device=network.device)
    deepest: Known | None = None
    for link in timely(links(network)):
        hidden = _hidden(network, own, link)
        if hidden is None:
            continue
        values, first, every = hidden[0], link[0], torch.ones_like(none)
        known = Known({link[2]: values}, (), every, every, torch.zeros_like(values[:, 0, 0, 0]))
        if first is None:
            return known
        layer = network.convolution(first)
        places = layer.shape[1] * layer.shape[2]
        if places > residual.MOST_PLACES or layer.gradients * places * network.count > MOST_NUMBERS:
            return known
        behind = Slopes(network.convolution(link[3]).back(hidden[1]), values > 0)
        front = _front(network, own, first, behind, values)
        inputs, missed = _inputs(network, own, input_of(first), {first: front}, None)
        left = misses(network, input_of(first), inputs, link[2], values).clamp_min(missed)
        deepest = deepest or replace(known, left=known.left + left)
        if left.max() < FITS:
            known = replace(known, values={input_of(first): inputs}, left=known.left + left)
            if input_of(first) in network.cuts:  # equations behind values that stay unknown are left out
                known = replace(followed(network, own, known, _OwnStep), equations=())
            return known
    return deepest or Known({}, (), none, none, torch.ones(network.count).to(network.device))


def _hidden(network: Residual, own: Tensors, link: Link) -> tuple[Tensor, Tensor] | None:
    # returns inputs (B, C, H, W) of the chain's last convolution and the loss's gradient (B, O, P, Q) at its outputs
    _, norm, _, later = link
    layer, bias = network.convolution(later), own[f"{norm.target}.bias"][0]
    blind = inputs_up_to_a_factor(layer, own[f"{later.target}.weight"][0], network.count)
    if blind is None or not blind.unique:
        return None
    inputs = above_noise(blind.values * blind.values.sum((1, 2, 3), keepdim=True).sign())
    module, (down, across) = layer.module, layer.padding
    seen = (
        F.unfold(inputs, module.kernel_size, module.dilation, (down, across), module.stride).transpose(0, 1).flatten(1)
    )
    slopes = least_squares(seen, own[f"{later.target}.weight"][0].flatten(1).T).T
    slopes = slopes.reshape(len(slopes), network.count, *blind.slopes.shape[2:]).transpose(0, 1)
    sums = (layer.back(slopes) * (inputs > 0)).sum((2, 3))
    scales = least_squares(sums.T, bias[:, None])
    if (scales > 0).all() and (sums.T @ scales - bias[:, None]).norm() < _SCALED * bias.norm():
        scales = scales[..., None, None]
        return inputs / scales, slopes * scales
    return None


@dataclass(eq=False)
class _Front:
    """Estimator of the loss's gradient between a convolution and the batch norm after it.

    That gradient depends on the norm's outputs. They are known where the ReLU after the norm is active (``values``),
    and elsewhere estimated by :meth:`learn`. ``behind``: loss's gradient at the norm's outputs.
    """

    layer: Convolution
    norm: OwnStatistics
    of_norm: tuple[Tensor, Tensor]  # gradients (1, O) of bias and weight
    behind: Slopes
    values: Tensor | None

    def __post_init__(self) -> None:
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None
        own = norm.running_mean, norm.running_var, *self.of_norm
        mean, variance, self.by_bias, self.by_weight = (each[..., None, None] for each in own)
        self.weight, self.bias = (each.view(-1, 1, 1) for each in (norm.weight, norm.bias))
        self.deviation, bias = (variance + norm.eps).sqrt(), self.layer.module.bias
        self.offset = mean if bias is None else mean - bias.view(-1, 1, 1)
        self.live = self.weight.abs() > _LEAST_WEIGHT * self.weight.abs().max()
        self.places = self.behind.full[:, 0].numel()
        values = torch.zeros_like(self.behind.full) if self.values is None else self.values
        self.gates = self.live & (values > 0)
        self.known = torch.where(self.gates, (values - self.bias) / self.weight, 0)
        self.number = (~self.gates).sum((0, 2, 3), keepdim=True).clamp_min(1)
        self.center = -self._average(self.known)
        # all values of a channel have mean 0, and a known variance, over all images
        share = self.places * variance / self.deviation.square() / self.number
        self.wanted = (share - self._average(self.known.square()) - self.center.square()).clamp_min(0)
        self.z = self._completed(torch.zeros_like(self.known))

    def _average(self, of: Tensor) -> Tensor:
        return of.sum((0, 2, 3), keepdim=True) / self.number

    def _completed(self, guess: Tensor) -> Tensor:
        middle = self._average(guess * ~self.gates)
        spread = self._average((guess - middle).square() * ~self.gates)
        scale = torch.where(spread > 0, (self.wanted / spread).sqrt(), 0).clamp_max(_MOST_SCALE)
        return torch.where(self.gates, self.known, (guess - middle) * scale + self.center)

    @property
    def slopes(self) -> Slopes:
        scale = self.weight / self.deviation
        # for N places: weight / deviation * (s - b / N - w z / N), Ioffe and Szegedy 2015
        moved = None if self.norm.fixed else scale * (self.by_bias + self.z * self.by_weight) / self.places
        return Slopes(scale * self.behind.full, self.behind.open, moved)

    def learn(self, inputs: Tensor) -> None:
        """Estimate unknown outputs of the batch norm from guessed ``inputs`` (V, C, H, W) of the convolution."""
        z = (self.layer.outputs(inputs) - self.offset) / self.deviation
        if self.values is not None:  # the ReLU silenced them
            silent = ((self.weight * z + self.bias).clamp(max=0) - self.bias) / self.weight
            z = torch.where(self.live, silent, 0)
        self.z = self._completed(z)


def _front(network: Residual, own: Tensors, convolution: fx.Node, behind: Slopes, values: Tensor | None) -> _Front:
    (node,) = convolution.users
    norm = network.graph.layer(node)
    assert isinstance(norm, OwnStatistics)
    of_norm = own[f"{node.target}.bias"], own[f"{node.target}.weight"]
    return _Front(network.convolution(convolution), norm, of_norm, behind, values)


@dataclass(eq=False)
class _OwnStep(Step):
    """A :class:`Step` for networks whose batch norms use the batch's own statistics."""

    fronts: dict[fx.Node, _Front] = field(default_factory=dict)

    def _behind_norm(self, node: fx.Node, own: Slopes) -> dict[fx.Node, Slopes] | None:
        before = input_of(node)
        if self.network.graph.kind(before) != "conv" or len(before.users) > 1:
            return None
        known = {self.at: self.outputs, **self.values}
        values = next((known[one] for one in node.users if one in known), None)
        self.fronts[before] = _front(self.network, self.gradients, before, own, values)
        return {before: own}

    def _behind_convolution(self, node: fx.Node, own: Slopes) -> dict[fx.Node, Slopes] | None:
        given, front = input_of(node), self.fronts.get(node)
        if front is None:
            return super()._behind_convolution(node, own)
        if given is self.before:
            return super()._behind_convolution(node, front.slopes)
        equations = Equations(front.layer, own, self.gradients[f"{node.target}.weight"])
        if given in self.values or not enough([equations]):
            return None
        found, left = _inputs(self.network, self.gradients, given, {node: front}, None)
        if left > _MISSED:
            return None
        self.values[given] = found
        return {given: Slopes(front.layer.back(front.slopes.values))}

    def solved(self) -> Tensor | None:
        if not enough(self.equations):
            return None
        fronts = {node: front for node, front in self.fronts.items() if input_of(node) is self.before}
        found, left = _inputs(self.network, self.gradients, self.before, fronts, self.shown())
        return found if left < FITS else None


def _inputs(
    network: Residual, own: Tensors, given: fx.Node, fronts: Mapping[fx.Node, _Front], shown: Shown | None
) -> tuple[Tensor, float]:
    """Solve for the value (B, C, H, W) of node ``given``, which enters convolutions; also return the residual.

    ``own``: gradients by parameter's name. ``fronts``: estimator for each of the convolutions. ``shown``: known inputs.
    """
    best = torch.zeros(network.count, *network.shapes[given], dtype=torch.float64, device=network.device)
    least, turned, relu = torch.inf, False, network.graph.kind(given) == "relu"
    for _ in timely(range(_ROUNDS)):
        equations = [
            Equations(front.layer, front.slopes, own[f"{node.target}.weight"]) for node, front in fronts.items()
        ]
        found = _solved(next(iter(fronts.values())), equations[0], shown) if len(fronts) == 1 else None
        ends = [torch.linalg.eigvalsh(each.left[0].T @ each.left[0])[[0, -1]] for each in equations if found is None]
        if not all(low > _NONE * high for low, high in ends):
            break
        found = solve(equations, shown)[0] if found is None else found
        apart = [(each.left @ each.joined(found).mT - each.right).norm() / each.right.norm() for each in equations]
        left = float(max(apart))
        stalls = left > _FALLS * least
        best, least = (found, left) if left < least else (best, least)
        if least < _SOLVED or (stalls and turned):
            break
        turned = stalls
        for each in equations if stalls else ():
            turn_gates(each)
        for front in fronts.values():
            front.learn(found.clamp(min=0) if relu else found)
    best = heard(network, given, best)
    for front in fronts.values():
        front.learn(best)
    return best, least


def _solved(front: _Front, own: Equations, shown: Shown | None) -> Tensor | None:
    # solves for the convolution's inputs (B, C, H, W) by its equations, its known outputs and the inputs ``shown``
    layer, gates, left = front.layer, front.gates, own.left[0]
    values, vectors = torch.linalg.eigh(left.T @ left)
    clear = values > _KEPT * values[-1]
    seen, free = vectors[:, clear], vectors[:, ~clear]
    found: Tensor = (seen / values[clear] @ (seen.T @ (left.T @ own.right[0]))).T
    count, channels, shape = free.shape[1], layer.shape[0], (layer.shape[0], len(gates), *layer.shape[1:])
    number = int(gates.sum()) + (int((shown[0] > 0).sum()) if shown else 0)
    if not 0 < count * channels <= _MOST_OPEN * number:
        return None
    found = found.reshape(shape).transpose(0, 1)

    def along(values: Tensor) -> Tensor:
        inputs: Tensor = (values.reshape(channels, count) @ free.T).reshape(shape).transpose(0, 1)
        return inputs

    def across(outputs: Tensor, inputs: Tensor) -> Tensor:
        sums = layer.back(outputs * gates) + (0 if shown is None else inputs)
        flat: Tensor = (sums.transpose(0, 1).flatten(1) @ free).reshape(1, -1)
        return flat

    def normal(values: Tensor) -> Tensor:
        inputs = along(values)
        return across(layer.outputs(inputs), inputs * often)

    often, sums = shown or (torch.zeros_like(found), torch.zeros_like(found))
    rest = front.known * front.deviation + front.offset - layer.outputs(found)
    right = across(rest, sums - often * found)
    return found + along(conjugate_gradients(normal, right, torch.ones_like(right)))


_SPARE = 8  # equations beyond the unknowns that confirm a solution
_NOISE = 3.0  # differences have singular values above this multiple of those that are rounding
_FAINT = (0.0, 1e-5, 1e-2)  # shares of the largest gradient up to which dropout or weight decay may hide a sign
_STARTS, _REFLECTIONS, _TURNS = 64, 600, 60  # starts and steps of a search for signs, and corrections of each
_AT_LIMIT = 1e-3  # distance from a limit, as a share of the range, at which an input is determined by it
_DISAGREES = 0.1  # relative residual of mean and variance above which they are of other examples, or noise
_LEAST_SQUARE = 1e-3  # variance below which errors are not relative, as a share of the mean
_INSIDE = 500  # corrections of a mean input that the outputs leave open


@dataclass(frozen=True, eq=False)
class NormalizedOutputs(first_layer.FirstLayer):
    """A model's first fully connected layer, followed directly by the batch norm named ``norm`` in training mode."""

    norm: str
    mean: Tensor  # (M,) of the batch's outputs
    variance: Tensor


def find_normalized_outputs(observation: Observation) -> NormalizedOutputs | None:
    """Find the model's :class:`NormalizedOutputs` layer; ``None`` if there is none, or its statistics are unknown."""
    plan, sent, size = observation.plan, observation.assumed(), observation.upload.num_examples
    one_step = plan.shares == "gradient" or number_of_steps(size, plan) == 1
    if plan.batch_norm != "train" or not one_step or size == 1 or not observation.upload.buffers:
        return None
    seen = first_layer.probe_first_layer(observation.model, sent, observation.input_shape)
    if not isinstance(seen.module, nn.Linear) or not seen.one_by_one or seen.black.shape != (seen.random.numel(),):
        return None
    like, draws = seen.black, plan.mode == "train" or DRAWS in observation.notes
    model, kind = detached_copy(observation.model).to(like).train(draws), nn.modules.batchnorm._BatchNorm
    first = model.get_submodule(seen.name)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, kind) and module.affine}
    with torch.no_grad(), torch.random.fork_rng(), entering({seen.name: first, **norms}) as calls:
        torch.manual_seed(0)
        model(seen.random.expand(2, *seen.random.shape))
    given, *later = calls
    if not torch.allclose(given.inputs, seen.mixed, rtol=1e-4, atol=1e-6):
        return None  # the client changes inputs at random before the layer
    with torch.no_grad():
        outputs = first(given.inputs)
    norm = next((each.name for each in later if torch.equal(each.inputs, outputs)), "")
    if not norm or not (found := of_batch(observation, norm, size)):
        return None
    parameters, scale = (f"{seen.name}.weight", f"{seen.name}.bias"), seen.white - like
    return NormalizedOutputs(*parameters, like, scale, norm, *found.values())


@dataclass(frozen=True, eq=False)
class Centered:
    """Inputs of a :class:`NormalizedOutputs` layer for B examples, solved up to a rotation of their differences.

    They are ``center + P @ differences`` for a rotation P (B, R) with orthonormal columns that each sum to 0.
    """

    count: int
    center: Tensor  # mean input (N,), of least norm if the layer's M outputs leave it open
    differences: Tensor  # basis (R, N) of the inputs' differences
    joined: Tensor  # gradient (M, R + 1) of a layer with the orthogonal inputs (P, 1 / sqrt(B)) and the norm's outputs
    values: Tensor  # weight (M, R + 1) of that layer
    weight: Tensor  # weight (M, N) of the first layer
    limits: tuple[Tensor, Tensor]  # least and largest inputs (N,)
    left: float  # relative residual of the batch's mean and variance
    sure: bool  # ``True`` if they have more equations than unknowns

    def inputs(self, rows: Tensor, completed: int = 0) -> tuple[Tensor, bool] | None:
        """Return the inputs (B, N) for a rotation P, and ``True`` if they are unique; ``None`` if P is not orthogonal.

        ``rows``: (R + 1, R + 1) distinct rows of the matrix (P, 1 / sqrt(B)), each up to a factor. ``completed``:
        number of last rows that were not found, but completed by orthogonality. One or two completed rows can be
        unique.
        """
        rows = rows / rows.norm(dim=1, keepdim=True) * rows[:, -1:].sign()
        times = (self.count * rows[:, -1].square()).round().clamp(1, self.count)
        if len(rows) != self.joined.shape[1] or int(times.sum()) != self.count:
            return None
        roots = times.sqrt()[:, None]
        own, even = rows[:, :-1], roots / self.count**0.5
        if float((own @ own.T + even @ even.T - torch.eye(len(own)).to(own)).abs().max()) > TURNED:
            return None
        left, _, right = torch.linalg.svd(own - even @ (even.T @ own), full_matrices=False)
        apart = left @ right / roots @ self.differences
        center, determined = self._center(apart)
        determined &= completed < 2 or (completed == 2 and int(times[-1]) == 1)
        return (center + apart).repeat_interleave(times.long(), 0), determined

    def _center(self, apart: Tensor) -> tuple[Tensor, bool]:
        # returns the mean input (N,), within the limits if outputs leave it open, and whether it is unique
        rank, features = int(torch.linalg.matrix_rank(self.weight, rtol=_KEPT)), self.weight.shape[1]
        if len(self.weight) - _SPARE >= rank == features:
            return self.center, True
        inverse, (low, high) = torch.linalg.pinv(self.weight), self.limits
        low, high = low - apart.amin(0), high - apart.amax(0)
        found = middle = ((low + high) / 2).nan_to_num(0.0, 0.0, 0.0)
        low, high = torch.minimum(low, middle), torch.maximum(high, middle)
        for _ in timely(range(_INSIDE)):
            exact = found + self.center - inverse @ (self.weight @ found)
            found = torch.minimum(torch.maximum(exact, low), high)
        size = self.limits[1] - self.limits[0]
        inside = ((exact - found).abs() <= _AT_LIMIT * size).all()
        free = (found - low).abs().minimum((high - found).abs()) > _AT_LIMIT * (high - low)
        return exact, bool(inside) and (rank == features or rank - int(free.sum()) >= _SPARE)


def centered(observation: Observation, layer: NormalizedOutputs) -> Centered | None:
    """Solve for a batch's inputs up to a rotation; ``None`` if statistics and gradients do not determine them."""
    count, sent, own = observation.upload.num_examples, observation.assumed().parameters, as_gradient(observation)
    weight, norm = sent[layer.weight].double(), observation.model.get_submodule(layer.norm)
    names = layer.weight, f"{layer.norm}.bias", f"{layer.norm}.weight"
    if not own.keys() >= set(names):
        return None
    gradient, by_bias, by_scale = (own[name].double() for name in names)
    scale, shift = (sent[f"{layer.norm}.{kind}"].double() for kind in ("weight", "bias"))
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    deviation = (layer.variance + norm.eps).sqrt()
    if not layer.variance.any() or not scale.all():
        return None
    # For inputs X = 1 m^T + C, the rows of the gradient span those of C, since batch norm's slopes sum to 0. The
    # outputs have the mean W m + b and the variances diag(W C^T C W^T) / B.
    solved = _differences(weight, gradient, count, layer.variance) if count > 2 else None
    if count == 2:
        solved = _one_difference(weight, gradient, by_scale * scale, layer.variance.sqrt())
    if solved is None:
        return None
    differences, missed, spare = solved
    outputs = layer.mean - sent[layer.bias].double() if layer.bias in sent else layer.mean
    center = least_squares(weight, outputs[:, None])[:, 0]
    missed = max(missed, float((weight @ center - outputs).norm() / layer.variance.sqrt().norm()))
    if missed > _DISAGREES:
        return None
    limits = layer.shift + layer.scale * certificate.limits_of(observation.model, layer.shift)
    normalized = differences @ weight.T / deviation
    behind = torch.linalg.pinv(differences).T @ gradient.T * deviation / scale + normalized * by_scale / count
    return Centered(
        count=count,
        center=center,
        differences=differences,
        joined=torch.cat([behind.T, by_bias[:, None] / count**0.5], 1),
        values=torch.cat([(scale * normalized).T, shift[:, None] * count**0.5], 1),
        weight=weight,
        limits=(limits.amin(0).double(), limits.amax(0).double()),
        left=missed,
        sure=min(spare, len(weight) - weight.shape[1]) >= _SPARE,
    )


def _one_difference(weight: Tensor, gradient: Tensor, by_scale: Tensor, sizes: Tensor) -> tuple[Tensor, float, int]:
    # returns difference (1, N) over sqrt(2), residual, spare equations; ``sizes``: half the outputs' distances (M,)
    # the outputs' signs follow from those of the gradients, which Adam's steps keep; others are tried, too
    along = torch.linalg.svd(gradient, full_matrices=False)[2][0]
    before, slopes = weight @ along, gradient @ along
    starts, signs = [before.sign()], slopes.sign() * by_scale.sign()
    for share in _FAINT:
        clear = (slopes.abs() > share * slopes.abs().max()) & (by_scale.abs() > share * by_scale.abs().max())
        first = least_squares(weight[clear], (signs * sizes)[clear, None])
        starts.append(torch.where(clear, signs, (weight @ first)[:, 0].sign()))
    spare, inverse = len(weight) - weight.shape[1], torch.linalg.pinv(weight)

    def solved(signs: Tensor) -> tuple[Tensor, float]:
        for _ in range(_TURNS):
            outputs, last = signs * sizes[:, None], signs
            lengths = before @ outputs / before.square().sum()
            found = inverse @ (outputs - before[:, None] * lengths) + along[:, None] * lengths
            signs = (weight @ found).sign()
            if torch.equal(signs, last):
                break
        apart = ((weight @ found).abs() - sizes[:, None]).norm(dim=0) / sizes.norm()
        return found[:, apart.argmin()], float(apart.min())

    found, left = solved(torch.stack(starts, 1))
    if left > certificate.ROUNDING and spare >= weight.shape[1]:
        rng = torch.Generator().manual_seed(0)
        state = torch.randn(len(weight), _STARTS, generator=rng, dtype=torch.float64).to(weight) * sizes[:, None]
        for _ in timely(range(_REFLECTIONS)):  # as in phase retrieval (Elser 2003)
            near = state.sign() * sizes[:, None]
            state = state + weight @ (inverse @ (2 * near - state)) - near
        found, left = min((found, left), solved(state.sign()), key=lambda pair: pair[1])
    return 2**0.5 * found[None], left, spare


def _differences(weight: Tensor, gradient: Tensor, count: int, variance: Tensor) -> tuple[Tensor, float, int] | None:
    # returns a basis (R, N) of the inputs' differences, its residual, and the number of spare equations
    _, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
    noise = torch.cat([_ROUNDED * sizes[:1], _NOISE * sizes[count - 1 :]]).max()
    rank = min(count - 1, int((sizes > noise).sum()))
    before, spare = weight @ right[:rank].T, len(weight) - rank * (rank + 1) // 2
    if spare < 0 or not rank or len(weight) ** 2 > MOST_NUMBERS:
        return None
    first, second = torch.triu_indices(rank, rank)
    products = before[:, first] * before[:, second] * torch.where(first == second, 1.0, 2.0).to(before)
    shares = 1 / variance.clamp_min(_LEAST_SQUARE * variance.mean())[:, None]
    products, squares = products * shares, count * variance[:, None] * shares
    found = least_squares(products, squares)
    form = weight.new_zeros(rank, rank)
    form[first, second] = form[second, first] = found[:, 0]
    values, vectors = torch.linalg.eigh(form)
    if not values[0] > 0:
        return None
    missed = float((products @ found - squares).norm() / squares.norm())
    return values.sqrt()[:, None] * vectors.T @ right[:rank], missed, spare
