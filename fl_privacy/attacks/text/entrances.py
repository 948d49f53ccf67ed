"""Find the layers that see only a token and its position, and the rows of their updates.

They are the first block's queries, keys, values and adapters, and those behind the embeddings.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.models import TextModel
from fl_privacy.models.gradients.choose_method import decayed, number_of_steps
from fl_privacy.models.gradients.hooks import entering, leaving, replaced_input
from fl_privacy.types import Observation, Tensors

_SAME = 1e-5
"""Relative difference of two inputs of a layer that is rounding."""
_LENGTH, _AT = 4, (1, 3)
"""Length of the texts by which layers are found, and the places of the token that is compared."""
_ADAM_EPS = 1e-8
_ULPS = 4.0
"""Roundings in single precision by which a step of Adam from zero may be off."""


@dataclass(frozen=True, eq=False)
class Entrance:
    """A linear layer that no attention comes before.

    Attributes:
        weight: name of its parameter, (O, d), or (d, O) if ``transposed``.
        module: path of the layer whose input is a function of token and position.
        through: name of the parameter (d, n) between that input and this layer, such as an adapter's A, if any.
        positioned: ``True`` if a token's input depends on its position.
    """

    weight: str
    module: str
    through: str | None
    transposed: bool
    positioned: bool


def entrances_of(model: TextModel, uploaded: Tensors) -> list[Entrance]:
    """Find the uploaded linear layers that see single tokens: they get the same input for a token common to texts."""
    names = {id(p): name for name, p in model.named_parameters()}
    layers = {path: m for path, m in model.named_modules() if _is_linear(m)}
    # texts (3, 4) with one token in common, twice in the first
    size = model.words.num_embeddings
    a, b, c, d = (min(size - 1, size * k // 5) for k in (1, 2, 3, 4))
    texts = torch.tensor([[a, b, c, b], [a, b, d, c], [d, b, c, a]])
    tokens = texts.to(model.words.weight.device)
    with torch.no_grad(), ExitStack() as stack:
        entered = stack.enter_context(entering(layers))
        left = stack.enter_context(leaving(layers))
        model(tokens)
    inputs = {call.name: call.inputs for call in entered}
    outputs = {id(call.output): call.name for call in left}
    found, seen = [], list[str]()
    for path, states in inputs.items():
        weight = names.get(id(layers[path].weight), "")
        if weight not in uploaded or not _of_one_token(states):
            continue
        before = outputs.get(id(states))
        own = before if before is not None and _of_one_token(inputs[before]) else path
        through = None if own == path else names[id(layers[own].weight)]
        own = next((other for other in seen if _alike(inputs[other], inputs[own])), own)
        seen.append(own)
        positioned = not _alike(inputs[own][0, _AT[0]], inputs[own][0, _AT[1]])
        transposed = not isinstance(layers[path], nn.Linear)
        found.append(Entrance(weight, own, through, transposed, positioned))
    return found


def _is_linear(module: nn.Module) -> bool:
    named = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return named and isinstance(getattr(module, "weight", None), nn.Parameter) and not any(module.children())


def _of_one_token(states: Tensor) -> bool:
    """Return ``True`` if the common token's input (3, 4, d) is the same in all texts."""
    if states.dim() != 3 or states.shape[:2] != (3, _LENGTH):
        return False
    one, two, three = states[:, _AT[0]]
    return _alike(one, two) and _alike(one, three) and not _alike(states[0, 0], one)


def _alike(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool((one - two).norm() <= _SAME * one.norm().clamp_min(1e-12))


class _EnteredError(Exception):
    """Ends a forward pass early."""


@torch.no_grad()
def entering_module(model: TextModel, tokens: Tensor, path: str) -> Tensor:
    """Return the inputs (n, L, d) of the module at ``path`` for ``tokens`` (n, L)."""

    def stop(_: Tensor) -> Tensor:
        raise _EnteredError

    with ExitStack() as stack:
        calls = stack.enter_context(entering({path: model.get_submodule(path)}))
        stack.enter_context(replaced_input(model.get_submodule(path), stop))
        with suppress(_EnteredError):
            model(tokens)
    return calls[0].inputs


@dataclass(frozen=True, eq=False)
class View:
    """Rows (m, n) of an update that are sums over a layer's inputs for single tokens.

    Attributes:
        rows: float64.
        module: path of the layer whose input is a function of token and position.
        through: (n, d) factor of that input; ``None``: n = d.
    """

    rows: Tensor
    module: str
    through: Tensor | None


def views_of(observation: Observation, entrances: Sequence[Entrance]) -> list[View]:
    """Return the views of an update; layers with one input share a view."""
    gradient = slopes(observation, [entrance.weight for entrance in entrances])
    direct: dict[str, list[Tensor]] = {}
    views = []
    for entrance in entrances:
        rows = gradient[entrance.weight]
        rows = (rows.T if entrance.transposed else rows).double()
        if not bool(rows.any()) or not bool(rows.isfinite().all()):
            continue
        if entrance.through is None:
            direct.setdefault(entrance.module, []).append(rows / rows.norm())
        else:
            views.append(View(rows, entrance.module, observation.sent.parameters[entrance.through].double()))
    return [View(torch.cat(parts), module, None) for module, parts in direct.items()] + views


@torch.no_grad()
def slopes(observation: Observation, names: Sequence[str]) -> Tensors:
    """Return the update of ``names`` as a gradient, up to a factor, if the optimizer permits.

    Adam's first step divides each element by its size plus 1e-8: the shortfall from the learning rate gives that size.
    Larger elements keep their sign and the largest size that can be inferred.
    """
    plan = observation.plan
    if plan.shares == "gradient" or plan.optimizer == "sgd":
        found = as_gradient(observation)
        return {name: found[name] for name in names}
    steps = number_of_steps(observation.upload.num_examples, plan)
    updates, slopes = observation.update(), dict[str, Tensor]()
    for name in names:
        sent = observation.sent.parameters[name].double()
        moved = decayed(sent, plan, steps) - sent - updates[name].double()
        slopes[name] = _undone(moved / plan.lr, sent / plan.lr, updates[name]) if steps == 1 else moved / plan.lr
    return slopes


def _undone(step: Tensor, sent: Tensor, stored: Tensor) -> Tensor:
    """Return the gradient behind Adam's first ``step``, in units of the learning rate."""
    halved = stored.is_floating_point() and bool((stored.bfloat16().to(stored.dtype) == stored).all())
    kind = torch.bfloat16 if halved else torch.float32
    rounding = _ULPS * torch.finfo(torch.float32).eps + torch.finfo(kind).eps * (sent.abs() + 1)
    short = (1 - step.abs()).maximum(rounding)
    return step.sign() * _ADAM_EPS * step.abs() / short
