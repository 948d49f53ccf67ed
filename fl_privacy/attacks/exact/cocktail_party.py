"""The images of a batch that a fully connected first layer has mixed, whatever activation comes behind it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fl_privacy.attacks.attack import Progress, Report, no_progress
from fl_privacy.attacks.deadline import even_share, timely
from fl_privacy.attacks.exact.certificate import Read, Reproduction, certified, is_muted, model_as_sent
from fl_privacy.attacks.exact.factorization import AGREEMENT, column_space, factors_near
from fl_privacy.attacks.exact.first_layer import FirstLayer, NotFullyConnectedError, find_first_layer
from fl_privacy.attacks.exact.independence import (
    independent_directions,
    neighbors,
    number_of_neighbors,
    row_basis,
    unlikeliness,
    unmixed,
)
from fl_privacy.attacks.exact.rank_one import residual
from fl_privacy.attacks.exact.silence import unmixed_by_silence
from fl_privacy.attacks.exact.unmixing import Behind, Mixture, misfit, mixture_of, unmixed_by_network
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.grouping import (
    Group,
    attack_in_groups,
    expect_gradient,
    failed,
    one_each,
)
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.attacks.gradient_inversion.threads import fitting_threads
from fl_privacy.checks import whole
from fl_privacy.progress import counted
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

_DIFFERENT = 1e-4
"""Least singular value of images, as a share of the largest, that are no combinations of each other."""

_SILENT = 0.1
"""Share of the layer's signals that are zero, from which a ReLU is behind it."""

_RELABELED = 3
"""Times that images are looked for with the labels that those found before have."""

_ALONE = 1 / 16
"""Share of the differences of neighboring pixels that count, since neighbors' are alike: between what trusts equations
behind noise and what trusts a network that leaves most of the update unexplained."""

_COMPONENTS = 0.5
"""Share of the work on a batch that its components are, about."""

_CHUNK_ELEMENTS = 1 << 24
"""Elements of weight gradients taken apart at a time (128 MB of float64)."""


