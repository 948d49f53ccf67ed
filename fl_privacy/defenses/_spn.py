"""SPN: gradients perturbed by the loss of a private head."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy import checks
from fl_privacy.defenses._soteria import linear_layers, maker_of
from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.effects import Part, PrivateLoss
from fl_privacy.errors import UserError
from fl_privacy.models.gradients.hooks import entering, leaving
from fl_privacy.types import Batch, Tensors

HEAD = "spn"  # name of the private head within the linear layer whose input it shares


def spn(
    *,
    alpha1: float = 1.0,
    alpha2: float = 0.1,
    bits: int = 64,
    margin: float = 1.0,
    layer: str | None = None,
    bound: float | None = None,
    widths: Sequence[int] | None = None,
) -> Defense:
    """Train with the loss alpha1 CE + alpha2 LP, whose second term perturbs the upload (SPN, Fan et al. 2020, Eq. 4).

    CE is the cross entropy. A private head, layers that each client keeps, gets the inputs of ``layer``. The
    polarization loss LP pulls the head's output to a random code of the example's class. The gradient of LP perturbs
    that of earlier layers. In the paper's experiments, alpha1 is 1. The client's seed reveals head and codes.

    Args:
        alpha1: factor of CE, above 0. Reports count (alpha1 - 1) times its gradient as perturbation.
        alpha2: factor of LP, at least 0.
        bits: length K of the codes (32, 64 or 128 in the paper).
        margin: margin m of LP (Eq. 5), at least 1.
        layer: linear layer whose inputs the private head takes; ``None`` takes the last one.
        bound: bound of the private head's initial weights, U(-bound, bound), above 0; ``None`` takes that layer's
            spread, like the paper. The perturbation grows with it.
        widths: widths of further private layers before the last, each followed by ReLU; ``None`` adds none. The paper
            has "fully connected polarization layers" (section 3.1), without number, widths or activation.
    """
    _expect(alpha1, alpha2, bits, bound, margin)
    layers = _layers(widths)

    def on_model(model: nn.Module, state: ClientState, rng: torch.Generator) -> nn.Module:
        return _with_private_head(model, rng, layer=layer, bits=bits, bound=bound, widths=layers)

    @contextmanager
    def on_loss(model: nn.Module, values: Tensors, batch: Batch) -> Iterator[Callable[[Tensor], Tensor]]:
        path, head = next((name, m) for name, m in model.named_modules() if isinstance(m, PolarizationHead))
        own = {name: values[f"{path}.{name}"] for name in head.state_dict()}
        host = path.rpartition(".")[0]
        entered, returned = entering({host: model.get_submodule(host)}), leaving({"": model})
        with entered as seen, returned as made, leaving(linear_layers(model)) as called:

            def polarize(loss: Tensor) -> Tensor:
                if alpha2 == 0:
                    return alpha1 * loss
                logits = made[-1].output
                _expect_fitting(host, layer, maker_of(logits, called) if called else host, logits, own["codes"])
                outputs = functional_call(head, own, (_features(host, [call.inputs for call in seen]),))
                return alpha1 * loss + alpha2 * polarization_loss(outputs, own["codes"], batch.labels, margin)

            yield polarize

    options = {"alpha1": alpha1, "alpha2": alpha2, "bits": bits, "margin": margin, "layer": layer, "bound": bound}
    settings = {**options, "widths": list(layers)} if layers else options
    effect = PrivateLoss(alpha1=alpha1, alpha2=alpha2, bits=bits, layer=layer, bound=bound, widths=layers)
    return Defense(parts=(Part("spn", settings, effect, strength="alpha2"),), model=(on_model,), loss=(on_loss,))


def _expect(alpha1: float, alpha2: float, bits: int, bound: float | None, margin: float) -> None:
    checks.number("defense.alpha1", alpha1, above=0, example=1.0)
    checks.number("defense.alpha2", alpha2, at_least=0, example=0.1)
    checks.whole("defense.bits", bits, at_least=1, example=64)
    if bound is not None:
        checks.number("defense.bound", bound, above=0, example=0.3)
    checks.number("defense.margin", margin, at_least=1, example=1.0)


def _layers(widths: Sequence[int] | None) -> tuple[int, ...]:
    if widths is None:
        return ()
    if isinstance(widths, str) or not isinstance(widths, Sequence):
        raise UserError(
            f"defense.widths is expected to be a list of widths, but got {widths!r}; write defense.widths=[64,64], or"
            " leave it out for a single private layer."
        )
    for width in widths:
        checks.whole("defense.widths", width, at_least=1, example="[64,64]")
    return tuple(widths)


def _with_private_head(
    model: nn.Module,
    rng: torch.Generator,
    *,
    layer: str | None,
    bits: int,
    bound: float | None,
    widths: tuple[int, ...],
) -> nn.Module:
    private = copy.deepcopy(model)
    linear = {path: m for path, m in private.named_modules() if isinstance(m, nn.Linear)}
    if not linear:
        raise UserError("SPN is expected to get a model with a linear layer, but got one without; choose another.")
    if layer is not None:
        checks.one_of("defense.layer", layer, linear)
    *_, last = linear.values()
    host = linear[layer] if layer else last
    spread = bound or math.sqrt(3) * float(host.weight.detach().square().mean().sqrt())
    head = PolarizationHead(
        features=host.in_features, bits=bits, classes=last.out_features, bound=spread, rng=rng, widths=widths
    )
    host.add_module(HEAD, head.to(host.weight))
    return private


def _features(host: str, seen: list[Tensor]) -> Tensor:
    if not seen or seen[-1].dim() != 2:
        got = f"gets the shape {tuple(seen[-1].shape)}" if seen else "is not called"
        raise UserError(
            "SPN expects one vector per example as input of the linear layer of its private head, but"
            f" {host} {got}; name another one by defense.layer."
        )
    if not seen[-1].requires_grad:
        raise UserError(
            f"SPN is expected to have public layers before its private head, but got none before {host};"
            " name another layer by defense.layer, or choose a deeper model."
        )
    return seen[-1]


def _expect_fitting(host: str, layer: str | None, output_layer: str, logits: Tensor, codes: Tensor) -> None:
    if layer is None and host != output_layer:
        raise UserError(
            f"SPN expects the last linear layer of the model, {host}, to make the logits, but {output_layer} makes"
            f" them; set defense.layer={output_layer}."
        )
    if logits.shape[-1] > len(codes):
        raise UserError(
            f"SPN expects the last linear layer of the model to have an output for each of {logits.shape[-1]} classes,"
            f" but it has {len(codes)}; define the output layer after the others."
        )


class PolarizationHead(nn.Module):
    """Private layers of SPN (Fan et al. 2020, section 3.1) that map F ``features`` to K ``bits``.

    Outputs are trained towards the random code, K signs, of an example's class. Initial values are uniform in
    [-``bound``, ``bound``].
    """

    codes: Tensor  # (C, K) of -1 and 1, one random code for each class

    def __init__(
        self, *, features: int, bits: int, classes: int, bound: float, rng: torch.Generator, widths: Sequence[int] = ()
    ) -> None:
        super().__init__()
        *_, width = (features, *widths)
        # weight (K, W) and bias (K,) of the last layer
        self.weight = nn.Parameter(nn.init.uniform_(torch.empty(bits, width), -bound, bound, generator=rng))
        self.bias = nn.Parameter(nn.init.uniform_(torch.empty(bits), -bound, bound, generator=rng))
        self.register_buffer("codes", 2.0 * torch.randint(2, (classes, bits), generator=rng) - 1.0)
        self.before = nn.ModuleList()  # layers in front of the last one, each followed by ReLU
        for inputs, outputs in pairwise((features, *widths)):
            layer = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
            for values in (layer.weight, layer.bias):
                nn.init.uniform_(values, -bound, bound, generator=rng)
            self.before.append(layer)

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.before:
            features = layer(features).relu()
        return nn.functional.linear(features, self.weight, self.bias)


def polarization_loss(outputs: Tensor, codes: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Return the batch's mean of sum_k max(m - v_k t_k, 0), for the code t of an example's class (SPN, Eq. 5).

    ``outputs``: v (B, K). ``codes``: -1 and 1 (C, K). ``margin``: m. ``labels``: classes (B,), or probabilities (B, C).
    """
    if labels.dim() == 1:
        return (margin - outputs * codes[labels]).relu().sum(1).mean()
    return (labels * (margin - outputs[:, None] * codes).relu().sum(2)).sum(1).mean()
