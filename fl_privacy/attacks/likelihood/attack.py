"""Find the likeliest images given the updates, the defense and an image prior."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive import AssumedTransform, looks_noisy
from fl_privacy.attacks.attack import Report, part_of, timely
from fl_privacy.attacks.gradient_inversion.evident_defense import undo_evident_defenses
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, failed
from fl_privacy.attacks.gradient_inversion.labels import output_layer, policy_for
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, PreparedRound, PreparedVictim, prepare
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, matched_per_uploaded
from fl_privacy.attacks.likelihood.channel import Channel, Clientele, channel
from fl_privacy.attacks.pixel_prior import FEWEST, PixelPrior, learn_prior, prior_of_photographs
from fl_privacy.checks import number, one_of, whole
from fl_privacy.effects import Clipped, ClippedExamples, Effect, Noise, Summed
from fl_privacy.models.gradients import differentiable_twice, number_of_steps
from fl_privacy.rng import cpu_threads, derive_generator
from fl_privacy.types import Batch, Observation, Reconstruction, Tensors
from fl_privacy.types.modality import modality_of

_OUTSIDE = 20.0  # weight of the squared distance of pixels from [0, 1]
_ROUNDS_AT_ONCE = 8  # sent models whose updates are compared in one step, drawn anew for each step
_CLASSES_TRIED = 16  # largest number of classes whose mean image is tried against the update of a single example
_SAME = Batch(torch.empty(0), torch.empty(0))
_DOUBTFUL = 8.0  # difference of negative log likelihoods above which the less likely class is not tried
_SOFTENED = 0.3  # noise at the start of a descent, as a share of each tensor's root mean square


@dataclass(frozen=True, eq=False)
class Likelihood:
    """Negative log likelihood of V victims' updates in all rounds."""

    states: Sequence[tuple["Guesser", Sequence[Channel]]]  # guessed uploads and observed channels for each model sent
    transform: AssumedTransform | None = None  # clients' possible transforms, if any

    @property
    def uploads(self) -> int:
        return sum(channel.uploads for _, channels in self.states for channel in channels)

    def __call__(
        self, images: Tensor, labels: Tensor, *, softening: float = 0.0, rng: torch.Generator | None = None
    ) -> Tensor:
        """Return the negative log likelihood (V,) of V victims' updates at ``images`` (V, B, C, H, W).

        ``softening``: additional noise, as a share of each tensor's root mean square. If ``rng`` is given, a random
        subset of the sent models gives an unbiased estimate.
        """
        chosen = list(range(len(self.states)))
        if rng is not None and len(chosen) > _ROUNDS_AT_ONCE:
            chosen = torch.randperm(len(chosen), generator=rng)[:_ROUNDS_AT_ONCE].tolist()
        images = images if self.transform is None else self.transform(images)
        terms = []
        for place in chosen:
            guesser, channels = self.states[place]
            uploads = guesser(images, labels)
            terms += [one.loss(uploads, softening) for one in channels]
        return torch.stack(terms).sum(0) * (len(self.states) / len(chosen))


@dataclass(frozen=True, eq=False)
class Guesser:
    """Function from guessed images and labels to the uploads that they would give without defense."""

    round: PreparedRound
    factor: float  # factor from the guessed gradient to the upload, with its sign
    decay: Tensors  # (1, *shape) part of weight decay in the upload, by name
    norm: float | None = None  # largest norm of each example's gradient before averaging; ``None`` without clipping

    def __call__(self, images: Tensor, labels: Tensor) -> Tensors:
        if self.norm is None or images.shape[1] == 1:
            found = self.round.gradients(images, labels)
        else:
            each = self.round.gradients(images.flatten(0, 1)[:, None], labels.flatten(0, 1)[:, None])
            squared = torch.stack([value.flatten(1).square().sum(1) for value in each.values()]).sum(0)
            factors = (self.norm / squared.clamp_min(1e-30).sqrt()).clamp(max=1)
            clipped = {name: factors.view(-1, *[1] * (value.dim() - 1)) * value for name, value in each.items()}
            found = {n: value.reshape(*images.shape[:2], *value.shape[1:]).mean(1) for n, value in clipped.items()}
        return {name: self.factor * value + self.decay.get(name, 0) for name, value in found.items()}


