"""Find the layer that the pixels enter, and solve for its inputs by the gradients of its weight and bias."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.attack import Report, timely
from fl_privacy.attacks.exact import certificate
from fl_privacy.attacks.exact.spear import AGREEMENT, columns_of, sparse_factors
from fl_privacy.attacks.gradient_inversion import labels as labeling
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, expect_gradient, failed, without_labels
from fl_privacy.attacks.gradient_inversion.labels import guessed_outputs, output_layer
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, as_gradient
from fl_privacy.checks import number
from fl_privacy.models import Rest
from fl_privacy.models.gradients import differentiable_twice, frozen_copy
from fl_privacy.models.gradients.hooks import entering, leaving, owners
from fl_privacy.models.losses import CROSS_ENTROPY, is_plain
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Reconstruction, Tensors
from fl_privacy.types.schema import schema_of


class NotFullyConnectedError(NotAttackableError):
    """Error for a model whose first layer gives no linear equations for the pixels; the message says why."""


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """A fully connected layer on pixels that were at most shifted and scaled individually.

    ``weight`` and ``bias`` name the parameters, (M, N) and (M,). The layer's N inputs are ``shift + scale * pixels``.
    """

    weight: str
    bias: str
    shift: Tensor
    scale: Tensor

    @property
    def names(self) -> tuple[str, str]:
        return self.weight, self.bias

    def pixels(self, inputs: Tensor) -> Tensor:
        return (inputs - self.shift) / self.scale


@dataclass(frozen=True, eq=False)
class Probed:
    """The first layer with parameters, and its inputs for a ``black``, a ``white`` and the noise image ``random``."""

    name: str
    module: nn.Module
    black: Tensor
    white: Tensor
    mixed: Tensor
    random: Tensor

    @property
    def one_by_one(self) -> bool:
        scale = self.white - self.black
        expected = self.black + scale * self.random.reshape(scale.shape)
        return torch.allclose(self.mixed, expected, rtol=1e-4, atol=1e-6) and bool(scale.all())


def find_first_layer(
    model: nn.Module, state: ModelState, input_shape: tuple[int, ...], *, fixed_norms: bool = False
) -> FirstLayer:
    """Find the first layer of ``model`` by passing test images of ``input_shape`` (C, H, W) through it.

    ``state``: model's values. ``fixed_norms``: ``True`` if batch norm uses the running statistics that the server sent.
    Raise ``NotFullyConnectedError`` if the layer is not fully connected, has no bias, or its inputs combine pixels.
    """
    seen = probe_first_layer(model, state, input_shape, fixed_norms=fixed_norms)
    name, module = seen.name, seen.module
    if not isinstance(module, nn.Linear) or module.bias is None:
        what = type(module).__name__ + ("" if getattr(module, "bias", None) is not None else " without bias")
        raise NotFullyConnectedError(
            f"The first layer is expected to be fully connected with a bias, but {name} is {what};"
            " use attack=dlg or another that optimizes images."
        )
    if seen.black.shape != (seen.random.numel(),):
        taken = (3, *seen.black.shape)
        raise NotFullyConnectedError(f"{name} is expected to take all pixels, but takes {taken}; use attack=dlg.")
    if not seen.one_by_one:
        raise NotFullyConnectedError(f"Pixels are expected to enter {name}, but are mixed before; use attack=dlg.")
    return FirstLayer(f"{name}.weight", f"{name}.bias", seen.black, seen.white - seen.black)


def probe_first_layer(
    model: nn.Module, state: ModelState, input_shape: tuple[int, ...], *, fixed_norms: bool = False
) -> Probed:
    """Return the first layer with parameters, and its inputs for three test images; see :func:`find_first_layer`."""
    values = next(iter(state.parameters.values()))
    frozen = frozen_copy(model, state, LocalPlan(batch_norm="eval"), device=values.device, dtype=values.dtype).eval()
    random = torch.rand(input_shape, generator=torch.Generator().manual_seed(0)).to(values)
    owning, watched = owners(frozen), dict[str, nn.Module]()
    for name, module in owning.items():
        inner = {id(each) for each in module.modules() if each is not module}
        holds_others = any(id(other) in inner for other in owning.values())
        norm = fixed_norms and isinstance(module, nn.modules.batchnorm._BatchNorm)
        if not norm and (isinstance(module, nn.MultiheadAttention) or not holds_others):
            watched[name] = module
    with torch.no_grad(), entering(watched) as calls:
        frozen(torch.stack([torch.zeros_like(random), torch.ones_like(random), random]))
    if not calls:
        raise NotFullyConnectedError("The model is expected to call a layer with parameters, but calls none; add one.")
    first = calls[0]
    if len(first.inputs) != 3:
        raise NotFullyConnectedError(f"{first.name} is expected to take images alone, but mixes them; use attack=dlg.")
    black, white, mixed = first.inputs
    return Probed(first.name, first.module, black, white, mixed, random)


def fit(weights: Tensor, biases: Tensor) -> Tensor:
    """Solve ``biases`` x^T = ``weights`` for each victim's x (V, N) by least squares over all rows."""
    w, b = weights.double(), biases.double()
    return torch.einsum("vm,vmn->vn", b, w) / b.square().sum(1, keepdim=True)


