"""The images of a batch that a fully connected first layer has mixed, whatever activation comes behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Progress, Report, no_progress
from fl_privacy.attacks.exact.certificate import Reproduction, model_as_sent
from fl_privacy.attacks.exact.first_layer import FirstLayer, NotFullyConnectedError, find_first_layer
from fl_privacy.attacks.exact.independence import independent_directions, neighbors, row_basis, unmixed
from fl_privacy.attacks.exact.rank_one import residual
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.grouping import (
    Group,
    attack_in_groups,
    expect_gradient,
    failed,
    one_each,
    without_labels,
)
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.checks import whole
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Observation, Reconstruction

_CHUNK_ELEMENTS = 1 << 24
"""Elements of weight gradients taken apart at a time (128 MB of float64)."""


@dataclass(frozen=True, kw_only=True)
class CocktailParty:
    """Independent components of a first layer's gradient (Kariyappa et al., ICML 2023, "Cocktail Party Attack").

    The gradient of a fully connected layer is made of as many mixtures of its inputs as there are examples. These are
    taken apart so that their differences of neighboring pixels are independent and heavy-tailed; sign and scale follow
    from the gradient of the bias (:mod:`fl_privacy.attacks.exact.independence`). The layer needs at least as many
    outputs as there are examples, and images have to look like photographs. Nothing is proven.

    Attributes:
        iterations: of each of the two searches.
    """

    iterations: int = 60

    def __post_init__(self) -> None:
        whole("attack.iterations", self.iterations, at_least=1, example=60)

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """Attack all ``observations``; see :class:`fl_privacy.attacks.ReconstructionAttack`."""

        def attack(group: Group, report: Report) -> dict[int, Reconstruction]:
            return self._attack(group, seed, report)

        return attack_in_groups(observations, attack, progress=progress, as_victims=one_each)

    def _attack(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        expect_gradient(first)
        fixed = first.plan.batch_norm == "eval"
        layer = find_first_layer(first.model, first.assumed(), first.input_shape, fixed_norms=fixed)
        if missing := set(layer.names) - first.upload.tensors.keys():
            raise NotFullyConnectedError(f"The gradient of {min(missing)} is expected, but was withheld.")
        outputs, count = len(first.upload.tensors[layer.weight]), first.upload.num_examples
        if outputs < count:
            raise NotAttackableError(f"At least {count} outputs of the first layer are expected, but it has {outputs}.")
        model, results = model_as_sent(first), dict[int, Reconstruction]()
        at_once = max(1, _CHUNK_ELEMENTS // first.upload.tensors[layer.weight].numel())
        positions = list(group.observations)
        for begin in range(0, len(positions), at_once):
            chunk = positions[begin : begin + at_once]
            observations = [group.observations[position] for position in chunk]
            images, losses, enough = self._images(observations, layer, seed)
            for row, (position, observation) in enumerate(zip(chunk, observations, strict=True)):
                results[position] = (
                    _reconstruction(Reproduction(observation, model), images[row], float(losses[row]))
                    if enough[row]
                    else failed(observation, f"A gradient of {layer.weight} of rank {len(images[row])} is expected.")
                )
            report(len(results) / len(positions))
        return results

    def _images(
        self, observations: Sequence[Observation], layer: FirstLayer, seed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Images (V, B, C, H, W), what they leave of the gradient (V,), and whether it has the rank of a batch (V,)."""
        count, shape = observations[0].upload.num_examples, observations[0].input_shape
        gradients = [as_gradient(observation) for observation in observations]
        weights = torch.stack([gradient[layer.weight] for gradient in gradients])
        biases = torch.stack([gradient[layer.bias] for gradient in gradients])
        basis, enough = row_basis(weights, count)
        starts = []
        for observation in observations:
            rng = derive_generator(seed, "cocktail_party", str(observation.id))
            starts.append(torch.linalg.qr(torch.randn(count, count, generator=rng, dtype=torch.float64))[0])
        features = neighbors((basis / layer.scale).reshape(-1, count, *shape))
        directions = independent_directions(features, torch.stack(starts).to(basis), iterations=self.iterations)
        inputs = unmixed(basis, directions, weights, biases)
        return layer.pixels(inputs).reshape(-1, count, *shape), residual(weights, biases, inputs), enough


def _reconstruction(reproduction: Reproduction, images: Tensor, loss: float) -> Reconstruction:
    observation, images = reproduction.observation, images.clamp(0, 1)
    labels = reproduction.labels(images)
    if labels is None:
        return without_labels(observation)
    batch = Batch(images.float().cpu(), labels.cpu())
    return Reconstruction(id=observation.id, batch=batch, loss=loss, history=(loss,), label_source="inferred")