@dataclass(frozen=True, kw_only=True)
class CocktailParty:
    """A batch from a first layer's gradient, by independent components and then exactly, behind any activation.

    The gradient of a fully connected layer is made of as many mixtures of its inputs as there are examples (Kariyappa
    et al., ICML 2023, "Cocktail Party Attack"). These are taken apart so that their differences of neighboring pixels
    are independent and heavy-tailed; sign and scale follow from the gradient of the bias
    (:mod:`fl_privacy.attacks.exact.independence`). From there behind a ReLU the zeros of the gradient are found, as in
    ``attack=exact`` (:func:`fl_privacy.attacks.exact.factorization.factors_near`), which may prove the batch; behind
    what is smooth the network itself says how the images were mixed
    (:mod:`fl_privacy.attacks.exact.unmixing`), usually but for rounding. The layer needs at least as many outputs as
    there are examples, and images have to look like photographs.

    Attributes:
        iterations: of each of the two searches for independent components.
        steps: of Gauss and Newton, at most; with 0 the components are left as they are, inexact.
    """

    iterations: int = 60
    steps: int = 20

    def __post_init__(self) -> None:
        whole("attack.iterations", self.iterations, at_least=1, example=60)
        whole("attack.steps", self.steps, at_least=0, example=20)

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
        (outputs, pixels), count = first.upload.tensors[layer.weight].shape, first.upload.num_examples
        if outputs < count:
            raise NotAttackableError(f"At least {count} outputs of the first layer are expected, but it has {outputs}.")
        if pixels < count:
            raise NotAttackableError(f"Images of at least {count} values are expected, but they have {pixels}.")
        if (pairs := number_of_neighbors(first.input_shape)) <= count:
            raise NotAttackableError(f"More than {count} pairs of neighboring pixels are expected, but got {pairs}.")
        model, results = model_as_sent(first), dict[int, Reconstruction]()
        at_once = max(1, _CHUNK_ELEMENTS // first.upload.tensors[layer.weight].numel())
        positions = list(group.observations)
        with fitting_threads(count**2 * layer.shift.numel()):
            for begin in counted("cocktail party", range(0, len(positions), at_once)):
                chunk = {position: group.observations[position] for position in positions[begin : begin + at_once]}

                def meter(part: float, begin: int = begin, size: int = len(chunk)) -> None:
                    report((begin + part * size) / len(positions))

                with even_share(math.ceil((len(positions) - begin) / at_once)):
                    results |= self._taken_apart(chunk, layer, model, seed, meter)
        return results

    def _taken_apart(
        self, observations: Mapping[int, Observation], layer: FirstLayer, model: nn.Module, seed: int, report: Report
    ) -> dict[int, Reconstruction]:
        """Victims whose components are searched for together, by position."""
        results, total = dict[int, Reconstruction](), len(observations)
        basis, inputs, enough = self._components(list(observations.values()), layer, seed)
        for row, (position, observation) in enumerate(counted("victim", list(observations.items()))):

            def meter(part: float, row: int = row) -> None:
                report(_COMPONENTS + (1 - _COMPONENTS) * (row + part) / total)

            meter(0.0)
            with even_share(total - row):
                results[position] = (
                    self._finished(_Mixed(Reproduction(observation, model), layer, basis[row]), inputs[row], meter)
                    if enough[row]
                    else failed(observation, f"A gradient of {layer.weight} of rank {len(basis[row])} is expected.")
                )
        report(1.0)
        return results

    def _components(
        self, observations: Sequence[Observation], layer: FirstLayer, seed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """R (V, B, N), inputs (V, B, N) and whether the gradient has the rank of a batch (V,)."""
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
        return basis, unmixed(basis, directions, weights, biases), enough

    def _finished(self, mixed: "_Mixed", inputs: Tensor, report: Report) -> Reconstruction:
        """From ``inputs`` (B, N) that components gave."""
        unique = False
        if self.steps and mixed.differ(inputs) and (labels := mixed.classes(inputs)) is not None:
            found = mixed.behind_zeros(inputs, labels)
            if found is None:
                inputs = mixed.behind_network(inputs, labels, self.steps, report)
                found = mixed.behind_zeros(inputs, labels)
            if found is not None:
                inputs, unique = found, True
        shade = mixed.layer.pixels(torch.zeros_like(mixed.layer.shift))
        loss = float(residual(mixed.weight[None], mixed.bias[None], inputs[None]))
        read = Read(mixed.images(inputs), unique and not is_muted(mixed.weight, shade), loss)
        result, classes = certified(mixed.reproduction, read, ordered=False), mixed.classes(inputs)
        if result.batch is None or classes is None or result.certainty is not Certainty.APPROXIMATE:
            return result
        return replace(result, batch=Batch(result.batch.inputs, classes.cpu()))


@dataclass(frozen=True, eq=False)
class _Mixed:
    """The gradient of a victim's first layer.

    Attributes:
        reproduction: of the victim.
        layer: the first.
        basis: R (B, N) of its gradient's rows.
    """

    reproduction: Reproduction
    layer: FirstLayer
    basis: Tensor

    @cached_property
    def weight(self) -> Tensor:
        """G (M, N)."""
        return as_gradient(self.reproduction.observation)[self.layer.weight]

    @cached_property
    def bias(self) -> Tensor:
        """g (M,)."""
        return as_gradient(self.reproduction.observation)[self.layer.bias]

    @cached_property
    def _values(self) -> tuple[Tensor, Tensor]:
        """W (M, N) and b (M,)."""
        own = self.reproduction.observation.assumed().parameters
        return own[self.layer.weight], own[self.layer.bias]

    @cached_property
    def _mixture(self) -> Mixture:
        path = self.layer.weight.rpartition(".")[0]
        shape = self.reproduction.observation.input_shape
        return mixture_of(
            self.weight,
            self.bias,
            self._values,
            self.basis,
            Behind(self.reproduction.model, path, shape, self.reproduction.loss),
        )

    def images(self, inputs: Tensor) -> Tensor:
        """(B, C, H, W) of what entered the layer (B, N)."""
        return self.layer.pixels(inputs).reshape(len(inputs), *self.reproduction.observation.input_shape)

    def differ(self, inputs: Tensor) -> bool:
        """Whether none of the images (B, N) is a combination of the others."""
        values = torch.linalg.svdvals(inputs @ self.basis.T) if inputs.isfinite().all() else inputs.new_zeros(1)
        return bool(values[-1] > _DIFFERENT * values[0])

    def classes(self, inputs: Tensor) -> Tensor | None:
        """(B,) the likeliest; ``None`` where nothing tells them."""
        return self.reproduction.classes(self.images(inputs).clamp(0, 1))

    def _is_silent(self, mixing: Tensor, labels: Tensor) -> bool:
        """Whether a ReLU comes behind the layer, as the network says at A (B, B)."""
        return float((self._mixture.signal(mixing, labels)[1] == 0).float().mean()) >= _SILENT

    def behind_zeros(self, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """What the only images (B, N) that go with the zeros of the gradient are; ``None`` where there are no such."""
        mixing, count = inputs @ self.basis.T, len(inputs)
        if not self._is_silent(mixing, labels) or (columns := column_space(self.weight, count)) is None:
            return None
        guess = torch.linalg.solve_ex(mixing.T, (self.weight.double() @ self.basis.T).T)[0].T
        found = factors_near(guess, self.weight, self.bias, self._values, columns)
        return None if found is None or found.agreement < AGREEMENT else found.inputs

    def behind_network(self, inputs: Tensor, labels: Tensor, steps: int, report: Report) -> Tensor:
        """The images (B, N) whose gradient it is, near ``inputs``; labels may turn out to be others on the way.

        What the steps end at is taken where it is likelier than what they started from: by what it leaves of the
        equations, as normal errors of a variance that is not known, and by how independent the images are.
        """
        first = inputs @ self.basis.T
        known = [(first, labels)]
        if self._is_silent(first, labels):
            known += self._by_silence(first)
        start = min(known, key=self._unlikeliness)
        (mixing, labels), reached = start, []
        for number in timely(range(_RELABELED)):
            report((1 + number) / (2 + _RELABELED))
            mixing = unmixed_by_network(self._mixture, mixing, labels, steps=steps)
            reached.append((mixing, labels))
            following = self.classes(mixing @ self.basis)
            if following is None or torch.equal(following, labels):
                break
            labels = following
        end = min(reached, key=lambda tried: _or_worst(misfit(self._mixture, *tried)))
        return min(start, end, key=self._unlikeliness)[0] @ self.basis

    def _by_silence(self, first: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A (B, B) and its classes (B,), from ``first``, where any are found."""
        observed = self._mixture.observed
        found = unmixed_by_silence(
            observed[:, :-1], observed[:, -1], first, self._mixture.projected, self._mixture.bias
        )
        classes = None if found is None else self.classes(found @ self.basis)
        return [] if found is None or classes is None else [(found, classes)]

    def _unlikeliness(self, tried: tuple[Tensor, Tensor]) -> float:
        equations, left = self._mixture.observed.numel(), _or_worst(misfit(self._mixture, *tried))
        fit = equations / 2 * math.log(left) if left > 0 else -math.inf
        return _or_worst(fit + _ALONE * float(unlikeliness(self._features, tried[0])))

    @cached_property
    def _features(self) -> Tensor:
        shape = self.reproduction.observation.input_shape
        return neighbors((self.basis / self.layer.scale).reshape(1, len(self.basis), *shape))[0]


def _or_worst(value: float) -> float:
    """``value``, infinite where it is not a number: a network that says nothing at a guess is no reason to take it."""
    return math.inf if math.isnan(value) else value
