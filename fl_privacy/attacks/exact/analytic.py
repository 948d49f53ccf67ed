"""Reconstruct the pixels that entered a fully connected layer, from the ratio of its gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Progress, Report, no_progress
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent, within_range
from fl_privacy.attacks.exact.first_layer import FirstLayer, distinct_ratios, find_first_layer, fit, residual
from fl_privacy.attacks.gradient_inversion import labels as labeling
from fl_privacy.attacks.gradient_inversion.grouping import Group, Groups, expect_gradient, failed, without_labels
from fl_privacy.attacks.gradient_inversion.labels import guessed_outputs
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, as_gradient
from fl_privacy.checks import number
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.losses import CROSS_ENTROPY, is_plain
from fl_privacy.types import Batch, Observation, Reconstruction
from fl_privacy.types.schema import schema_of

_CHUNK_ELEMENTS = 1 << 24  # elements of weight gradients solved at a time (128 MB of float64)


@dataclass(frozen=True, kw_only=True)
class AnalyticInversion:
    """Solve b x^T = W for networks whose first layer is fully connected (SPN, Fan et al. 2020, Eq. 7 and Theorem 2.1).

    One example is the least squares solution, exact up to rounding. In a batch, neurons active for a single example
    give that example; the ratios shared by most rows are taken. Several local steps count as a gradient to first order;
    Adam's, which hide the ratios, are refused.

    Attributes:
        smallest: rows whose bias gradient is below this share of the largest are left out, in [0, 1).
        alike: ratios are the same up to this share of their length, at least 1e-6.
    """

    smallest: float = 1e-4
    alike: float = 1e-2

    def __post_init__(self) -> None:
        number("attack.smallest", self.smallest, at_least=0, below=1, example=1e-4)
        number("attack.alike", self.alike, at_least=1e-6, example=1e-2)

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        return Groups(observations, progress=progress, rounds="apart").attacked(self._attack)

    def _attack(self, group: Group, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        expect_gradient(first)
        layer = find_first_layer(first.model, first.sent, first.input_shape)
        if missing := {layer.weight, layer.bias} - first.upload.tensors.keys():
            raise NotAttackableError(f"The gradient of {min(missing)} is expected, but was withheld.")
        at_once = max(1, _CHUNK_ELEMENTS // first.upload.tensors[layer.weight].numel())
        observations, results = list(group.observations.items()), dict[int, Reconstruction]()
        for start in range(0, len(observations), at_once):
            results |= self._solve(observations[start : start + at_once], layer)
            report(len(results) / len(observations))
        return results

    def _solve(self, members: Sequence[tuple[int, Observation]], layer: FirstLayer) -> dict[int, Reconstruction]:
        gradients = {position: as_gradient(observation) for position, observation in members}
        reason = f"A gradient of {layer.bias} is expected, but all of it is zero."
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
    images, notes = within_range(
        layer.pixels(inputs).reshape(shape), solved=loss < ROUNDING, schema=schema_of(observation.model)
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
        return Reproduction(observation, model_as_sent(observation)).labels(images)
    sent = observation.assumed()
    values = next(iter(sent.parameters.values()))
    model = frozen_copy(observation.model, sent, observation.plan, device=values.device, dtype=values.dtype)
    outputs = guessed_outputs(model, images.to(values), output[0])
    gradient = {name: g / observation.plan.loss_scale for name, g in as_gradient(observation).items() if name in output}
    return labeling.infer_labels(gradient, output, len(images), *outputs)