@dataclass(frozen=True, eq=False)
class Explained:
    """The likeliest images (V, B, C, H, W) of V victims, with labels (V, B)."""

    images: Tensor
    labels: Tensor
    loss: Tensor  # (V,) negative log posterior density, up to a constant
    history: Tensor  # losses (T, V) at T iterations
    transform: AssumedTransform | None = None


@dataclass(frozen=True, kw_only=True)
class MaximumAPosteriori(GroupAttack):
    """Attack that finds the images with the largest posterior density, from all updates and an image prior.

    The likelihood follows from the defense, known or inferred from the update
    (:mod:`fl_privacy.attacks.likelihood.channel`), jointly over all updates of the same examples. The prior is normal:
    mean and principal components of a class's public images, or the spectrum of photographs. A result counts as leakage
    only if it beats a control: the same attack on updates of other examples.
    """

    iterations: int = 150  # number of Adam's steps on the coefficients of the components
    lr: float = 0.1  # first learning rate, in standard deviations of a coefficient
    attempts: int = 2  # largest number of attempts at each victim, with different labels
    prior: str = "auto"  # ``auto``: that of public images, if any, else of photographs; ``photographs``: always these
    dtype: str = "float32"
    device: str | None = None  # device of the computation; ``None``: that of the sent model's values
    most_victims: int | None = None  # largest number of victims in one chunk; ``None``: found from the free memory

    def __post_init__(self) -> None:
        whole("attack.iterations", self.iterations, at_least=1, example=150)
        whole("attack.attempts", self.attempts, at_least=1, example=2)
        number("attack.lr", self.lr, above=0, example=0.1)
        one_of("attack.prior", self.prior, ("auto", "photographs"))
        one_of("attack.dtype", self.dtype, ("float32", "float64"))

    def see(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        return undo_evident_defenses(observations)

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        return {position: one.reconstruction for position, one in self.explain(group, seed, report).items()}

    def explain(self, group: Group, seed: int, report: Report) -> dict[int, "WithPosterior"]:
        """Return the likeliest images by position in ``group``; raise ``NotAttackableError`` for texts and rows."""
        first = group.first
        if not modality_of(first.model).pixels or len(first.input_shape) != 3:
            raise NotAttackableError("Images are expected, but got texts or rows; use attack=auto.")
        every = first.upload.num_examples == 1 and first.num_classes <= _CLASSES_TRIED
        settings = replace(self._settings, labels=policy_for(first)) if every else self._settings
        with cpu_threads(1):
            prepared = prepare(settings, group, seed)
        results = {p: WithPosterior(failed(group.observations[p], why)) for p, why in prepared.failures.items()}
        capacity = max(1, prepared.capacity)
        for begin in range(0, len(prepared.victims), capacity):
            victims = prepared.victims[begin : begin + capacity]
            number = len(prepared.victims)
            shown = part_of(report, begin / number, (begin + len(victims)) / number)
            results |= self._explain(prepared, victims, shown)
        return results

    @property
    def _settings(self) -> Settings:
        return Settings(
            objective=L2(),
            labels="auto",
            compile="off",
            dtype=self.dtype,  # type: ignore[arg-type]
            device=self.device,
            most_victims=self.most_victims,
        )

    def _explain(
        self, prepared: Prepared, victims: Sequence[PreparedVictim], report: Report
    ) -> dict[int, "WithPosterior"]:
        first, like = victims[0].observation, next(prepared.observer.parameters())
        given, prior = first.knowledge, None
        if given.public_images is not None and self.prior != "photographs" and len(given.public_images) >= FEWEST:
            prior = learn_prior(given.public_images, given.public_labels, first.num_classes)
        prior = (prior or prior_of_photographs(tuple(first.input_shape))).to(like)
        if prepared.rounds[0].known.transforms:  # transforms are drawn anew in each round
            prepared = replace(prepared, rounds=prepared.rounds[:1])
        likelihood = likelihood_of_victims(prepared, victims)
        transforms, best = len(prepared.rounds[0].known.transforms), None
        ranked, doubtful = _likely_labels(Posterior(likelihood, prior), prepared, victims, self.attempts)
        doubtful = 1 if transforms else doubtful
        number = max(doubtful, transforms)
        for attempt in range(number):
            shown = part_of(report, attempt / number, (attempt + 1) / number)
            likelihood = replace(likelihood, transform=prepared.transform(victims, [attempt] * len(victims)))
            start, labels = Posterior(likelihood, prior), ranked[:, attempt if attempt < doubtful else 0]
            found = self._descend(start, prepared, labels, attempt=0 if transforms else attempt, report=shown)
            best = found if best is None else _better(best, found)
        assert best is not None
        parts = victims[0].observation.knowledge.defense or ()
        noisy = any(looks_noisy(part.effect) for part in parts)
        under = "noise and all else that the defense does" if noisy else "defense"
        known = f"learned from {prior.images} public images" if prior.images else "which fall off as photographs' do"
        drawn = f"Images are drawn to a normal distribution, {known}{', and no more' * (not prior.images)}."
        said = sentences(likelihood, "image", drawn, same="examples", under=under)
        posterior = Posterior(replace(likelihood, transform=best.transform), prior, best.images, best.labels)
        return {victim.position: _answer(best, row, victim, said, posterior) for row, victim in enumerate(victims)}

    def _descend(
        self, posterior: "Posterior", prepared: Prepared, labels: Tensor, *, attempt: int, report: Report
    ) -> Explained:
        like, shape, prior = next(prepared.observer.parameters()), (len(labels), *prepared.shape), posterior.prior
        rng = torch.Generator().manual_seed(prepared.seed)
        apart = 0.1 if shape[1] > 1 or attempt else 0.0
        start = apart * torch.randn((shape[1], prior.components), generator=derive_generator(prepared.seed, attempt))
        variables = start.expand(len(labels), -1, -1).to(like).clone().requires_grad_()
        optimizer = torch.optim.Adam([variables], lr=self.lr)
        history = []
        for step in timely(range(self.iterations)):
            share = step / self.iterations
            optimizer.param_groups[0]["lr"] = self.lr * math.sqrt(1 - share)
            softening = _SOFTENED * max(0.0, 1 - 2 * share) ** 2
            with differentiable_twice():
                loss = posterior.of_variables(variables, labels, shape, softening=softening, rng=rng)
                (variables.grad,) = torch.autograd.grad(loss.sum(), variables)
            variables.grad = variables.grad.nan_to_num(0.0, 0.0, 0.0)
            optimizer.step()
            history.append(loss.detach())
            report((step + 1) / self.iterations)
        images = prior.images_of(variables.detach(), labels).reshape(shape).clamp(0, 1)
        with differentiable_twice(), torch.no_grad():
            loss = posterior(images, labels)
        return Explained(
            images, labels, loss.nan_to_num(torch.inf), torch.stack(history), posterior.likelihood.transform
        )


@dataclass(frozen=True, eq=False)
class Posterior:
    """Negative log posterior density (V,) of V victims, a function of images and labels, up to a constant."""

    likelihood: Likelihood
    prior: PixelPrior
    images: Tensor | None = None  # (V, B, C, H, W) likeliest images, if found
    labels: Tensor | None = None

    def losses(self, others: Mapping[int, Batch | None]) -> list[float]:
        """Return each victim's loss at its batch in ``others``, or at the likeliest images if it has none there.

        ``others``: victim's row -> batch; ``None`` gives an infinite loss.
        """
        assert self.images is not None
        assert self.labels is not None
        images, labels = self.images.clone(), self.labels.clone()
        for row, batch in others.items():
            if batch is None or batch.inputs.shape != images[row].shape:
                continue
            images[row] = batch.inputs.to(images)
            if batch.labels.shape == labels[row].shape and not batch.labels.is_floating_point():
                labels[row] = batch.labels.to(labels.device)
        with differentiable_twice(), torch.no_grad():
            found = self(images, labels).nan_to_num(math.inf, math.inf, math.inf).tolist()
        return [math.inf if others.get(row, _SAME) is None else loss for row, loss in enumerate(found)]

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.likelihood(images, labels) + self.prior.surprise(images.flatten(2), labels)

    def of_variables(
        self, variables: Tensor, labels: Tensor, shape: tuple[int, ...], *, softening: float, rng: torch.Generator
    ) -> Tensor:
        pixels = self.prior.images_of(variables, labels)
        outside = (pixels - pixels.clamp(0, 1)).square().sum((1, 2))
        own = 0.5 * variables.square().sum((1, 2)) + _OUTSIDE * outside
        return own + self.likelihood(pixels.reshape(shape), labels, softening=softening, rng=rng)


@dataclass(frozen=True, eq=False)
class WithPosterior:
    """A reconstruction, the joint posterior of its group of victims, and the victim's row in that posterior."""

    reconstruction: Reconstruction
    posterior: Posterior | None = None
    row: int = 0


def likelihood_of_victims(prepared: Prepared, victims: Sequence[PreparedVictim]) -> Likelihood:
    """Build the joint likelihood of all updates of ``victims``, computing gradients once for each sent model."""
    states: list[tuple[Guesser, list[Channel]]] = []
    sent: list[Observation] = []
    like = next(prepared.observer.parameters())
    for one in prepared.rounds:
        observations = [one.observations[victim.position] for victim in victims]
        first = observations[0]
        names = list(one.victim_model.names)
        updates = [{name: o.update()[name] for name in names} for o in observations]
        guesser, clientele = _guesser(one, first, like)
        own = channel(first.knowledge.defense or (), updates, clientele, like)
        values, plan = first.assumed().parameters, first.plan
        same = (
            (plan, first.knowledge.defense) == (o.plan, o.knowledge.defense)
            and (o.sent is first.sent or all(torch.equal(v, values[n]) for n, v in o.assumed().parameters.items()))
            for o in sent
        )
        place = next((p for p, found in enumerate(same) if found), None)
        if place is None:
            sent.append(first)
            states.append((guesser, [own]))
        elif own.same_noise and states[place][1][0].same_noise:
            states[place][1][0] = states[place][1][0].joined(own)
        else:
            states[place][1].append(own)
    return Likelihood(states)


def _guesser(one: PreparedRound, first: Observation, like: Tensor) -> tuple[Guesser, Clientele]:
    plan, size = first.plan, first.upload.num_examples
    matched = matched_per_uploaded(plan, size, unrolls=one.unrolls)
    factor = 1.0 if plan.shares == "gradient" else -1 / matched
    decay: Tensors = {}
    if plan.shares != "gradient" and not one.unrolls and plan.weight_decay:
        sent = first.sent.parameters
        decay = {name: factor * plan.weight_decay * sent[name].to(like)[None] for name in one.victim_model.names}
    norms = _norms_of_examples([part.effect for part in first.knowledge.defense or ()], 1 / matched)
    layer, steps = output_layer(first.model, first.num_classes), number_of_steps(size, plan) if one.unrolls else 1
    head = layer[0] if layer else None
    clientele = Clientele(batch_size=size, uploaded_per_matched=1 / matched, local_steps=steps, head=head)
    return Guesser(one, factor, decay, norms[0] if norms and not one.unrolls else None), clientele


def _norms_of_examples(effects: Sequence[Effect], uploaded_per_matched: float) -> list[float | None]:
    norms = [effect.norm for effect in effects if isinstance(effect, ClippedExamples)]
    if any(isinstance(effect, Summed) for effect in effects):
        for effect in effects:
            clip = effect.clip if isinstance(effect, Noise) else effect if isinstance(effect, Clipped) else None
            at_step = isinstance(effect, Noise) and effect.at == "gradient"
            if clip is not None and clip.norm is not None and clip.scope == "global":
                norms.append(clip.norm if at_step else clip.norm / uploaded_per_matched)
    return norms


def _likely_labels(
    start: Posterior, prepared: Prepared, victims: Sequence[PreparedVictim], number: int
) -> tuple[Tensor, int]:
    """Return labels (V, A, B) of V batches for A = ``number`` attempts, and the number of attempts worth making.

    For a single image with an unknown label and few classes, attempt i has the i-th likeliest class. Else all have the
    same labels.
    """
    size, classes = prepared.shape[0], prepared.num_classes
    found = [victim.labels for victim in victims if victim.labels is not None]
    known = torch.stack(found) if len(found) == len(victims) else None
    if known is not None and known.dim() == 3:
        known = known.argmax(2)
    certain = known is not None and all(victim.label_source == "known" for victim in victims)
    like = next(prepared.observer.parameters())
    if known is None:
        known = torch.zeros(len(victims), size, dtype=torch.long, device=like.device)
    if certain or size > 1 or classes > _CLASSES_TRIED:
        return known[:, None].expand(-1, number, -1), number if size > 1 else 1
    losses = []
    for label in range(classes):
        labels = torch.full((len(victims), 1), label, device=like.device)
        pixels = start.prior.of(labels)[0].reshape(len(victims), *prepared.shape)
        with differentiable_twice(), torch.no_grad():
            losses.append(start.likelihood(pixels, labels, rng=torch.Generator().manual_seed(0)))
    sorted_losses, order = torch.stack(losses, 1).nan_to_num(torch.inf).sort(1)
    near = (sorted_losses - sorted_losses[:, :1]).amin(0)[:number] < _DOUBTFUL
    return order[:, :number, None], max(1, int(near.sum()))


def _better(one: Explained, other: Explained) -> Explained:
    rows, transform = other.loss < one.loss, one.transform
    if transform is not None and other.transform is not None:
        transform = replace(transform, chosen=torch.where(rows[:, None], other.transform.chosen, transform.chosen))
    return Explained(
        images=torch.where(rows.view(-1, 1, 1, 1, 1), other.images, one.images),
        labels=torch.where(rows[:, None], other.labels, one.labels),
        loss=torch.minimum(other.loss, one.loss),
        history=torch.where(rows, other.history[: len(one.history)], one.history[: len(other.history)]),
        transform=transform,
    )


def sentences(likelihood: Likelihood, one: str, *priors: str, same: str, under: str = "defense") -> tuple[str, ...]:
    """Return sentences for users: which likelihood and priors an attack maximized.

    ``one``: noun for what is reconstructed (``image``). ``priors``: sentences on the priors. ``same``: noun for what
    several updates share (``examples``). ``under``: noun for what changed the update (``defense``).
    """
    looks = f"It looks for the likeliest {one} by the probability of what was observed under the {under}."
    number = likelihood.uploads
    return looks, *priors, *[f"It compares {number} updates of the same {same} together."] * (number > 1)


def _answer(
    found: Explained, row: int, victim: PreparedVictim, said: tuple[str, ...], posterior: Posterior
) -> WithPosterior:
    if not math.isfinite(float(found.loss[row])):
        return WithPosterior(
            failed(victim.observation, "A finite likelihood is expected, but got none; check the update.")
        )
    made = Reconstruction(
        id=victim.observation.id,
        batch=Batch(found.images[row].float().cpu(), found.labels[row].cpu()),
        loss=float(found.loss[row]),
        history=tuple(found.history[:, row].tolist()),
        label_source=victim.label_source,
        countermeasures=said,
        member="maximum a posteriori",
    )
    return WithPosterior(made, posterior, row)
