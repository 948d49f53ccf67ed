"""Reconstruct images by solving equations of the first layers, and certify them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fl_privacy.attacks.adaptive.constraints import beyond_cut
from fl_privacy.attacks.attack import Report, even_share, in_parts, part_of, timely
from fl_privacy.attacks.exact import certificate, first_layer
from fl_privacy.attacks.exact.batch_norm import Centered, centered, find_normalized_outputs, known_by_statistics
from fl_privacy.attacks.exact.first_layer import FirstLayer, NotFullyConnectedError, find_first_layer, probe_first_layer
from fl_privacy.attacks.exact.r_gap import WRONG, LayerChain, find_chain, recursed
from fl_privacy.attacks.exact.residual import Known, Residual, find_residual, known_between
from fl_privacy.attacks.exact.spear import AGREEMENT, NEARLY, columns_of, orthogonal_factors, sparse_factors
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, expect_gradient, failed, read_group
from fl_privacy.attacks.gradient_inversion.priors import of_batch
from fl_privacy.attacks.gradient_inversion.targets import as_gradient, stack
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.checks import number, whole
from fl_privacy.effects import Truncated
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.progress import Progress, no_progress
from fl_privacy.rng import cpu_threads
from fl_privacy.types import Certainty, ModelState, Observation, Reconstruction

SMOOTH = (1e-1, 1e-2, 1e-3, 1e-4)
"""Weights of the mean total variation in successive stages; the mismatch is a sum of relative squared distances."""

_SURE = 1e-3  # outputs of a ReLU above this share of the largest determine its inputs; smaller ones only bound them
_SPREAD = 0.02  # spread of the first pixels around 0.5
_BLURS = (1, 3, 5, 3, 5)  # pixels over which the best images are averaged before each try; those of fixed norms once
_SOLVED = 1e-4  # mismatch below which images are not averaged and fitted again
_NEAREST = 2  # blocks nearest to the image whose outputs are matched
_DEEPER = 3  # factor on the evaluations in training mode, where fewer blocks are solved for; each costs a third
_PATIENCE, _PROGRESS = 30, 1e-3  # evaluations without this relative fall of the loss that end a stage, in training mode


def pixels_of(network: Residual, known: Known, *, evaluations: int, seed: int, report: Report) -> tuple[Tensor, Tensor]:
    """Fit V images (V, C, H, W) to the activations and equations in ``known``, by L-BFGS.

    Return float64 images and their mismatch (V,), a sum of relative squared distances. ``evaluations``: number of loss
    evaluations for each image.
    """
    missed, deep = _loss(network, known), bool(network.norms)
    like, shape = next(iter(known.values.values())), network.shapes[network.graph.image]
    rng, each = torch.Generator().manual_seed(seed), max(1, (_DEEPER if deep else 1) * evaluations // len(SMOOTH))
    start = 0.5 + _SPREAD * (torch.rand(1, *shape, generator=rng, dtype=like.dtype) - 0.5)
    best, least = start.to(like.device).repeat(len(like), 1, 1, 1), torch.full_like(known.left, torch.inf)
    tries = _BLURS if deep else _BLURS[:1]
    for turn, width in enumerate(timely(tries)):
        images = F.avg_pool2d(F.pad(best, [width // 2] * 4, mode="replicate"), width, 1)
        shown = part_of(report, turn / len(tries), (turn + 1) / len(tries))
        with even_share(len(tries) - turn):
            images = _staged(missed, images, each, shown, patience=_PATIENCE if deep else each)
        with torch.no_grad():
            lost = missed(images)
        better = lost < least
        best, least = torch.where(better[:, None, None, None], images, best), torch.where(better, lost, least)
        if least.max() < _SOLVED:
            break
    return best, least


def _staged(
    missed: Callable[[Tensor], Tensor], images: Tensor, evaluations: int, report: Report, *, patience: int
) -> Tensor:
    for stage, weight in enumerate(timely(SMOOTH)):

        def loss(images: Tensor, weight: float = weight) -> Tensor:
            return (
                missed(images)
                + weight * (images.diff(dim=-1).abs().flatten(1).mean(1) + images.diff(dim=-2).abs().flatten(1).mean(1))
                + (F.relu(-images) + F.relu(images - 1)).square().flatten(1).mean(1)
            )

        shown = part_of(report, stage / len(SMOOTH), (stage + 1) / len(SMOOTH))
        with even_share(len(SMOOTH) - stage):
            images = _descended(loss, images, evaluations, shown, patience=patience)
    return images


def _loss(network: Residual, known: Known) -> Callable[[Tensor], Tensor]:
    graph = network.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    nearest = sorted(known.values, key=order.__getitem__)[: 2 * _NEAREST - 1]
    targets = {node: known.values[node] for node in nearest}
    sizes = {node: _squares(values) for node, values in targets.items()}
    moved = [(node, own, own.left, own.right, _squares(own.right)) for node, own in known.equations]
    furthest = max([*nearest, *(node for node, *_ in moved)], key=order.__getitem__)

    def missed(images: Tensor) -> Tensor:
        found = graph.values({graph.image: images}, furthest)
        parts = [_squared_distances(network, node, found, values) / sizes[node] for node, values in targets.items()]
        parts += [_squares(left @ found[node].flatten(2).mT - right) / size for node, _, left, right, size in moved]
        return torch.stack(parts).sum(0)

    return missed


def _squared_distances(network: Residual, node: fx.Node, found: Mapping[fx.Node, Tensor], values: Tensor) -> Tensor:
    """Return squared distances (V,) between ``found`` at ``node`` and ``values``; for active ReLUs, at their input."""
    if network.graph.kind(node) != "relu":
        return _squares(found[node] - values)
    (given,) = node.all_input_nodes
    sure = values > _SURE * values.flatten(1).amax(1)[:, None, None, None]
    return _squares(torch.where(sure, found[given], F.relu(found[given])) - values)


def _squares(values: Tensor) -> Tensor:
    return values.flatten(1).square().sum(1)


def _descended(
    loss: Callable[[Tensor], Tensor], images: Tensor, evaluations: int, report: Report, *, patience: int
) -> Tensor:
    shape, variables = images.shape, images.flatten(1)
    best, least = variables, torch.full_like(variables[:, 0], torch.inf)
    mark, since = least, 0
    settings = LBFGS(inner=20, history=50, line_search="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0)
    run = settings.start(variables, iterations=evaluations, images=variables.shape[1])
    for step in timely(range(evaluations)):
        inputs = variables.detach().requires_grad_(True)
        values = loss(inputs.view(shape))
        (gradient,) = torch.autograd.grad(values.sum(), inputs)
        values = values.detach()
        better = values < least
        best, least = torch.where(better[:, None], variables, best), torch.where(better, values, least)
        variables, _, finished = run.step(variables, values, gradient)
        falls, since = least < (1 - _PROGRESS) * mark, since + 1
        if falls.any():
            mark, since = torch.where(falls, least, mark), 0
        report(step / evaluations)
        if finished.all() or since >= patience:
            break
    return best.view(shape)


@dataclass(frozen=True, eq=False)
class NormalizedLayer(FirstLayer):
    """A model's first fully connected layer, whose inputs come from batch norm in training mode.

    ``center``: mean (N,) of each of the N inputs over the batch. ``spread``: (N,) their standard deviations; ``None``
    if several inputs share one mean, as the pixels of a channel do.
    """

    center: Tensor
    spread: Tensor | None


def find_normalized_layer(observation: Observation) -> NormalizedLayer | None:
    """Find the model's :class:`NormalizedLayer`; ``None`` if there is none, or batch norm's statistics are unknown."""
    plan, sent, shape = observation.plan, observation.assumed(), observation.input_shape
    size = observation.upload.num_examples
    if plan.batch_norm != "train" or (plan.shares != "gradient" and number_of_steps(size, plan) != 1):
        return None
    try:
        first = probe_first_layer(observation.model, sent, shape)
    except NotFullyConnectedError:
        return None
    norm = first.module
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or not first.one_by_one or norm.running_var is None:
        return None
    each = first.random.numel() // norm.num_features
    found = of_batch(observation, first.name, size * each)
    if not found:
        return None
    mean, variance = found.values()
    own = {name: value.to(sent.buffers[name]) for name, value in found.items()}
    state = ModelState(sent.parameters, {**sent.buffers, **own})
    layer = find_first_layer(observation.model, state, shape, fixed_norms=True)
    weight = sent.parameters.get(f"{first.name}.weight", torch.ones_like(mean)).double()
    bias = sent.parameters.get(f"{first.name}.bias", torch.zeros_like(mean)).double()
    spread = weight * (variance / (variance + norm.eps)).sqrt() if each == 1 else None
    return NormalizedLayer(*layer.names, layer.shift, layer.scale, bias.repeat_interleave(each), spread)


def two_examples(layer: NormalizedLayer, weight: Tensor, bias: Tensor) -> Tensor | None:
    """Return the inputs (2, N) of a batch of two: ``center`` plus and minus ``spread``; ``None`` without a spread."""
    if layer.spread is None:
        return None
    direction = torch.linalg.svd(weight.double() - bias.double()[:, None] * layer.center, full_matrices=False)[2][0]
    off = direction.sign() * layer.spread.abs()
    return torch.stack([layer.center + off, layer.center - off])


def with_the_bias(layer: FirstLayer, weight: Tensor, bias: Tensor) -> Tensor:
    """Append the bias's gradient to the weight's as a column, if ``layer`` is a :class:`NormalizedLayer`."""
    return torch.cat([weight, bias[:, None]], 1) if isinstance(layer, NormalizedLayer) else weight


BLOCKS = "exact behind residual blocks"  # name of the sub-attack that solves for one image behind residual blocks
_UNDETERMINED = "Batch norm's statistics are expected to determine the covariance, but do not; use attack=auto."
_UNTURNED = "The examples are known up to a rotation of their differences; use attack=auto."
_IN_PART = "Only some of the batch's examples are determined by the update, or all but for a shift that they share."
_UNKNOWN = "The equations of one image are expected, but those of the layers disagree; use attack=auto."
_Source = first_layer.FirstLayer | first_layer.PatchEmbedding | LayerChain | Residual
_TOGETHER = 16  # images behind convolutions that are solved for at once


@dataclass(frozen=True, kw_only=True)
class ExactInversion(GroupAttack):
    """Attack that solves for images from the first layers' gradients, and certifies them without the originals.

    - For one image, a fully connected first layer's input is a quotient: a row of the weight's gradient divided by the
      bias's (Geiping et al. 2020, Prop. 3.1).
    - A batch is found by SPEAR if a ReLU follows the layer (:mod:`fl_privacy.attacks.exact.spear`, Dimitrov et al.
      2024), else by the method of ``attack=analytic``.
    - Batch norm before that layer is inverted, and copies of an image are counted
      (:mod:`fl_privacy.attacks.exact.certificate`).
    - One image of a vision transformer needs its position embedding's gradient (:class:`PatchEmbedding`).
    - One image that enters convolutions without pooling is solved for layer by layer
      (:mod:`fl_privacy.attacks.exact.r_gap`).
    - Images of a residual network are solved for block by block (:mod:`fl_privacy.attacks.exact.residual`, for batches
      :mod:`fl_privacy.attacks.exact.batch_norm`); L-BFGS then fits pixels to the results.

    A reconstruction is ``proven`` if the equations have one solution up to the order of the images, the signs of the
    ReLU's inputs match the zeros of the gradient, and the whole update is reproduced. The proof concerns the model's
    inputs, which a defense may have changed.

    Attributes:
        rounds: largest number of rounds of SPEAR's search for sparse columns.
        starts: number of random starts in each of these rounds.
        smallest: least bias gradient of a row, as a share of the largest; rows below are left out.
        alike: relative distance below which two quotients belong to the same image.
        evaluations: number of L-BFGS's loss evaluations for each image of a residual network. Batches and training mode
            take up to 15 times as many, of a cheaper loss.
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
        for position, one in (
            (k, own) for k, o in enumerate(observations) if (own := certificate.as_one(o)) is not None
        ):
            (found,) = super().__call__([one], seed=seed)
            if found.certainty is not Certainty.APPROXIMATE:
                results[position] = certificate.repeated(found, observations[position].upload.num_examples)
        rest = [o for o, found in zip(observations, results, strict=True) if found is None]
        others = iter(super().__call__(rest, seed=seed, progress=progress) if rest else ())
        return [next(others) if found is None else found for found in results]

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        parts = [part for one in group.observations.values() for part in one.knowledge.defense or ()]
        cuts = [part.effect for part in parts if isinstance(part.effect, Truncated)]
        return self.solved_once(self._solve, group, seed, report, used=cuts)

    def _solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        if find_normalized_outputs(group.first) is not None:
            return read_group(group, self._with_normalized_outputs, name="exact", seed=seed, report=report)
        expect_gradient(group.first)
        source = _source(group.first)
        if isinstance(source, LayerChain):
            return in_parts(group.observations, _TOGETHER, "exact", report, partial(_recursed, source))
        if isinstance(source, Residual):
            run = partial(_behind_blocks, source, seed, self.evaluations)
            return in_parts(group.observations, 1 if source.norms else _TOGETHER, "exact", report, run)
        model = certificate.model_as_sent(group.first)

        def read(observation: Observation, rng: torch.Generator, report: Report) -> Reconstruction:
            own = find_normalized_layer(observation) if isinstance(source, NormalizedLayer) else source
            if own is None or not as_gradient(observation)[source.names[-1]].any():
                return failed(
                    observation, f"{source.names[-1]} is expected, but its gradient is zero; check the upload."
                )
            victim = certificate.Reproduction(observation, model)
            if isinstance(own, first_layer.PatchEmbedding):
                return certificate.certified(victim, first_layer.solve(own, as_gradient(observation)))
            return certificate.certified(victim, self._connected(victim, own, rng, report))

        return read_group(group, read, name="exact", seed=seed, report=report)

    def _with_normalized_outputs(
        self, observation: Observation, rng: torch.Generator, report: Report
    ) -> Reconstruction:
        count, layer = observation.upload.num_examples, find_normalized_outputs(observation)
        if count > 2:
            expect_gradient(observation)
        known = None if layer is None else centered(observation, layer)
        if layer is None or known is None:
            return failed(observation, _UNDETERMINED)
        read = self._rotated(known, rng, report)
        if read is None:
            return failed(observation, _UNTURNED)
        inputs, whole = read
        images = layer.pixels(inputs).reshape(count, *observation.input_shape)
        sure = known.sure and whole and known.left < certificate.ROUNDING
        victim = certificate.Reproduction(observation, certificate.model_as_sent(observation))
        found = certificate.certified(victim, certificate.Read(images, False, known.left, confirmed=sure))
        return found if whole else replace(found, certainty=Certainty.APPROXIMATE, notes=(*found.notes, _IN_PART))

    def _rotated(self, known: Centered, rng: torch.Generator, report: Report) -> tuple[Tensor, bool] | None:
        """Find the rotation that ``known`` leaves open; return the inputs (B, N), and ``True`` if they are unique."""
        if known.count == 2:
            return known.inputs(known.center.new_tensor([[1.0, 1.0], [-1.0, 1.0]]))
        best, fewest = None, known.joined.shape[1]
        searched = orthogonal_factors(known.joined, known.values, known.count, rng=rng, starts=self.starts)
        for step, (rows, missing) in zip(timely(range(self.rounds)), searched, strict=False):
            report(step / self.rounds)
            if missing < fewest and (found := known.inputs(rows, missing)) is not None:
                best, fewest = found, missing
            if fewest <= 2:
                break
        return best

    def _connected(
        self, victim: certificate.Reproduction, layer: first_layer.FirstLayer, rng: torch.Generator, report: Report
    ) -> certificate.Read:
        weight, bias = (as_gradient(victim.observation)[name] for name in layer.names)
        shade = layer.pixels(torch.zeros_like(layer.shift))

        def read(inputs: Tensor, unique: bool) -> certificate.Read:
            images, note = certificate.with_repeats(
                victim, layer.pixels(inputs).reshape(len(inputs), *victim.observation.input_shape)
            )
            loss = float(first_layer.residual(weight[None], bias[None], inputs[None]))
            return certificate.Read(images, unique and not certificate.is_muted(weight, shade), loss, note)

        def explains(inputs: Tensor) -> bool:
            return certificate.certified(victim, read(inputs, False)).certainty is not Certainty.APPROXIMATE

        return read(*self._inputs(victim.observation, layer, rng, report, explains))

    def _inputs(
        self,
        observation: Observation,
        layer: first_layer.FirstLayer,
        rng: torch.Generator,
        report: Report,
        explains: Callable[[Tensor], bool],
    ) -> tuple[Tensor, bool]:
        """Return inputs (B, N) of ``layer``, and ``True`` if no others reproduce the update (``explains`` tests it)."""
        count, near = observation.upload.num_examples, NEARLY
        weight, bias = (as_gradient(observation)[name] for name in layer.names)
        if count == 1:
            return first_layer.fit(weight[None], bias[None]), True
        if count == 2 and isinstance(layer, NormalizedLayer):
            both = two_examples(layer, weight, bias)
            if both is not None:
                return both, explains(both)
        joined, sent = with_the_bias(layer, weight, bias), observation.sent.parameters
        basis = columns_of(joined, count)
        if basis is not None and basis.shape[1] < count and len(weight) <= max(count + 1, observation.num_classes):
            basis = None  # with so few outputs, different examples have a low rank, too
        if basis is not None and basis.shape[1] == 1:
            if explains(alike := first_layer.fit(weight[None], bias[None])):
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
        alone = first_layer.distinct_ratios(
            weight[None], bias[None], count=count, smallest=self.smallest, alike=self.alike
        )
        return alone[0], False


