"""Fishing (Wen et al. 2022): a crafted output layer isolates the gradient of one class or example."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.attacks.gradient_inversion import grouping, labels, targets
from fl_privacy.attacks.malicious.server_attack import Ask, ServerAttack, ThreatLevel, expect_whole
from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError
from fl_privacy.models.gradients.hooks import entering
from fl_privacy.types import ModelState, Observation, Reconstruction, Upload

_CLOSED = 1e4  # margin of the other classes' logits that gives the target class a probability of zero
_WHOLE = 0.02  # largest distance of a number of examples from a whole number


@dataclass(frozen=True, kw_only=True)
class Fishing(ServerAttack):
    """Crafts an output layer that isolates one class, then one example above a feature threshold (Wen et al. 2022).

    For class fishing, all rows of that layer's weight are zero except that of class c, and c has a probability near
    zero; only examples of c then have a gradient in the layers below. With a threshold, examples whose feature exceeds
    it add their gradients, and the bias gradient counts them. The server bisects until one example is left, by several
    requests about one batch; the paper uses one threshold.

    Attributes:
        target: class c.
        sharpness: change of the output, if the feature rises by its standard deviation over public images.
        questions: largest number of requests about one batch.
    """

    target: int = 0
    sharpness: float = 1e4
    questions: int = 40

    level = ThreatLevel.PARAMETERS
    description = (
        "The server sent an output layer that lets the gradients of one class through, and where it could ask of the"
        " same batch again, of one example (fishing)."
    )
    reads_images = False

    def __post_init__(self) -> None:
        whole("server.target", self.target, at_least=0, example=0)
        number("server.sharpness", self.sharpness, above=0, example=1e4)
        whole("server.questions", self.questions, at_least=3, example=40)

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        return self._with_threshold(model, state, math.inf)

    def question(self, model: nn.Module, state: ModelState, client: int, ask: Ask) -> tuple[ModelState, Upload]:
        """Bisect the threshold until one example exceeds it; return the last values sent and that example's gradient.

        ``ask``: function that sends values and returns the reply. The result's ``num_examples`` is 1, or 2 if no
        threshold isolates a single example.
        """
        weight, bias = self._layer(model, state)
        closed = ask(self._with_threshold(model, state, math.inf))

        def above(reply: Upload) -> float:
            return float(reply.tensors[bias][self.target] - closed.tensors[bias][self.target])

        every = above(ask(self._with_threshold(model, state, -math.inf)))
        seen = self._features(model, state)
        spread = float(seen.max() - seen.min())
        low, high = float(seen.min()) - spread, float(seen.max()) + spread
        sent, reply, count = self._with_threshold(model, state, low), closed, math.inf
        for _ in range(self.questions - 2 if every else 0):
            middle = (low + high) / 2
            reply = ask(sent := self._with_threshold(model, state, middle))
            count = closed.num_examples * above(reply) / every
            if abs(count - 1) < _WHOLE:
                break
            low, high = (middle, high) if count > 1 else (low, middle)
        alone = {
            name: closed.num_examples * (t.double() - closed.tensors[name].double()).to(t)
            for name, t in reply.tensors.items()
            if name not in (weight, bias)
        }
        return sent, Upload(tensors=alone, buffers=reply.buffers, num_examples=1 if abs(count - 1) < _WHOLE else 2)

    def read(self, observation: Observation) -> Reconstruction | Observation:
        upload, (weight, bias) = observation.upload, self._layer(observation.model, observation.sent)
        if weight not in upload.tensors:  # a difference, see ``question``
            if upload.num_examples != 1:
                return grouping.failed(
                    observation,
                    "A threshold with one example above it is expected, but none was found; raise server.questions.",
                )
            return observation.given(labels=torch.tensor([0 if self.target else 1]))
        if bias not in upload.tensors:
            return grouping.failed(
                observation, f"The gradient of {bias} is expected, but was withheld; use defense=none."
            )
        mean = -float(targets.as_gradient(observation)[bias][self.target]) / observation.plan.loss_scale
        number = round(mean * upload.num_examples)
        if not 0 < number <= upload.num_examples:
            return grouping.failed(
                observation,
                f"Examples of class {self.target} are expected in the update, but got none; set server.target.",
            )
        share = upload.num_examples / number
        tensors = {n: share * t for n, t in observation.update().items() if n not in (weight, bias)}
        return replace(
            observation.given(labels=torch.full((number,), self.target)),
            upload=replace(upload, tensors=tensors, num_examples=number),
        )

    def _layer(self, model: nn.Module, state: ModelState) -> tuple[str, str]:
        classes = next((len(p) for p in reversed(list(state.parameters.values())) if p.dim() == 1), 0)
        found = labels.output_layer(model, classes)
        if found is None or found[1] is None or self.target >= classes:
            raise UserError(
                f"Fishing: a linear output layer with a bias and a class {self.target} is expected, but the model has"
                " none; set server.target or use model=lenet."
            )
        return found[0], found[1]

    def _with_threshold(self, model: nn.Module, state: ModelState, threshold: float) -> ModelState:
        """Return model values that also give gradients to examples with features above ``threshold``."""
        expect_whole(model, state, "Fishing")
        weight, bias = self._layer(model, state)
        direction = self._direction(state, weight)
        slope = self.sharpness / max(float(self._features(model, state).std()), 1e-12)
        rows = torch.zeros_like(state.parameters[weight])
        rows[self.target] = slope * direction
        offsets = torch.zeros_like(state.parameters[bias])
        if math.isinf(threshold):
            highest = slope * float(self._features(model, state).abs().max())
            offsets[self.target] = -math.copysign(_CLOSED + 10 * highest, threshold)
        else:
            offsets[self.target] = math.log(max(1, len(offsets) - 1)) - slope * threshold
        return ModelState({**state.parameters, weight: rows, bias: offsets}, state.buffers)

    def _direction(self, state: ModelState, weight: str) -> Tensor:
        row = state.parameters[weight][self.target]
        return F.normalize(row if row.any() else torch.ones_like(row), dim=0)

    @torch.no_grad()
    def _features(self, model: nn.Module, state: ModelState) -> Tensor:
        weight = self._layer(model, state)[0]
        owner = weight.rpartition(".")[0]
        values, images = {**state.parameters, **state.buffers}, self.public[:500].to(state.parameters[weight])
        with entering({owner: model.get_submodule(owner)}) as calls:
            functional_call(model.eval(), values, (images,))
        return calls[0].inputs.flatten(0, -2) @ self._direction(state, weight)
