"""Reconstruct images from an update without any search among images, and certify them if they are proven."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Progress, Report, in_parts, no_progress, timely
from fl_privacy.attacks.exact.certificate import (
    Read,
    Reproduction,
    as_one,
    certified,
    is_muted,
    model_as_sent,
    repeated,
    with_repeats,
)
from fl_privacy.attacks.exact.feature_descent import (
    NormalizedLayer,
    find_normalized_layer,
    pixels_of,
    two_examples,
    with_the_bias,
)
from fl_privacy.attacks.exact.first_layer import (
    FirstLayer,
    NotFullyConnectedError,
    PatchEmbedding,
    distinct_ratios,
    find_first_layer,
    find_patch_embedding,
    fit,
    residual,
    solve,
)
from fl_privacy.attacks.exact.r_gap import WRONG, LayerChain, find_chain, recursed
from fl_privacy.attacks.exact.residual import Residual, find_residual, known_between
from fl_privacy.attacks.exact.spear import AGREEMENT, NEARLY, columns_of, sparse_factors
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, expect_gradient, failed, read_group
from fl_privacy.attacks.gradient_inversion.targets import as_gradient, stack
from fl_privacy.checks import number, whole
from fl_privacy.rng import cpu_threads
from fl_privacy.types import Certainty, Observation, Reconstruction

BLOCKS = "exact behind residual blocks"  # name of the sub-attack that solves for one image behind residual blocks
_UNKNOWN = "The equations of one image are expected, but those of the layers disagree."
_TOGETHER = 16  # images behind convolutions that are solved for at once


@dataclass(frozen=True, kw_only=True)
class ExactInversion(GroupAttack):
    """Reconstruct exactly from the first layers' gradients, with a certificate that does not use the originals.

    - One image in front of a fully connected layer is a quotient of gradients (Geiping et al. 2020, proposition 3.1).
    - A batch in front of a ReLU is factored (:mod:`fl_privacy.attacks.exact.spear`; SPEAR, Dimitrov et al. 2024), or
      attacked as by ``attack=analytic``.
    - Batch norm in front is undone (:mod:`fl_privacy.attacks.exact.feature_descent`), and repetitions are counted
      (:mod:`fl_privacy.attacks.exact.certificate`).
    - One image of a vision transformer needs its position embedding's gradient (:class:`PatchEmbedding`).
    - One image behind convolutions without pooling is solved for layer by layer, up to what a ReLU or a narrow first
      convolution hides (:mod:`fl_privacy.attacks.exact.r_gap`).
    - One image behind a residual network is solved for block by block (:mod:`fl_privacy.attacks.exact.residual`), and
      by a descent in front of that (:mod:`fl_privacy.attacks.exact.feature_descent`).

    A reconstruction is ``proven`` if the equations have one solution up to the order of the images, its signs match the
    zeros behind the ReLU, and the whole update is reproduced. Proven are the model's inputs: a defense may have changed
    the images before.

    Attributes:
        rounds: maximal number of searches for sparse directions, for each victim.
        starts: number of starts of a round.
        smallest: rows whose bias gradient is below this share of the largest are left out of quotients.
        alike: quotients closer than this share of their length belong to the same image.
        evaluations: evaluations of the descent, for each image.
    """

    of_rounds = "apart"

    rounds: int = 400
    starts: int = 64
    smallest: float = 1e-4
    alike: float = 1e-2
    evaluations: int = 1200

    def __post_init__(self) -> None:
        whole("attack.rounds", self.rounds, at_least=1, example=400)
        whole("attack.starts", self.starts, at_least=1, example=64)
        number("attack.smallest", self.smallest, at_least=0, below=1, example=1e-4)
        whole("attack.evaluations", self.evaluations, at_least=4, example=1200)
        number("attack.alike", self.alike, at_least=1e-6, example=1e-2)

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        results = list[Reconstruction | None]([None] * len(observations))
        for position, one in ((k, own) for k, o in enumerate(observations) if (own := as_one(o)) is not None):
            (found,) = super().__call__([one], seed=seed)
            if found.certainty is not Certainty.APPROXIMATE:
                results[position] = repeated(found, observations[position].upload.num_examples)
        rest = [o for o, found in zip(observations, results, strict=True) if found is None]
        others = iter(super().__call__(rest, seed=seed, progress=progress) if rest else ())
        return [next(others) if found is None else found for found in results]

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        expect_gradient(group.first)
        source = _source(group.first)
        if isinstance(source, LayerChain):
            return in_parts(group.observations, _TOGETHER, "exact", report, partial(_recursed, source))
        if isinstance(source, Residual):
            run = partial(_behind_blocks, source, seed, self.evaluations)
            return in_parts(group.observations, _TOGETHER, "exact", report, run)
        model = model_as_sent(group.first)

        def read(observation: Observation, rng: torch.Generator, report: Report) -> Reconstruction:
            if not as_gradient(observation)[source.names[-1]].any():
                return failed(observation, f"A gradient of {source.names[-1]} is expected, but all of it is zero.")
            victim = Reproduction(observation, model)
            if isinstance(source, PatchEmbedding):
                return certified(victim, solve(source, as_gradient(observation)))
            return certified(victim, self._connected(victim, source, rng, report))

        return read_group(group, read, name="exact", seed=seed, report=report)

    def _connected(self, victim: Reproduction, layer: FirstLayer, rng: torch.Generator, report: Report) -> Read:
        weight, bias = (as_gradient(victim.observation)[name] for name in layer.names)
        shade = layer.pixels(torch.zeros_like(layer.shift))

        def read(inputs: Tensor, unique: bool) -> Read:
            images, note = with_repeats(
                victim, layer.pixels(inputs).reshape(len(inputs), *victim.observation.input_shape)
            )
            loss = float(residual(weight[None], bias[None], inputs[None]))
            return Read(images, unique and not is_muted(weight, shade), loss, note)

        def explains(inputs: Tensor) -> bool:
            return certified(victim, read(inputs, False)).certainty is not Certainty.APPROXIMATE

        return read(*self._inputs(victim.observation, layer, rng, report, explains))

    def _inputs(
        self,
        observation: Observation,
        layer: FirstLayer,
        rng: torch.Generator,
        report: Report,
        explains: Callable[[Tensor], bool],
    ) -> tuple[Tensor, bool]:
        """Return the layer's inputs (B, N), and ``True`` if no others could have entered."""
        count, near = observation.upload.num_examples, NEARLY
        weight, bias = (as_gradient(observation)[name] for name in layer.names)
        if count == 1:
            return fit(weight[None], bias[None]), True
        if count == 2 and isinstance(layer, NormalizedLayer):
            both = two_examples(layer, weight, bias)
            if both is not None:
                return both, explains(both)
        joined, sent = with_the_bias(layer, weight, bias), observation.sent.parameters
        basis = columns_of(joined, count)
        if basis is not None and basis.shape[1] < count and len(weight) <= max(count + 1, observation.num_classes):
            basis = None  # with so few outputs, different examples have a low rank, too
        if basis is not None and basis.shape[1] == 1:
            if explains(alike := fit(weight[None], bias[None])):
                return alike, True
        elif basis is not None:
            values = with_the_bias(layer, sent[layer.weight], sent[layer.bias]), sent[layer.bias]
            if joined is not weight:
                values = values[0], torch.zeros_like(values[1])
            searched = sparse_factors(joined, bias, values, basis, rng=rng, starts=self.starts)
            for number, factors in zip(timely(range(self.rounds)), searched, strict=False):
                report(number / self.rounds)
                if factors is None or factors.agreement <= near:
                    continue
                inputs = factors.inputs[:, : weight.shape[1]]
                if factors.agreement >= AGREEMENT or explains(inputs):
                    return inputs, factors.agreement >= AGREEMENT
                near = factors.agreement
        alone = distinct_ratios(weight[None], bias[None], count=count, smallest=self.smallest, alike=self.alike)
        return alone[0], False