def distinct_ratios(weights: Tensor, biases: Tensor, *, count: int, smallest: float, alike: float) -> Tensor:
    """Return the ``count`` ratios W_i / b_i (V, count, N) that most rows i share, for each of V victims.

    A ratio is repeated only if there are fewer than ``count`` different ones. ``weights``: W (V, M, N). ``biases``: b
    (V, M), at least one not zero for each victim. ``smallest``: rows with abs(b_i) below this share of the largest are
    left out. ``alike``: ratios are the same up to this share of the longer one's length; at least 1e-6.
    """
    w, b = weights.double(), biases.double()
    sound = b.abs() > smallest * b.abs().amax(1, keepdim=True)
    ratios = (w / b[..., None]).masked_fill(~sound[..., None], 0.0)
    lengths = ratios.norm(dim=2)
    apart = torch.cdist(ratios, ratios, compute_mode="use_mm_for_euclid_dist")
    same = apart <= alike * torch.maximum(lengths[:, :, None], lengths[:, None])
    same &= sound[:, :, None] & sound[:, None]
    # among ratios with the same number of rows, that of the largest gradient
    score = same.sum(2) + b.abs() / (2 * b.abs().amax(1, keepdim=True))
    score = score.masked_fill(~sound, -torch.inf)
    victims, chosen = torch.arange(len(w), device=w.device), []
    for _ in range(count):
        best = score.argmax(1)
        chosen.append(ratios[victims, best])
        score = score - same[victims, best] * (score.shape[1] + 1.0)
    return torch.stack(chosen, 1)


def agreed_ratios(weight: Tensor, bias: Tensor) -> Tensor:
    """Find R distinct ratios ``weight[i] / bias[i]`` (R, N) that at least two rows i share, most frequent first."""
    sound = bias.abs() > 1e-4 * bias.abs().max()
    ratios = weight[sound].double() / bias[sound].double()[:, None]
    same = torch.cdist(ratios, ratios) <= 1e-3 * ratios.norm(dim=1)
    chosen, left = [], torch.ones(len(ratios), dtype=torch.bool)
    for row in same.sum(1).argsort(descending=True).tolist():
        if left[row] and int(same[row].sum()) > 1:
            chosen.append(row)
        left &= ~same[row]
    return ratios[chosen]


def residual(weights: Tensor, biases: Tensor, inputs: Tensor) -> Tensor:
    """Return the relative residual (V,) of ``biases`` x^T = ``weights``; each row uses the best of ``inputs``."""
    w, b, x = weights.double(), biases.double(), inputs.double()
    squared = w.square().sum(2)[..., None] + b.square()[..., None] * x.square().sum(2)[:, None]
    left = squared - 2 * b[..., None] * torch.einsum("vmn,vbn->vmb", w, x)
    return (left.amin(2).clamp_min(0).sum(1) / w.square().sum((1, 2))).sqrt()


_ROUNDS, _STARTS = 20, 64  # numbers of searches for sparse directions in the gradient of a batch, and of their starts
_ONE_HOT = 0.01  # largest distance of targets from those of one class


@dataclass(frozen=True, eq=False)
class HiddenFeatures:
    """A hidden layer's inputs ``values`` (B, N), float64, for a victim's examples, with ``labels``, in any order."""

    path: str
    values: Tensor
    labels: Tensor