def _recursed(chain: LayerChain, observations: dict[int, Observation], report: Report) -> dict[int, Reconstruction]:
    updates, results = [as_gradient(each) for each in observations.values()], dict[int, Reconstruction]()
    with cpu_threads(1):
        images, lost = recursed(chain, stack(updates, list(chain.names), chain.shift.device, torch.float64))
    model = certificate.model_as_sent(next(iter(observations.values())))
    for (position, observation), image, left in zip(observations.items(), images, lost.tolist(), strict=True):
        read = certificate.Read(image[None], unique=False, loss=left)
        reproduction = certificate.Reproduction(observation, model)
        solved = left < WRONG
        results[position] = _certified_in_range(reproduction, read) if solved else failed(observation, _UNKNOWN)
    report(1.0)
    return results


def complete_head(observation: Observation, head: str) -> Observation:
    """Estimate the elements of layer ``head``'s update that a defense clipped or zeroed; for a single example only."""
    effect = next((e for part in observation.knowledge.defense or () if isinstance(e := part.effect, Truncated)), None)
    if effect is None or observation.plan.weight_decay or observation.upload.num_examples > 1:
        return observation
    tensors, names = dict(observation.upload.tensors), (f"{head}.weight", f"{head}.bias")
    update = {name: tensor.double() for name, tensor in observation.update().items()}
    bounds, (weight, bias) = beyond_cut(effect, update, 0.0), (update[name] for name in names)
    kept, stated = ((update[name] != 0) & (bounds[name][1] - bounds[name][0]).isfinite() for name in names)
    if not stated.any():
        return observation
    slopes, tiny = bias * stated, torch.finfo(weight.dtype).tiny
    features = slopes @ (weight * kept) / (slopes.square() @ kept.double()).clamp_min(tiny)
    own = (kept * features) @ features
    slopes = torch.where(stated, bias, (weight * kept) @ features / own.clamp_min(tiny))
    features = slopes @ (weight * kept) / (slopes.square() @ kept.double()).clamp_min(tiny)
    completed = torch.where(kept, weight, slopes[:, None] * features), slopes
    tensors |= {name: tensors[name] + (value - update[name]) for name, value in zip(names, completed, strict=True)}
    return replace(observation, upload=replace(observation.upload, tensors=tensors))


