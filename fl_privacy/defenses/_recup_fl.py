"""RecUP-FL: perturbation of the gradient that misleads attribute inference."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses.defense import Defense, LocalStep
from fl_privacy.effects import AdversarialPerturbation, Part
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import GradientClassifier, GradientSketch, sketched_examples
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, ModelState, Tensors

ZOO = (0, 32, 128, 64, 16, 256, 8, 96)  # widths of the substitutes' hidden layers; 0 is a linear classifier
STEPS = 80  # training steps of a substitute, for each set of parameters


def recup_fl(*, budget: float = 0.5, iterations: int = 10, substitutes: int = 4, public: int = 200) -> Defense:
    """Perturb each local gradient to mislead classifiers of an attribute (RecUP-FL, Cui et al. 2023, Alg. 1).

    At every local step the client trains substitutes for the attacker's classifier on gradients of public examples.
    Each iteration leaves one substitute out. A first step raises the loss of the other substitutes, a second step
    that of the one left out. The perturbation stays within a ball.

    Args:
        budget: radius of the ball around the gradient, in units of its norm, at least 0.
        iterations: number of iterations of two steps.
        substitutes: number of substitutes, 2 to 8.
        public: number of public training examples, at least 2.
    """
    checks.number("defense.budget", budget, at_least=0, example=0.5)
    checks.whole("defense.iterations", iterations, at_least=1, example=10)
    checks.whole("defense.substitutes", substitutes, at_least=2, at_most=len(ZOO), example=4)
    checks.whole("defense.public", public, at_least=2, example=200)
    zoo = _Zoo(substitutes=substitutes, public=public)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        sketch, heads = zoo.at(step, tensors)
        return mislead(tensors, sketch, heads, budget=budget, iterations=iterations)

    settings = {"budget": budget, "iterations": iterations, "substitutes": substitutes, "public": public}
    part = Part("recup_fl", settings, AdversarialPerturbation(budget=budget), strength="budget")
    return Defense(parts=(part,), gradient=(on_gradient,), informed=(zoo.inform,))


def mislead(
    gradient: Tensors, sketch: GradientSketch, heads: Sequence[GradientClassifier], *, budget: float, iterations: int
) -> Tensors:
    """Perturb ``gradient`` so that classifiers of the client's attribute err; see :func:`recup_fl`.

    ``heads``: classifiers of gradients shortened by ``sketch``. ``budget``: largest norm of the change over the
    gradient's.
    """
    radius = budget * _norm(gradient)
    if radius == 0:
        return gradient
    sketched = sketch({name: g.unsqueeze(0) for name, g in gradient.items()})
    guess = torch.stack([head(sketched) for head in heads]).softmax(-1).mean(0).argmax(-1)
    moved: Tensors = {name: torch.zeros_like(g) for name, g in gradient.items()}
    length = 2 * radius / iterations
    for turn in range(iterations):
        left_out = turn % len(heads)
        for asked in ([h for k, h in enumerate(heads) if k != left_out], [heads[left_out]]):
            uphill = _uphill({n: g + moved[n] for n, g in gradient.items()}, sketch, asked, guess)
            moved = {n: m + length * uphill[n] for n, m in moved.items()}
            shrink = 1.0 if (norm := _norm(moved)) <= radius else radius / norm
            moved = {n: m * shrink for n, m in moved.items()}
    return {name: g + moved[name] for name, g in gradient.items()}


def _uphill(gradient: Tensors, sketch: GradientSketch, heads: Sequence[GradientClassifier], guess: Tensor) -> Tensors:
    sketched = sketch({name: g.unsqueeze(0) for name, g in gradient.items()}).detach().requires_grad_()
    with torch.enable_grad():
        loss = torch.stack([F.cross_entropy(head(sketched), guess) for head in heads]).mean()
        (slope,) = torch.autograd.grad(loss, sketched)
    back = sketch.back(slope[0], gradient)
    norm = torch.stack([b.square().sum() for b in back.values()]).sum().sqrt().clamp(min=1e-30)
    return {name: b / norm for name, b in back.items()}


def _norm(tensors: Tensors) -> float:
    return float(torch.stack([t.square().sum() for t in tensors.values()]).sum().sqrt())


@dataclass(eq=False)
class _Zoo:
    substitutes: int
    public: int
    _examples: Batch | None = None
    _attributes: Tensor = field(default_factory=lambda: torch.empty(0))
    _kept: tuple[object, tuple[GradientSketch, list[GradientClassifier]]] | None = None

    def inform(self, examples: Batch, attributes: Tensor) -> None:
        self._examples, self._attributes, self._kept = examples.first(self.public), attributes[: self.public], None

    def at(self, step: LocalStep, uploaded: Tensors) -> tuple[GradientSketch, list[GradientClassifier]]:
        if self._examples is None:
            raise UserError(
                "recup_fl is expected to get public examples with attributes, but got none; call each of"
                " defense.informed with them, or use data with an attribute in addition to the class."
            )
        values = ModelState({n: p.detach() for n, p in step.sent.parameters.items()}, step.sent.buffers)
        key = tuple(float(moment) for p in values.parameters.values() for moment in (p.sum(), p.square().sum()))
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self._trained(step, values, uploaded)
        return self._kept[1]

    def _trained(
        self, step: LocalStep, values: ModelState, uploaded: Tensors
    ) -> tuple[GradientSketch, list[GradientClassifier]]:
        assert self._examples is not None
        device = next(iter(values.parameters.values())).device
        examples = Batch(self._examples.inputs.to(device), self._examples.labels.to(device))
        attributes, rng = self._attributes.to(device), derive_generator(0, "recup_fl")
        sketch = GradientSketch.of({name: values.parameters[name] for name in uploaded}, rng)
        known, classes = sketched_examples(step.model, values, examples, step.plan, sketch), int(attributes.max()) + 1
        heads = []
        for hidden in ZOO[: self.substitutes]:
            some = torch.randint(len(known), (len(known),), generator=rng).to(device)
            shown, wanted = known[some], attributes[some]
            heads.append(GradientClassifier.fit(shown, wanted, classes, rng, hidden=hidden, steps=STEPS))
        return sketch, heads
