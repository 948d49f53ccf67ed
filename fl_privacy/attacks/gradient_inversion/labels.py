"""Choose a victim's labels: given, inferred from the output layer's gradient, or optimized."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.other_modalities import search_of
from fl_privacy.attacks.gradient_inversion.settings import LabelPolicy
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, as_gradient
from fl_privacy.models import Rest
from fl_privacy.models.gradients.hooks import entering, leaving
from fl_privacy.models.losses import CROSS_ENTROPY, Loss, is_plain
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation, Tensors

OutputLayer = tuple[str, str | None]  # names of the weight (K, F) and the bias (K,) of a model's last linear layer
_FITS = 1e-3  # share of the output layer's gradient that labels may leave unexplained
_PROBABILITY = 3e-4  # length added to slopes, for the rounding of probabilities near 0 or 1
_WHOLE = 1e-3  # largest distance of a probability from 0 or 1 to be rounded
_TRIALS = 32  # noise images that stand in for a batch whose labels are counted, for each of two labels


@dataclass(frozen=True, eq=False)
class Head:
    """A network's ``outputs`` (B, K), as a differentiable function of ``leaf`` (B, K), its last linear layer's."""

    leaf: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, network: nn.Module, inputs: Tensor, path: str, layer: nn.Module) -> "Head":
        with torch.no_grad(), leaving({path: layer}) as calls:
            network(inputs)
        leaf = calls[-1].output.detach().requires_grad_()
        with torch.enable_grad(), leaving({path: layer}, lambda *_: leaf):
            outputs = network(inputs)
        return cls(leaf, outputs)

    def slopes(self, loss: Loss, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            (found,) = torch.autograd.grad(loss(self.outputs, labels), self.leaf, retain_graph=True)
        return found


def labels_behind(head: Head, loss: Loss, slopes: Tensor) -> tuple[Tensor, float]:
    """Find labels for which the loss's gradient at the logits is ``slopes`` (B, K), and the fit's relative error."""
    found: list[tuple[Tensor, float]] = []
    if loss.targets == "classes":  # class weights and clipping change only the lengths of gradients
        each = (head.slopes(loss, torch.full_like(slopes[:, 0], k, dtype=torch.long)) for k in range(slopes.shape[1]))
        apart = [1 - F.cosine_similarity(own.double(), slopes.double(), dim=1, eps=1e-30) for own in each]
        least, classes = torch.stack(apart, 1).min(1)
        found.append((classes, float((2 * least.clamp_min(0)).sqrt().max())))
        if found[0][1] < _FITS or loss.takes == "indices":
            return found[0]
    rows = _target_rows(head, loss, slopes)
    found.append((rows, float((head.slopes(loss, rows) - slopes).norm()) / (float(slopes.norm()) + _PROBABILITY)))
    return min(found, key=lambda one: one[1])


def _target_rows(head: Head, loss: Loss, slopes: Tensor) -> Tensor:
    """Find label rows (B, K) for which the loss's gradient at the logits is ``slopes``; rows for classes sum to 1."""
    size, number = slopes.shape
    zeros = slopes.new_zeros(size, number)
    base = head.slopes(loss, zeros)
    if loss.targets != "classes":
        change = head.slopes(loss, zeros + 1) - base
        rows = (slopes - base) / torch.where(change.abs() > 0, change, 1)
        if loss.targets != "bits":
            return rows
        return (rows.round() if bool(((rows - rows.round()).abs() < _WHOLE).all()) else rows).clamp(0, 1)
    changes = [head.slopes(loss, row.repeat(size, 1)) - base for row in torch.eye(number).to(zeros)]
    system = torch.cat([torch.stack(changes, 2), slopes.new_ones(size, 1, number)], 1).double().cpu()
    right = torch.cat([slopes - base, slopes.new_ones(size, 1)], 1).double().cpu()
    solved: Tensor = torch.linalg.lstsq(system, right[:, :, None], driver="gelsd").solution[:, :, 0].clamp_min(0)
    return (solved / solved.sum(1, keepdim=True)).to(slopes)


@dataclass(frozen=True, eq=False)
class SingleExample:
    """A network's outputs for one example, and the loss's gradient ``slopes`` (1, K) with respect to its logits."""

    head: Head
    slopes: Tensor

    @classmethod
    def of(
        cls, model: nn.Module, shape: tuple[int, ...], layer: OutputLayer, gradient: Tensors
    ) -> "SingleExample | None":
        """Infer one example's outputs from the output layer's ``gradient``; ``None`` if it does not determine them."""
        weight, bias = layer
        if bias is None or not {weight, bias} <= gradient.keys():
            return None
        whole, slope = gradient[weight], gradient[bias]
        if not bool(slope.any()):
            return None
        features = whole.T @ slope / slope.square().sum()
        if float((whole - slope[:, None] * features).norm()) > _FITS * float(whole.norm()):
            return None
        path = weight.rpartition(".")[0]
        head = Head.of(Rest(model, path, shape), features[None], path, model.get_submodule(path))
        return cls(head, slope[None]) if head.leaf.shape == (1, len(slope)) else None