@cpu_threads(1)
def _behind_blocks(
    network: Residual, seed: int, evaluations: int, observations: dict[int, Observation], report: Report
) -> dict[int, Reconstruction]:
    observations = {k: complete_head(one, str(network.head.target)) for k, one in observations.items()}
    positions = list(observations)
    updates = [as_gradient(observation) for observation in observations.values()]
    gradients = stack(updates, list(network.names), network.device, torch.float64)
    network.use(observations[positions[0]])  # with norms of its own, a part is one update
    known = known_by_statistics(network, gradients) if network.norms else known_between(network, gradients)
    found = known.found.view(len(positions), -1).all(1)
    results, rows = dict[int, Reconstruction](), found.nonzero().flatten().tolist()
    for row in (~found).nonzero().flatten().tolist():
        own = positions[row]
        if len(positions) > 1 and known.started[row]:
            results |= _behind_blocks(network, seed, evaluations, {own: observations[own]}, lambda part: None)
        else:
            results[own] = failed(observations[own], _UNKNOWN)
    if rows:
        kept = known.of(found.repeat_interleave(network.count).nonzero().flatten())
        images, lost = pixels_of(network, kept, evaluations=evaluations, seed=seed, report=report)
        for row, batch, left in zip(rows, *(torch.split(each, network.count) for each in (images, lost)), strict=True):
            observation = observations[positions[row]]
            reproduction = certificate.Reproduction(observation, certificate.model_as_sent(observation))
            read = certificate.Read(batch, unique=False, loss=float(left.mean()))
            results[positions[row]] = replace(_certified_in_range(reproduction, read), member=BLOCKS)
    return results


def _certified_in_range(reproduction: certificate.Reproduction, read: certificate.Read) -> Reconstruction:
    cut = certificate.certified(reproduction, replace(read, images=read.images.clamp(0, 1)))
    if cut.certainty is not Certainty.APPROXIMATE:
        return cut
    beyond = certificate.certified(reproduction, read)
    return cut if beyond.certainty is Certainty.APPROXIMATE else beyond


def _source(observation: Observation) -> _Source:
    model, sent, shape = observation.model, observation.assumed(), observation.input_shape
    fixed = observation.plan.batch_norm == "eval"
    source: _Source | None = None
    if observation.upload.num_examples == 1:
        source = first_layer.find_patch_embedding(model, sent, shape, fixed_norms=fixed) or find_chain(observation)
    source = source or find_residual(observation) or find_normalized_layer(observation)
    source = source or first_layer.find_first_layer(model, sent, shape, fixed_norms=fixed)
    if missing := set(source.names) - observation.upload.tensors.keys():
        raise first_layer.NotFullyConnectedError(f"{min(missing)} is expected, but was withheld; use attack=auto.")
    return source