def first_hidden_layer(observation: Observation) -> str | None:
    """Return the path of the first uploaded hidden linear layer, if any; ``None`` if batch norm mixes examples."""
    model, sent = observation.model, observation.upload.tensors
    normalizes = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if normalizes and observation.plan.batch_norm != "eval":
        return None
    values = next(model.parameters())
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), entering(owners(model)) as calls:
            model.eval()(values.new_zeros(2, *observation.input_shape))
    finally:
        for module, training in modes:
            module.training = training
    names = [call.name for call in calls]
    for call in calls[1:]:
        uploaded = f"{call.name}.weight" in sent and f"{call.name}.bias" in sent
        if isinstance(call.module, nn.Linear) and uploaded and names.count(call.name) == 1 and call.inputs.dim() == 2:
            return call.name
    return None


def hidden_features(reproduction: certificate.Reproduction, path: str, rng: torch.Generator) -> HiddenFeatures | None:
    """Reconstruct a batch's inputs to the layer named ``path`` by SPEAR (:mod:`fl_privacy.attacks.exact.spear`).

    ``reproduction``: attacked update, with its model. ``None`` if the result is not certain, or for a single image.
    """
    observation = reproduction.observation
    gradient, count = as_gradient(observation), observation.upload.num_examples
    weight, bias = gradient[f"{path}.weight"], gradient[f"{path}.bias"]
    # one image's are known (Gu et al. 2021, Lemma 1), but descents that match them reconstruct less
    if count == 1 or not bias.any():
        return None
    output = output_layer(observation.model, observation.num_classes)
    if (output and path == output[0].rpartition(".")[0]) or (basis := columns_of(weight, count)) is None:
        return None
    if basis.shape[1] < count and len(weight) <= max(count + 1, observation.num_classes):
        return None  # with so few outputs, different examples have a low rank, too
    if basis.shape[1] == 1:
        return _with_labels(reproduction, path, fit(weight[None], bias[None]))
    state = observation.assumed().parameters
    own = state[f"{path}.weight"], state[f"{path}.bias"]
    searched = sparse_factors(weight, bias, own, basis, rng=rng, starts=_STARTS)
    for _, factors in zip(timely(range(_ROUNDS)), searched, strict=False):
        if factors is not None and factors.agreement >= AGREEMENT:
            return _with_labels(reproduction, path, factors.inputs)
    return None


def _with_labels(reproduction: certificate.Reproduction, path: str, features: Tensor) -> HiddenFeatures | None:
    """Repeat each of R distinct ``features`` (R, N) as often as it occurs in the batch, and infer labels.

    ``path``: layer that the features enter. ``None`` if the numbers of occurrences or the labels are unclear.
    """
    rest = Rest(reproduction.model, path, reproduction.observation.input_shape)
    if len(features) < (size := reproduction.observation.upload.num_examples):
        times = certificate.times_of(reproduction, features, rest)(size)
        if times is None:
            return None
        features = features.repeat_interleave(torch.tensor(times, device=features.device), 0)
    labels = reproduction.labels(features, rest)
    if labels is not None and labels.is_floating_point():
        classes = labels.argmax(1)
        labels = classes if float((labels - F.one_hot(classes, labels.shape[1])).abs().max()) < _ONE_HOT else None
    return None if labels is None else HiddenFeatures(path, features, labels)


_CHUNK_ELEMENTS = 1 << 24  # elements of weight gradients solved at a time (128 MB of float64)


