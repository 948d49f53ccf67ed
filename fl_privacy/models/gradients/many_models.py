"""Training of many small models at once by ``torch.func``, each with its own values and examples."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fl_privacy.models.gradients import choose_method, convolution, hooks, memory, victims
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

_FILLS = 1_500_000  # number of multiplications from which each model's convolution is computed separately
_Geometry = tuple[Any, Any, Any, int]  # stride, padding, dilation and groups


class ConvolutionOfMany(nn.Conv2d):
    """Convolution that, under ``vmap`` over models, computes one model after another."""

    def reset_parameters(self) -> None:
        """Skip initialization: the weights are given."""

    def forward(self, input: Tensor) -> Tensor:
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        output: Tensor = _Convolution.apply(input, self.weight, geometry)
        return output if self.bias is None else output + self.bias[:, None, None]


def for_many(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Return a copy of ``model`` that is fast under ``vmap`` over parameters, for ``inputs`` such as (B, C, H, W)."""
    copied = copy.deepcopy(model)
    found = {n: m for n, m in copied.named_modules() if n and type(m) is nn.Conv2d and convolution.pads_with_zeros(m)}
    with torch.no_grad(), hooks.leaving(found) as calls:
        copied(inputs)
    work = {c.name: len(c.inputs) * c.output[0, 0].numel() * found[c.name].weight.numel() for c in calls}
    for name in {name for name, multiplications in work.items() if multiplications >= _FILLS}:
        parent, _, own = name.rpartition(".")
        setattr(copied.get_submodule(parent), own, convolution.convolution_as(ConvolutionOfMany, found[name]))
    return copied


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
        return F.conv2d(inputs, weight, None, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, _Geometry], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.geometry = inputs[2]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        wanted = tuple(ctx.needs_input_grad[:2])
        by_inputs, by_weight = _Slopes.apply(slopes[0], *ctx.saved_tensors, (wanted, ctx.geometry))
        return by_inputs if wanted[0] else None, by_weight if wanted[1] else None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], inputs: Tensor, weight: Tensor, geometry: _Geometry
    ) -> tuple[Tensor, int]:
        inputs, weight = (_first(info, *pair) for pair in zip((inputs, weight), in_dims, strict=False))
        return torch.stack([F.conv2d(*pair, None, *geometry) for pair in zip(inputs, weight, strict=True)]), 0