def counted_labels(
    model: nn.Module, loss: Loss, shape: tuple[int, ...], layer: OutputLayer, *, evidence: Tensor, size: int
) -> Tensor:
    """Infer B = ``size`` sorted labels from ``evidence`` (K,), a batch's summed gradient with respect to its logits.

    Each label's gradient is measured on noise images of ``shape``.
    """
    each = _mean_slopes(model, loss, shape, layer).to(evidence)
    labels = list[int]()
    for _ in range(size):
        labels.append(_best_addition(each, labels, evidence))
    for _ in range(2):
        for place in range(size):
            rest = labels[:place] + labels[place + 1 :]
            labels = [*rest[:place], _best_addition(each, rest, evidence), *rest[place:]]
    return torch.tensor(sorted(labels), device=evidence.device)


def _best_addition(each: Tensor, labels: Sequence[int], evidence: Tensor) -> int:
    return int(F.cosine_similarity(each + each[list(labels)].sum(0), evidence[None], dim=1, eps=1e-30).argmax())


def _mean_slopes(model: nn.Module, loss: Loss, shape: tuple[int, ...], layer: OutputLayer) -> Tensor:
    """Return, for each label (row), the loss's mean gradient (K, K) at noise images' logits, up to a factor."""
    like = next(model.parameters())
    noise = torch.rand((2 * _TRIALS, *shape), generator=torch.Generator().manual_seed(0)).to(like)
    path = layer[0].rpartition(".")[0]
    head, found = Head.of(model, noise, path, model.get_submodule(path)), []
    for label in range(head.leaf.shape[1]):
        labels = torch.zeros(2 * _TRIALS, dtype=torch.long, device=like.device)
        labels[:_TRIALS] = label
        slopes = head.slopes(loss, labels)
        own, first = slopes[:_TRIALS].mean(0), slopes[_TRIALS:].mean(0)
        found.append(own / first.norm().clamp_min(torch.finfo(like.dtype).tiny))  # a batch may normalize its weights
    return torch.stack(found)


def usual_outputs(
    model: nn.Module, shape: tuple[int, ...], layer: OutputLayer, rng: torch.Generator, gradient: Tensors | None = None
) -> tuple[Tensor, Tensor]:
    """Estimate the mean softmax (K,) and mean input (F,) of a client's output layer from random inputs.

    With the layer's ``gradient`` (of the mean loss, unscaled), the mean softmax is moved towards the one that follows
    from it if all examples have equal features. ``shape``: (C, H, W), or (L,) of tokens. ``rng``: on the CPU.
    """
    weight, bias = layer
    like = next(model.parameters())
    search = search_of(model)  # features by class (iLRG, Ma et al. 2023) find fewer labels on trained LeNets
    inputs = search.proxies(model, shape, rng)
    inputs = inputs.to(like) if inputs.is_floating_point() else inputs.to(like.device)
    each, features = _outputs(model, inputs, weight)
    if not search.corrects:
        return each.mean(0), features
    mean, equal = each.mean(0), 1 / each.shape[1]
    constant, apart = (mean - equal).square().sum(), (each - mean).square().sum(1).mean()
    found = equal + constant / (constant + apart).clamp_min(_least(like)) * (mean - equal)
    if gradient is not None and bias is not None and {weight, bias} <= set(gradient):
        # If all examples had the features h = G^T b / |b|^2, they would explain the share rho = |b h^T|^2 / |G|^2 of G.
        # d = softmax for h - 1 / K and e = mean softmax - 1 / K have independent errors; m = (d + e) / 2. The result is
        # rho (1 / K + w m) + (1 - rho) (uncorrected), with w = <d, e> / |m|^2 in [0, 1] (James and Stein 1961).
        answer, explained = _softmax_of_equal_features(model, (weight, bias), gradient)
        common, one, other = 0.5 * (answer + mean) - equal, answer - equal, mean - equal
        trust = ((one * other).sum() / common.square().sum().clamp_min(_least(like))).clamp(0, 1)
        found = explained * (equal + trust * common) + (1 - explained) * found
    return found, features


@torch.no_grad()
def _softmax_of_equal_features(model: nn.Module, layer: tuple[str, str], gradient: Tensors) -> tuple[Tensor, Tensor]:
    """Return the softmax (K,) if all examples had equal features, and the share of the gradient that this explains."""
    whole, residual = (gradient[name] for name in layer)
    size = residual.square().sum().clamp_min(_least(residual))
    features = whole.T @ residual / size
    explained = size * features.square().sum() / whole.square().sum().clamp_min(_least(whole))
    weight, bias = (model.get_parameter(name) for name in layer)
    return (weight @ features + bias).softmax(0), explained.clamp(0, 1)


