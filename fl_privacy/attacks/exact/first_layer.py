"""Find the fully connected layer that the pixels enter, and solve its linear systems b x^T = W for V victims.

W (V, M, N) and b (V, M) are the gradients of weight and bias, in double precision.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.exact.certificate import Reproduction
from fl_privacy.attacks.exact.repeats import times_of
from fl_privacy.attacks.exact.spear import AGREEMENT, columns_of, sparse_factors
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, as_gradient
from fl_privacy.models import Rest
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.gradients.hooks import entering, owners
from fl_privacy.types import LocalPlan, ModelState, Observation


class NotFullyConnectedError(NotAttackableError):
    """The reason why a model's first layer gives no linear system for its pixels."""


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """A fully connected layer on pixels that were at most shifted and scaled one by one.

    ``weight`` and ``bias`` name its parameters (M, N) and (M,); its input (N,) is ``shift + scale * pixels``.
    """

    weight: str
    bias: str
    shift: Tensor
    scale: Tensor

    @property
    def names(self) -> tuple[str, str]:
        return self.weight, self.bias

    def pixels(self, inputs: Tensor) -> Tensor:
        """Turn inputs of the layer (..., N) into pixels (..., N)."""
        return (inputs - self.shift) / self.scale


@dataclass(frozen=True, eq=False)
class Probed:
    """The first layer that images of zeros, ones and noise enter (``random``, (C, H, W)), and its inputs for them."""

    name: str
    module: nn.Module
    black: Tensor
    white: Tensor
    mixed: Tensor
    random: Tensor

    @property
    def one_by_one(self) -> bool:
        """Return ``True`` if each pixel was at most shifted and scaled."""
        scale = self.white - self.black
        expected = self.black + scale * self.random.reshape(scale.shape)
        return torch.allclose(self.mixed, expected, rtol=1e-4, atol=1e-6) and bool(scale.all())


def find_first_layer(
    model: nn.Module, state: ModelState, input_shape: tuple[int, ...], *, fixed_norms: bool = False
) -> FirstLayer:
    """Find the first layer of ``model`` at ``state`` by following test images of ``input_shape`` (C, H, W).

    ``fixed_norms`` is ``True`` if batch norm uses the statistics sent. If another layer comes first, it has no bias, or
    pixels are mixed before, raise ``NotFullyConnectedError``.
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
        raise NotFullyConnectedError(f"The layer {name} is expected to take all pixels, but takes {taken}.")
    if not seen.one_by_one:
        raise NotFullyConnectedError(f"The pixels are expected to enter {name} one by one, but they are mixed before.")
    return FirstLayer(f"{name}.weight", f"{name}.bias", seen.black, seen.white - seen.black)


def probe_first_layer(
    model: nn.Module, state: ModelState, input_shape: tuple[int, ...], *, fixed_norms: bool = False
) -> Probed:
    """Observe the inputs of the first layer with parameters."""
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
        raise NotFullyConnectedError("The model is expected to call a layer with parameters, but calls none.")
    first = calls[0]
    if len(first.inputs) != 3:
        raise NotFullyConnectedError(f"The layer {first.name} is expected to take image by image, but mixes them.")
    black, white, mixed = first.inputs
    return Probed(first.name, first.module, black, white, mixed, random)


def fit(weights: Tensor, biases: Tensor) -> Tensor:
    """Solve b x^T = W for x (V, N) by least squares over all rows."""
    w, b = weights.double(), biases.double()
    return torch.einsum("vm,vmn->vn", b, w) / b.square().sum(1, keepdim=True)


def distinct_ratios(weights: Tensor, biases: Tensor, *, count: int, smallest: float, alike: float) -> Tensor:
    """Find the ratios W_i / b_i (V, count, N) that most rows share, without repetitions if possible.

    Args:
        weights: (V, M, N).
        biases: (V, M), at least one not zero for each victim.
        smallest: rows with |b_i| below this share of the largest are left out.
        alike: ratios are the same up to this share of the longer one's length; at least 1e-6.
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
    """Find the different ratios W_i / b_i (R, N), of W (M, N), that at least two rows share, most rows first."""
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
    """Return ||W - b x^T|| / ||W|| (V,), with the best x of ``inputs`` (V, B, N) for each row."""
    w, b, x = weights.double(), biases.double(), inputs.double()
    squared = w.square().sum(2)[..., None] + b.square()[..., None] * x.square().sum(2)[:, None]
    left = squared - 2 * b[..., None] * torch.einsum("vmn,vbn->vmb", w, x)
    return (left.amin(2).clamp_min(0).sum(1) / w.square().sum((1, 2))).sqrt()


_ROUNDS, _STARTS = 20, 64  # numbers of searches for sparse directions in the gradient of a batch, and of their starts
_ONE_HOT = 0.01  # largest distance of targets from those of one class


@dataclass(frozen=True, eq=False)
class HiddenFeatures:
    """Inputs ``values`` (B, N), float64, of a hidden layer of a victim, and their ``labels`` (B,), in any order."""

    path: str
    values: Tensor
    labels: Tensor


def first_hidden_layer(observation: Observation) -> str | None:
    """Return the path of the first uploaded fully connected layer behind others; ``None`` if there is none.

    Batch statistics rule it out, since each image needs features of its own.
    """
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
        told = f"{call.name}.weight" in sent and f"{call.name}.bias" in sent
        if isinstance(call.module, nn.Linear) and told and names.count(call.name) == 1 and call.inputs.dim() == 2:
            return call.name
    return None


def hidden_features(reproduction: Reproduction, path: str, rng: torch.Generator) -> HiddenFeatures | None:
    """Reconstruct the inputs of the layer at ``path`` by :mod:`fl_privacy.attacks.exact.spear`; ``None`` if uncertain.

    One image is left to :class:`fl_privacy.attacks.ModelInversion`: matching its features, a quotient of gradients (Gu
    et al. 2021, Lemma 1), twice loses quality (LeNet with tanh, 600 evaluations: 47 instead of 54 dB).
    """
    observation = reproduction.observation
    gradient, count = as_gradient(observation), observation.upload.num_examples
    weight, bias = gradient[f"{path}.weight"], gradient[f"{path}.bias"]
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


def _with_labels(reproduction: Reproduction, path: str, features: Tensor) -> HiddenFeatures | None:
    """Repeat features (R, N) as often as they occur, with labels; ``None`` if either is not clear."""
    rest = Rest(reproduction.model, path, reproduction.observation.input_shape)
    if len(features) < (size := reproduction.observation.upload.num_examples):
        times = times_of(reproduction, features, rest)(size)
        if times is None:
            return None
        features = features.repeat_interleave(torch.tensor(times, device=features.device), 0)
    labels = reproduction.labels(features, rest)
    if labels is not None and labels.is_floating_point():
        classes = labels.argmax(1)
        labels = classes if float((labels - F.one_hot(classes, labels.shape[1])).abs().max()) < _ONE_HOT else None
    return None if labels is None else HiddenFeatures(path, features, labels)