def _recursed(chain: LayerChain, observations: dict[int, Observation], report: Report) -> dict[int, Reconstruction]:
    updates, results = [as_gradient(each) for each in observations.values()], dict[int, Reconstruction]()
    with cpu_threads(1):
        images, lost = recursed(chain, stack(updates, list(chain.names), chain.shift.device, torch.float64))
    model = model_as_sent(next(iter(observations.values())))
    for (position, observation), image, left in zip(observations.items(), images, lost.tolist(), strict=True):
        read = Read(image[None], unique=False, loss=left)
        results[position] = (
            _certified_in_range(Reproduction(observation, model), read)
            if left < WRONG
            else failed(observation, _UNKNOWN)
        )
    report(1.0)
    return results


@cpu_threads(1)
def _behind_blocks(
    network: Residual, seed: int, evaluations: int, observations: dict[int, Observation], report: Report
) -> dict[int, Reconstruction]:
    positions = list(observations)
    updates = [as_gradient(observation) for observation in observations.values()]
    known = known_between(network, stack(updates, list(network.names), network.device, torch.float64))
    results, rows = dict[int, Reconstruction](), known.found.nonzero().flatten()
    for row in (~known.found).nonzero().flatten().tolist():
        own = positions[row]
        if len(positions) > 1 and known.started[row]:
            results |= _behind_blocks(network, seed, evaluations, {own: observations[own]}, lambda part: None)
        else:
            results[own] = failed(observations[own], _UNKNOWN)
    if len(rows):
        images, lost = pixels_of(network, known.of(rows), evaluations=evaluations, seed=seed, report=report)
        for row, image, left in zip(rows.tolist(), images, lost.tolist(), strict=True):
            reproduction = Reproduction(observations[positions[row]], model_as_sent(observations[positions[row]]))
            solved = _certified_in_range(reproduction, Read(image[None], unique=False, loss=left))
            results[positions[row]] = replace(solved, member=BLOCKS)
    return results


def _certified_in_range(reproduction: Reproduction, read: Read) -> Reconstruction:
    """Certify the solved images, cut to [0, 1] unless only uncut ones reproduce the update."""
    cut = certified(reproduction, replace(read, images=read.images.clamp(0, 1)))
    if cut.certainty is not Certainty.APPROXIMATE:
        return cut
    beyond = certified(reproduction, read)
    return cut if beyond.certainty is Certainty.APPROXIMATE else beyond


def _source(observation: Observation) -> FirstLayer | PatchEmbedding | LayerChain | Residual:
    model, sent, shape = observation.model, observation.assumed(), observation.input_shape
    fixed = observation.plan.batch_norm == "eval"
    source: FirstLayer | PatchEmbedding | LayerChain | Residual | None = None
    if observation.upload.num_examples == 1:
        source = find_patch_embedding(model, sent, shape, fixed_norms=fixed)
        source = source or find_chain(observation) or find_residual(observation)
    source = source or find_normalized_layer(observation) or find_first_layer(model, sent, shape, fixed_norms=fixed)
    if missing := set(source.names) - observation.upload.tensors.keys():
        raise NotFullyConnectedError(f"The gradient of {min(missing)} is expected, but was withheld.")
    return source