@dataclass(frozen=True, kw_only=True)
class AnalyticInversion(GroupAttack):
    """Attack that solves b x^T = W for the inputs x of a first layer (SPN, Fan et al. 2020, Eq. 7 and Theorem 2.1).

    W and b are the gradients of the layer's weight and bias. One example is the least squares solution, exact up to
    rounding. In a batch, a neuron i that only one example activates gives this example as W_i / b_i; the ratios that
    most neurons share are returned. Several local steps are treated as one. Updates by Adam are refused. ``smallest``:
    neurons with b_i below this share of the largest are left out, in [0, 1). ``alike``: relative distance up to which
    two ratios are the same, at least 1e-6.
    """

    of_rounds = "apart"

    smallest: float = 1e-4
    alike: float = 1e-2

    def __post_init__(self) -> None:
        number("attack.smallest", self.smallest, at_least=0, below=1, example=1e-4)
        number("attack.alike", self.alike, at_least=1e-6, example=1e-2)

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        expect_gradient(first)
        layer = find_first_layer(first.model, first.sent, first.input_shape)
        if missing := {layer.weight, layer.bias} - first.upload.tensors.keys():
            raise NotAttackableError(f"{min(missing)} is expected, but was withheld; use attack=auto.")
        at_once = max(1, _CHUNK_ELEMENTS // first.upload.tensors[layer.weight].numel())
        observations, results = list(group.observations.items()), dict[int, Reconstruction]()
        for start in range(0, len(observations), at_once):
            results |= self._solve(observations[start : start + at_once], layer)
            report(len(results) / len(observations))
        return results

    def _solve(self, members: Sequence[tuple[int, Observation]], layer: FirstLayer) -> dict[int, Reconstruction]:
        gradients = {position: as_gradient(observation) for position, observation in members}
        reason = f"{layer.bias} is expected, but its gradient is zero; check the upload."
        failures = {p: failed(o, reason) for p, o in members if not gradients[p][layer.bias].any()}
        members = [(p, o) for p, o in members if p not in failures]
        if not members:
            return failures
        weights, biases = (torch.stack([gradients[p][name] for p, _ in members]) for name in layer.names)
        if (count := members[0][1].upload.num_examples) == 1:
            inputs = fit(weights, biases)[:, None]
        else:
            inputs = distinct_ratios(weights, biases, count=count, smallest=self.smallest, alike=self.alike)
        losses = residual(weights, biases, inputs)
        return failures | {
            position: _reconstruction(observation, layer, found, loss)
            for (position, observation), found, loss in zip(members, inputs, losses.tolist(), strict=True)
        }


def _reconstruction(observation: Observation, layer: FirstLayer, inputs: Tensor, loss: float) -> Reconstruction:
    shape = (observation.upload.num_examples, *observation.input_shape)
    images, notes = certificate.within_range(
        layer.pixels(inputs).reshape(shape), solved=loss < certificate.ROUNDING, schema=schema_of(observation.model)
    )
    images = images.to(observation.precision)
    labels, source = observation.knowledge.labels, "known"
    if labels is None:
        labels, source = _inferred_labels(observation, images), "inferred"
    if labels is None:
        return without_labels(observation)
    batch = Batch(images.cpu(), labels.cpu())
    return Reconstruction(id=observation.id, batch=batch, loss=loss, history=(loss,), label_source=source, notes=notes)


def _inferred_labels(observation: Observation, images: Tensor) -> Tensor | None:
    output = labeling.output_layer(observation.model, observation.num_classes)
    if output is None:
        return None
    if not is_plain(observation.loss or CROSS_ENTROPY):
        return certificate.Reproduction(observation, certificate.model_as_sent(observation)).labels(images)
    sent = observation.assumed()
    values = next(iter(sent.parameters.values()))
    model = frozen_copy(observation.model, sent, observation.plan, device=values.device, dtype=values.dtype)
    outputs = guessed_outputs(model, images.to(values), output[0])
    gradient = {name: g / observation.plan.loss_scale for name, g in as_gradient(observation).items() if name in output}
    return labeling.infer_labels(gradient, output, len(images), *outputs)


_RANK = 1e-7  # singular values of the position embedding's gradient below this share of the largest are rounding errors
_ROUNDING = 1e-8  # least error of an element of a gradient, as a share of the root mean square of its elements
_ALIKE = 1e-6  # gradients are the same up to this share of their length, in double precision
_SURE = 1e-3  # largest expected error of a pixel of a unique solution
_MOST_OTHERS = 16  # largest number of tokens that are no patches, such as the class token


@dataclass(frozen=True, eq=False)
class PatchEmbedding:
    """A convolution on patches of P x P pixels that do not overlap, and the parameter that is added to its output.

    ``weight``, ``bias``: names of the convolution's parameters (D, C, P, P) and (D,). Its input is ``shift + scale *
    pixels``.
    """

    weight: str
    bias: str
    position: str  # name of the position embedding, of last dimension D
    first: int  # row of the first patch
    image: tuple[int, ...]  # (C, H, W)
    patch: tuple[int, int]
    shift: Tensor
    scale: Tensor

    @property
    def names(self) -> tuple[str, str, str]:
        return self.weight, self.bias, self.position

    def pixels(self, patches: Tensor) -> Tensor:
        return (F.fold(patches.T[None], self.image[1:], self.patch, stride=self.patch)[0] - self.shift) / self.scale

    def cut(self, image: Tensor) -> Tensor:
        return F.unfold(image[None], self.patch, stride=self.patch)[0].T


def find_patch_embedding(
    model: nn.Module, state: ModelState, input_shape: tuple[int, ...], *, fixed_norms: bool
) -> PatchEmbedding | None:
    """Find the model's patch embedding; ``None`` if the model's first layer is something else.

    If no layer has parameters, raise ``NotFullyConnectedError``. ``fixed_norms``: see :func:`find_first_layer`.
    """
    seen = probe_first_layer(model, state, input_shape, fixed_norms=fixed_norms)
    layer = seen.module
    if not isinstance(layer, nn.Conv2d):
        return None
    height, width = seen.random.shape[1:]
    alone = layer.stride == layer.kernel_size and layer.padding in ("valid", (0, 0)) and layer.dilation == (1, 1)
    whole = height % layer.kernel_size[0] == 0 and width % layer.kernel_size[1] == 0
    fits = seen.black.shape == seen.random.shape and layer.groups == 1 and layer.bias is not None
    found = _added(model, state, seen) if alone and whole and fits and seen.one_by_one else None
    if found is None:
        return None
    names, kernel = (f"{seen.name}.weight", f"{seen.name}.bias"), (layer.kernel_size[0], layer.kernel_size[1])
    return PatchEmbedding(*names, *found, input_shape, kernel, seen.black, seen.white - seen.black)


def solve(embedding: PatchEmbedding, gradients: Tensors) -> certificate.Read:
    """Solve for the single image (1, C, H, W) of an update, by least squares in float64.

    It is ``unique`` if the error estimated from redundant equations is small (APRIL, Lu et al. 2022, section 4).
    """
    own, (height, width) = embedding.image, embedding.patch
    position = gradients[embedding.position].double()
    # dL/dp_t for each patch x_t and its embedding p_t (D,): dL/dW = sum_t dL/dp_t x_t^T
    outputs = position.reshape(-1, position.shape[-1])[embedding.first :][: own[1] // height * (own[2] // width)]
    weight = gradients[embedding.weight].double().flatten(1)
    left, values, right = torch.linalg.svd(outputs, full_matrices=False)
    kept = values > _RANK * values[0]
    inverse = torch.where(kept, 1 / values.clamp_min(torch.finfo(values.dtype).tiny), 0.0)
    patches = (left * inverse) @ (right @ weight)
    apart, length = float((outputs.T @ patches - weight).norm()), float(weight.norm())
    (unknowns, equations), error = outputs.shape, math.inf
    if equations > unknowns and bool(kept.all()):
        deviation = max(apart / math.sqrt(1 - unknowns / equations), _ROUNDING * length) / math.sqrt(weight.numel())
        spread = math.sqrt(float(values.square().reciprocal().sum()) / unknowns)
        error = deviation * spread / float(embedding.scale.abs().min())
    muted = certificate.is_muted(weight, embedding.cut(-embedding.shift / embedding.scale))
    return certificate.Read(embedding.pixels(patches)[None], error < _SURE and not muted, apart / length)


def _added(model: nn.Module, state: ModelState, seen: Probed) -> tuple[str, int] | None:
    device = seen.random.device
    frozen = frozen_copy(model, state, LocalPlan(batch_norm="eval"), device=device, dtype=torch.float64)
    parameters = {name: value.requires_grad_() for name, value in frozen.named_parameters()}
    with differentiable_twice(), leaving({seen.name: frozen.get_submodule(seen.name)}) as calls:
        logits = frozen(seen.random.double()[None])
        output = calls[0].output
        loss = logits.logsumexp(1).sum() - logits[:, 0].sum()
        found = torch.autograd.grad(loss, [output, *parameters.values()], allow_unused=True)
    if found[0] is None or not found[0].any():
        return None
    tokens = found[0][0].flatten(1).T
    for name, gradient in zip(parameters, found[1:], strict=True):
        if gradient is None or gradient.dim() < 2 or gradient.shape[-1] != tokens.shape[1]:
            continue
        rows = gradient.reshape(-1, gradient.shape[-1])
        for first in range(min(len(rows) - len(tokens), _MOST_OTHERS) + 1):
            if float((rows[first : first + len(tokens)] - tokens).norm()) < _ALIKE * float(tokens.norm()):
                return name, first
    return None