class _Slopes(torch.autograd.Function):
    """Backward pass of a convolution, batched for ``vmap``; gradients that are not wanted are empty."""

    @staticmethod
    def forward(deltas: Tensor, inputs: Tensor, weight: Tensor, how: Any) -> tuple[Tensor, Tensor]:
        return _backward((deltas, inputs, weight), how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing, since these gradients are not differentiated again."""

    @staticmethod
    def vmap(  # noqa: PLR0917
        info: Any, in_dims: tuple[int | None, ...], deltas: Tensor, inputs: Tensor, weight: Tensor, how: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        pairs = zip((deltas, inputs, weight), in_dims, strict=False)
        parts = zip(*(_first(info, *pair) for pair in pairs), strict=True)
        by_inputs, by_weight = zip(*(_backward(part, how) for part in parts), strict=True)
        return (torch.stack(by_inputs), torch.stack(by_weight)), (0, 0)


def _backward(part: Sequence[Tensor], how: Any) -> tuple[Tensor, Tensor]:
    (wanted, (*settings, groups)), nothing = how, part[0].new_empty(0)
    found = torch.ops.aten.convolution_backward(*part, None, *settings, False, (0, 0), groups, (*wanted, False))
    return found[0] if wanted[0] else nothing, found[1] if wanted[1] else nothing


def _first(info: Any, values: Tensor, place: int | None) -> Tensor:
    return values.expand(info.batch_size, *values.shape) if place is None else values.movedim(place, 0)


EXAMPLES_AT_ONCE, _ELEMENTS = 1 << 13, 1 << 26
"""Most examples of all models in one step or evaluation, and most elements of all models' parameters."""

_WRITTEN = 1 << 30  # most bytes that all models' layers write in one evaluation


@dataclass(frozen=True, eq=False)
class ManyModels:
    """M models of one architecture, with parameters and buffers ``values`` (M, *shape)."""

    model: nn.Module
    values: ModelState

    @classmethod
    def copies(cls, model: nn.Module, state: ModelState, number: int) -> "ManyModels":
        def repeated(tensors: Tensors) -> dict[str, Tensor]:
            return {name: t.detach().expand(number, *t.shape).clone() for name, t in tensors.items()}

        return cls(model, ModelState(repeated(state.parameters), repeated(state.buffers)))

    def __len__(self) -> int:
        return len(next(iter(self.values.parameters.values())))

    def __getitem__(self, index: int) -> ModelState:
        parameters, buffers = self.values.parameters, self.values.buffers
        return ModelState({n: p[index] for n, p in parameters.items()}, {n: b[index] for n, b in buffers.items()})

    @victims.plain_attention()
    def trained(
        self, pool: Batch, order: Sequence[Tensor], plan: LocalPlan, *, longest: float = math.inf
    ) -> "ManyModels":
        """Return the M models after one training step for each entry of ``order``.

        An entry has the indices (M, B) in ``pool`` of each model's batch. Gradients are clipped to the l2 norm
        ``longest``.
        """
        victims.set_mode(self.model, plan.batch_norm)
        model = for_many(self.model, pool.inputs[order[0][0]]) if order else self.model
        step = vmap(_loss_gradient(model, plan), randomness="different")
        parameters, buffers = self.values.parameters, self.values.buffers
        moments: list[Tensors] = [{}, {}]
        held = plan.held(parameters)
        for number, rows in enumerate(order, start=1):
            gradients, buffers = step(parameters, buffers, pool.inputs[rows], pool.labels[rows])
            if math.isfinite(longest):
                # scale each model's gradients to at most ``longest`` in all
                lengths = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()]
                factor = (longest / torch.stack(lengths).norm(dim=0)).clamp_max(1)
                gradients = {name: g * factor.view(-1, *(1 for _ in g.shape[1:])) for name, g in gradients.items()}
            direction, moments = choose_method.decaying_step(gradients, parameters, moments, plan, number)
            parameters = {n: p if n in held else p - plan.lr * direction[n] for n, p in parameters.items()}
        return ManyModels(self.model, ModelState(parameters, buffers))

    @torch.no_grad()
    @victims.plain_attention()
    def measured(self, examples: Batch, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return ``measure(logits, labels)``, (M, N), of M models in evaluation mode on N ``examples``."""
        self.model.eval()

        def one(parameters: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
            return measure(functional_call(self.model, {**parameters, **buffers}, (inputs,)), labels)

        apply = vmap(one, in_dims=(0, 0, None, None))
        first, few = self[0], (examples.inputs[:1], examples.labels[:1])
        written = len(self) * memory.written_by(lambda: one(first.parameters, first.buffers, *few))
        size = max(1, min(EXAMPLES_AT_ONCE // len(self), _WRITTEN // max(1, written)))
        pairs = zip(torch.split(examples.inputs, size), torch.split(examples.labels, size), strict=True)
        return torch.cat([apply(self.values.parameters, self.values.buffers, *pair) for pair in pairs], 1)


def models_at_once(model: nn.Module, batch_size: int) -> int:
    """Return the number of copies of ``model`` that fit into memory together, with ``batch_size`` examples each."""
    return max(1, min(EXAMPLES_AT_ONCE // batch_size, _ELEMENTS // sum(p.numel() for p in model.parameters())))


def local_orders(subsets: Tensor, plan: LocalPlan, rng: torch.Generator) -> list[Tensor]:
    """Return indices (M, B) for each local step of M clients, which pass in random order over ``subsets`` (M, N)."""
    clients, number = subsets.shape
    slices = choose_method.step_slices(number, plan)
    passes = max(1, sum(part.start == 0 for part in slices))
    orders = [torch.rand(clients, number, generator=rng).argsort(1) for _ in range(passes)]
    current, steps = -1, []
    for part in slices:
        current += part.start == 0
        steps.append(subsets.gather(1, orders[current][:, part]))
    return steps


def _loss_gradient(
    model: nn.Module, plan: LocalPlan
) -> Callable[[Tensors, Tensors, Tensor, Tensor], tuple[Tensors, Tensors]]:
    def loss(parameters: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensors]:
        kept = {name: b.clone() for name, b in buffers.items()}
        logits = functional_call(model, {**parameters, **kept}, (inputs,))
        return plan.loss_scale * F.cross_entropy(logits, labels), kept

    def gradient(parameters: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensors, Tensors]:
        gradients, (_, kept) = grad_and_value(loss, has_aux=True)(parameters, buffers, inputs, labels)
        return gradients, kept

    return gradient