def _least(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def guessed_outputs(model: nn.Module, inputs: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """Return mean softmax (K,) and mean input (F,) of the output layer for ``inputs``; ``layer``: its weight's name."""
    each, features = _outputs(model, inputs, layer)
    return each.mean(0), features


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    owner = layer.rpartition(".")[0]
    with entering({owner: model.get_submodule(owner)}) as calls:
        logits = model(inputs)
    return logits.softmax(1), calls[0].inputs.flatten(0, -2).mean(0)


_MOST_EXPECTED = 2.0**50  # largest inferred number of examples; a client may scale its upload by any factor


def choose_labels(
    observation: Observation, policy: LabelPolicy, model: nn.Module, *, loss_scale: float, seed: int
) -> tuple[Tensor | None, str]:
    """Return a victim's labels (B,) or (B, K) and their source: ``known``, ``inferred`` or ``optimized``.

    Labels to be optimized are ``None``. ``loss_scale``: factor of the client's loss, by which its gradient is divided.
    ``NotAttackableError`` if ``policy`` asks for labels that can't be obtained.
    """
    given, like = observation.knowledge.labels, next(model.parameters())
    if policy == "optimize":
        if observation.loss is not None and observation.loss.takes == "indices":
            raise NotAttackableError(
                f"Labels are expected to be optimized as rows (B, K), but {observation.loss.name} takes classes alone;"
                " use attack.labels=auto."
            )
        return None, "optimized"
    if policy != "infer" and given is not None:
        return given.to(like.device, like.dtype if given.is_floating_point() else torch.long), "known"
    if policy == "known":
        raise NotAttackableError(
            "Known labels are expected with attack.labels=known, but the attacker has none; use attack.labels=auto, or"
            " in Python observation.given(labels=labels)."
        )
    if getattr(model, "next_token", False):
        raise NotAttackableError(
            "Known next tokens are expected for a language model, but none are given; use attack=dager, or"
            " threat_model=knows_labels."
        )
    layer, loss = output_layer(model, observation.num_classes), observation.loss or CROSS_ENTROPY
    single = layer is None
    layer = layer or logit_layer(model, observation.num_classes)
    if layer is None:
        raise NotAttackableError("A linear output layer is expected, but got none; use attack.labels=optimize.")
    gradient = {n: g.to(like) / loss_scale for n, g in as_gradient(observation).items() if n in layer}
    if single:
        gradient = {name: torch.cat([-g, g]) for name, g in gradient.items()}
    if not is_plain(loss):
        return _labels_under_other_loss(observation, model, layer, gradient, policy)
    if observation.upload.num_examples == 1:  # needs no guessed input
        found = single_label(gradient, layer)
    else:
        generator = derive_generator(seed, "attack", str(observation.id), "labels")
        outputs = usual_outputs(model, observation.input_shape, layer, generator, None if single else gradient)
        found = infer_labels(gradient, layer, observation.upload.num_examples, *outputs)
    if found is None:
        raise NotAttackableError("The last layer's gradient is expected, but was withheld; use attack.labels=optimize.")
    return found, "inferred"


def policy_for(observation: Observation) -> LabelPolicy:
    """Return the label policy: ``optimize`` if neither given knowledge nor upload reveals labels, else ``auto``."""
    model, number = observation.model, observation.num_classes
    layer = output_layer(model, number) or logit_layer(model, number)
    seen = layer is not None and any(name in observation.upload.tensors for name in layer if name)
    seen = seen or getattr(model, "next_token", False)  # labels are the texts' own words
    return "auto" if seen or observation.knowledge.labels is not None else "optimize"


def output_layer(model: nn.Module, num_classes: int) -> OutputLayer | None:
    """Return the names of weight (K, F) and bias (K,) of the last linear layer with K outputs, if any."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features == num_classes}
    if not layers:
        return None
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    path, layer = list(layers.items())[-1]
    own = dict(layer.named_parameters(recurse=False))
    weight, bias = (first.get(id(own.get(name)), f"{path}.{name}".lstrip(".")) for name in ("weight", "bias"))
    return weight, None if layer.bias is None else bias


def logit_layer(model: nn.Module, num_classes: int) -> OutputLayer | None:
    """Return the names of weight (1, F) and bias (1,) of a last linear layer with one output, as before a sigmoid.

    Its output is the second of two logits, of which the first is 0. ``None`` for other last layers.
    """
    last = next((module for module in reversed(list(model.modules())) if isinstance(module, nn.Linear)), None)
    return output_layer(model, 1) if num_classes == 2 and last is not None and last.out_features == 1 else None


def _labels_under_other_loss(
    observation: Observation, model: nn.Module, layer: OutputLayer, gradient: Tensors, policy: LabelPolicy
) -> tuple[Tensor | None, str]:
    loss, size, shape = observation.loss or CROSS_ENTROPY, observation.upload.num_examples, observation.input_shape
    evidence = _evidence(gradient, layer)
    if evidence is not None and size == 1:
        single = SingleExample.of(model, shape, layer, gradient)
        if single is not None:
            return labels_behind(single.head, loss, single.slopes)[0], "inferred"
        if loss.targets == "classes":
            return evidence.argmin().view(1), "inferred"
        if loss.targets == "bits":
            return (evidence < 0).to(evidence)[None], "inferred"
    if evidence is not None and loss.targets == "classes":
        return counted_labels(model, loss, shape, layer, evidence=evidence, size=size), "inferred"
    if policy == "infer" or loss.takes == "indices":
        remedy = "attack.labels=auto threat_model=knows_labels" if loss.takes == "indices" else "attack.labels=optimize"
        raise NotAttackableError(f"A loss that reveals labels is expected, but got {loss.name}; use {remedy}.")
    return None, "optimized"


def nearest_counts(expected: Tensor, total: int, number: int) -> list[Tensor]:
    """Return up to ``number`` sorted label tensors (total,) whose class counts are nearest to ``expected`` (K,)."""
    first = torch.bincount(_to_labels(expected, total), minlength=len(expected)).to(expected)
    excess = first - expected
    # moving one label from class a to class b changes the squared distance by 2 (1 + excess_b - excess_a)
    same = torch.eye(len(first), dtype=torch.bool, device=first.device)
    cost = (excess[None, :] - excess[:, None]).masked_fill(same | (first == 0)[:, None], torch.inf).flatten()
    moves = cost.argsort(stable=True)[: int(cost.isfinite().sum())][: number - 1].tolist()
    found = [first]
    for move in moves:
        source, target = divmod(move, len(first))
        counts = first.clone()
        counts[source] -= 1
        counts[target] += 1
        found.append(counts)
    classes = torch.arange(len(first), device=first.device)
    return [classes.repeat_interleave(counts.long()) for counts in found]


def single_label(gradient: Tensors, layer: OutputLayer) -> Tensor | None:
    """Infer the label (1,) of a single example; ``None`` if the output layer's gradient was withheld.

    It is the index of the least entry of the bias gradient ``p - y`` or the weight's row sums (iDLG, Zhao et al. 2020).
    """
    evidence = _evidence(gradient, layer)
    return None if evidence is None else evidence.argmin().view(1)


def infer_labels(
    gradient: Tensors, layer: OutputLayer, batch_size: int, probabilities: Tensor, features: Tensor
) -> Tensor | None:
    """Infer the labels of a batch, sorted; ``None`` if the output layer's gradient was withheld.

    The counts are ``n_k = B (p_k - b_k)`` for the mean bias gradient ``b`` and the mean ``probabilities`` p (K,) of
    guessed inputs (similar to LLG, Wainakh et al. 2022), rounded to sum to B. Without a bias, ``b`` is the row sums
    divided by the sum of ``features`` (F,), the layer's mean input. ``gradient`` is that of the mean loss, unscaled.
    """
    if batch_size == 1:
        return single_label(gradient, layer)
    expected = expected_counts(gradient, layer, batch_size, probabilities, features)
    return None if expected is None else _to_labels(expected, batch_size)


def expected_counts(
    gradient: Tensors, layer: OutputLayer, batch_size: int, probabilities: Tensor, features: Tensor
) -> Tensor | None:
    """Estimate each class's count (K,) in a batch, not yet rounded; arguments as in :func:`infer_labels`."""
    evidence = _evidence(gradient, layer)
    if evidence is None:
        return None
    if layer[1] is None or layer[1] not in gradient:
        evidence = evidence / features.sum().clamp_min(torch.finfo(features.dtype).eps)
    return batch_size * (probabilities - evidence)


def _evidence(gradient: Tensors, layer: OutputLayer) -> Tensor | None:
    weight, bias = layer
    if bias is not None and bias in gradient:
        return gradient[bias]
    return gradient[weight].sum(1) if weight in gradient else None


def _to_labels(expected: Tensor, total: int) -> Tensor:
    wanted = expected.double().clamp(0, _MOST_EXPECTED)
    counts = wanted.floor()
    # the largest number that all can lose, down to 0, and still reach ``total``
    low, high = 0, int(counts.max().nan_to_num(0.0)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if float((counts - middle).clamp_min(0).sum()) >= total else (low, middle)
    counts = (counts - low).clamp_min(0)
    while counts.sum() > total:
        counts[(counts - wanted).masked_fill(counts == 0, -torch.inf).argmax()] -= 1
    while counts.sum() < total:
        counts[(wanted - counts).argmax()] += 1
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts.long())
