"""What an update says of the gradient behind it: the likelihood of each effect that a defense may have.

Effects act one after the other on a belief about what the client uploads: a mean that the guess decides, noise around
it, and the way in which that is written down. The last one is compared with what was observed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive.estimates import estimate_clip_norm, estimate_noise_std, estimate_step
from fl_privacy.attacks.likelihood import laws
from fl_privacy.effects import (
    AdversarialPerturbation,
    Clipped,
    ClippedExamples,
    Description,
    Effect,
    Laplace,
    MutedFeatures,
    Noise,
    NoisedLayers,
    Quantized,
    SlicedNoise,
    Sparse,
    Summed,
    Transformed,
)
from fl_privacy.types import Tensors

Law = Literal["normal", "laplace", "random levels", "nearest level", "sign", "unknown"]

_SOFT = 1e-3
"""Least standard deviation of an element, as a share of the root mean square of its tensor."""

_SAMPLES = 16
"""Draws by which a defense without a formula is simulated."""


@dataclass(frozen=True, eq=False)
class Belief:
    """A Gaussian belief about the uploads of V victims.

    Attributes:
        mean: (V, n) by name.
        std: of the noise around it, in units of the upload, (V, 1) or a number, by name; 0 where there is none.
        law: of the noise, or of how the values are written down.
        step: (V, 1) between neighboring levels, by name.
        hidden: (V, n) largest magnitude of elements that were not uploaded, infinite where nothing bounds them, 0 of
            those that were; by name.
    """

    mean: Tensors
    std: Mapping[str, Tensor | float]
    law: Law = "normal"
    step: Mapping[str, Tensor] = field(default_factory=dict)
    hidden: Tensors = field(default_factory=dict)

    def noisier(self, std: Mapping[str, Tensor | float] | float, law: Law = "normal") -> "Belief":
        """Return the belief with further noise; of several kinds together it is taken for normal."""
        more = {name: std if isinstance(std, float) else std[name] for name in self.mean}
        alone = all(isinstance(value, float) and value == 0 for value in self.std.values())
        sums = {name: (torch.as_tensor(self.std[name]) ** 2 + torch.as_tensor(more[name]) ** 2) ** 0.5 for name in more}
        return replace(self, std=sums, law=law if alone else "normal")


@dataclass(frozen=True, kw_only=True)
class Clientele:
    """How the clients compute what they upload, as far as it bears on a likelihood.

    Attributes:
        batch_size: examples behind an update.
        uploaded_per_matched: how much larger what is uploaded is than the gradient that is guessed.
        local_steps: steps of training behind it that are replayed, at least 1.
        head: weight of the output layer, if there is one.
        clients: whose mean is seen, each defended by itself.
    """

    batch_size: int
    uploaded_per_matched: float
    local_steps: int = 1
    head: str | None = None
    clients: int = 1

    @property
    def step_noise(self) -> float:
        """Return by how much noise on the gradient of every local step is multiplied in what is seen."""
        return self.uploaded_per_matched * math.sqrt(self.local_steps) * self.upload_noise

    @property
    def upload_noise(self) -> float:
        """Return by how much noise on a client's upload is multiplied in what is seen: a mean over clients has less."""
        return 1 / math.sqrt(self.clients)


Step = Callable[[Belief], Belief]


@runtime_checkable
class HasLikelihood(Protocol):
    """An effect that says itself how likely an update is.

    ``log_likelihood(observed, gradients) -> (V,)``: both by name, the observed update and what each of V victims would
    have uploaded undefended, (V, *shape), differentiable by the latter.
    """

    def log_likelihood(self, observed: Tensors, gradients: Tensors) -> Tensor: ...


@runtime_checkable
class Simulated(Protocol):
    """An effect that can be simulated: ``simulate(update, rng) -> update``, tensors (V, *shape) by name.

    The attacker's simulation draws at random like the client, without the client's secrets.
    """

    def simulate(self, update: Tensors, rng: torch.Generator) -> Tensors: ...


@dataclass(frozen=True, eq=False)
class Channel:
    """The likelihood of the updates of V victims in one round.

    Attributes:
        observed: (V, n) by name, in the order of the guesses.
        shapes: of the tensors.
        steps: what the defense does, in order.
        own: effects that have likelihoods of their own.
        informative: whether the defense has a likelihood that says more than the distance of the updates.
    """

    observed: Tensors
    shapes: Mapping[str, torch.Size]
    steps: Sequence[Step]
    own: Sequence[HasLikelihood] = ()
    informative: bool = True

    def loss(self, uploads: Tensors, softening: float = 0.0) -> Tensor:
        """Return the negative log likelihood (V,) of the undefended ``uploads`` (V, *shape) by name.

        Args:
            uploads: that the guesses lead to.
            softening: further noise, as a share of the root mean square of each tensor, by which a descent begins.
        """
        if self.own:
            shaped = {name: value.view(-1, *self.shapes[name]) for name, value in self.observed.items()}
            return -torch.stack([one.log_likelihood(shaped, uploads) for one in self.own]).sum(0)
        belief = Belief({name: uploads[name].flatten(1) for name in self.observed}, dict.fromkeys(self.observed, 0.0))
        for step in self.steps:
            belief = step(belief)
        return torch.stack([self._of_tensor(belief, name, softening) for name in self.observed]).sum(0)

    def _of_tensor(self, belief: Belief, name: str, softening: float) -> Tensor:
        observed, guessed = self.observed[name], belief.mean[name]
        usual = observed.square().mean(1, keepdim=True).sqrt().clamp_min(torch.finfo(observed.dtype).tiny ** 0.5)
        soft = max(_SOFT, softening) * usual
        noise = (torch.as_tensor(belief.std[name]).to(observed) ** 2 + soft**2).sqrt()
        if (hidden := belief.hidden.get(name)) is not None:
            inside = laws.interval(torch.where(hidden > 0, guessed, 0.0), -hidden, hidden, noise)
            shown = hidden == 0
            observed, guessed = torch.where(shown, observed, 0.0), torch.where(shown, guessed, 0.0)
            return inside + _written(belief.law, observed, guessed, noise, belief.step.get(name))
        return _written(belief.law, observed, guessed, noise, belief.step.get(name))


def _written(law: Law, observed: Tensor, guessed: Tensor, noise: Tensor, step: Tensor | None) -> Tensor:
    """Return the negative log likelihood (V,) of ``observed`` (V, n), noised by ``noise`` and written down by a law."""
    if law == "unknown":
        return laws.unknown_noise(observed, guessed)
    if law == "laplace":
        return laws.laplace(observed, guessed, noise)
    if step is None:
        return laws.normal(observed, guessed, noise)
    live = step > 0
    found = _level(law, observed, guessed, noise, torch.where(live, step, 1.0))
    return torch.where(live.squeeze(1), found, laws.normal(observed, guessed, noise))


def _level(law: Law, observed: Tensor, guessed: Tensor, noise: Tensor, step: Tensor) -> Tensor:
    """Return that of the level of a grid."""
    if law == "random levels":
        return laws.stochastic_rounding(observed, guessed, step + noise)
    if law == "nearest level":
        return laws.interval(guessed, observed - step / 2, observed + step / 2, noise + 0.05 * step)
    far = torch.full_like(observed, torch.inf)
    low, high = torch.where(observed < 0, -far, 0.0), torch.where(observed < 0, 0.0, far)
    size = guessed.abs().mean(1, keepdim=True)
    return laws.interval(guessed, low, high, 0.1 * step + noise) + 0.5 * ((size / step - 1) / 0.05).square().squeeze(1)


def channel(defense: Description, updates: Sequence[Tensors], clientele: Clientele, like: Tensor) -> Channel:
    """Build the likelihood of ``updates``, of V victims, behind a known ``defense``.

    Args:
        defense: its public description; empty where there is none.
        updates: as uploaded, by name.
        clientele: how the clients compute them.
        like: of the device and dtype of the computation.
    """
    names = list(updates[0])
    observed = {name: torch.stack([update[name].flatten() for update in updates]).to(like) for name in names}
    shapes = {name: updates[0][name].shape for name in names}
    setting = Setting(observed=observed, shapes=shapes, clientele=clientele)
    effects = [part.effect for part in defense]
    sums = [effect.clients for effect in effects if isinstance(effect, Summed)]
    setting = replace(setting, clientele=replace(clientele, clients=math.prod(sums)))
    own = [effect for effect in effects if isinstance(effect, HasLikelihood)]
    found = [(effect, likelihood_of(effect, setting)) for effect in effects]
    known = [step for _, step in found if step is not None]
    unknown = any(step is None for _, step in found)
    steps = [*known, _of_unknown_strength] if unknown or not effects else known
    return Channel(observed, shapes, steps, own, informative=bool(own) or (bool(known) and not unknown))


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What the likelihood of an effect may depend on.

    Attributes:
        observed: (V, n) by name.
        shapes: of the tensors.
        clientele: how clients compute their updates.
    """

    observed: Tensors
    shapes: Mapping[str, torch.Size]
    clientele: Clientele

    def each(self, measure: Callable[[Tensors], float]) -> Tensor:
        """Measure the update of every victim, (V, 1)."""
        number = len(next(iter(self.observed.values())))
        values = [measure({name: value[row] for name, value in self.observed.items()}) for row in range(number)]
        return torch.tensor(values)[:, None].to(next(iter(self.observed.values())))


def _of_unknown_strength(belief: Belief) -> Belief:
    return replace(belief, law="unknown")


@singledispatch
def likelihood_of(effect: Effect, setting: Setting) -> Step | None:
    """Return what ``effect`` does to a belief; ``None`` where nobody knows.

    A function under ``@likelihood_of.register`` adds another. An effect that has ``log_likelihood``, or ``simulate``,
    needs none.
    """
    if isinstance(effect, HasLikelihood):
        return lambda belief: belief
    return _simulated(effect, setting) if isinstance(effect, Simulated) else None


def _simulated(effect: Simulated, setting: Setting) -> Step:
    """Score a defense by samples of it: a normal law with their bias and spread (synthetic likelihood, Wood 2010)."""

    def step(belief: Belief) -> Belief:
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            shaped = {name: value.view(-1, *setting.shapes[name]) for name, value in belief.mean.items()}
            draws = [effect.simulate(shaped, rng) for _ in range(_SAMPLES)]
            stacks = {name: torch.stack([draw[name].flatten(1) for draw in draws]) for name in belief.mean}
        mean = {name: value + (stacks[name].mean(0) - value.detach()) for name, value in belief.mean.items()}
        spread = {name: stack.var(0).mean(1, keepdim=True).sqrt() for name, stack in stacks.items()}
        return replace(belief, mean=mean).noisier(spread)

    return step


@likelihood_of.register
def _of_clipping(effect: Clipped, setting: Setting) -> Step:
    return _clipping(effect, 0.0, setting) if setting.clientele.clients == 1 else _unchanged


@likelihood_of.register
def _of_sum(effect: Summed, setting: Setting) -> Step:
    """Add the protocol's rounding; what the sum does to other effects is theirs to say."""
    return lambda belief: belief.noisier(float(effect.rounding)) if effect.rounding else belief


def _unchanged(belief: Belief) -> Belief:
    return belief


def _clipping(effect: Clipped, std: float | None, setting: Setting, unit: float = 1.0) -> Step:
    """Scale the guess down to the norm, or to that which shows in each update where it is not known."""
    if effect.norm is not None:
        norms = setting.each(lambda update: float(effect.norm or 0) * unit)
    else:
        norms = setting.each(
            lambda update: estimate_clip_norm(update, estimate_noise_std(update) if std is None else std)
        )

    def step(belief: Belief) -> Belief:
        squares = {name: value.square().sum(1, keepdim=True) for name, value in belief.mean.items()}
        if effect.scope == "global" or effect.norm is None:
            squares = dict.fromkeys(squares, torch.stack(list(squares.values())).sum(0))
        factors = {name: norms / square.clamp_min(1e-30).sqrt() for name, square in squares.items()}
        if effect.norm is not None:
            factors = {name: factor.clamp(max=1) for name, factor in factors.items()}
        return replace(belief, mean={name: factors[name] * value for name, value in belief.mean.items()})

    return step


@likelihood_of.register
def _of_noise(effect: Noise, setting: Setting) -> Step:
    at_step = effect.at == "gradient"
    unit = setting.clientele.step_noise if at_step else setting.clientele.upload_noise
    law: Law = "laplace" if isinstance(effect, Laplace) else "normal"
    std = None if effect.std is None else effect.std * unit
    told = setting.each(estimate_noise_std) if std is None else std
    alone = setting.clientele.clients == 1  # each client clips its own; see ``Guesser.norm``
    clips = effect.clip is not None and alone and (not at_step or setting.clientele.local_steps == 1)
    clip_unit = setting.clientele.uploaded_per_matched if at_step else 1.0
    clip = _clipping(effect.clip, std, setting, clip_unit) if clips and effect.clip else None

    def step(belief: Belief) -> Belief:
        belief = clip(belief) if clip else belief
        return belief.noisier(told if isinstance(told, float) else dict.fromkeys(belief.mean, told), law)

    return step


@likelihood_of.register
def _of_noised_layers(effect: NoisedLayers, setting: Setting) -> Step | None:
    if effect.added is None:
        return None
    noised = effect.noised(setting.observed)
    few = {name: value for name, value in setting.observed.items() if name in noised}
    step_of_noise = _of_noise(effect.added, replace(setting, observed=few) if few else setting)

    def step(belief: Belief) -> Belief:
        found = step_of_noise(belief)
        return replace(found, std={name: found.std[name] if name in noised else belief.std[name] for name in found.std})

    return step


@likelihood_of.register
def _of_dp_sgd(effect: ClippedExamples, setting: Setting) -> Step:
    """Clip the gradient of a single example; those of several are clipped before they are averaged, see ``attack``."""
    clientele = setting.clientele
    known = effect.norm is not None and effect.noise_multiplier is not None
    std = (effect.norm or 0) * (effect.noise_multiplier or 0) * clientele.step_noise / clientele.batch_size
    told = std if known else setting.each(estimate_noise_std)
    alone = clientele.batch_size == 1 and clientele.local_steps == 1
    clip = _clipping(Clipped(norm=effect.norm), std, setting, clientele.uploaded_per_matched) if alone else None

    def step(belief: Belief) -> Belief:
        belief = clip(belief) if clip else belief
        return belief.noisier(told if isinstance(told, float) else dict.fromkeys(belief.mean, told))

    return step


@likelihood_of.register
def _of_slices(effect: SlicedNoise, setting: Setting) -> Step:
    std = None if effect.std is None else effect.std * setting.clientele.step_noise
    told = setting.each(estimate_noise_std) if std is None else std
    return lambda belief: belief.noisier(told if isinstance(told, float) else dict.fromkeys(belief.mean, told))


@likelihood_of.register
def _of_perturbation(effect: AdversarialPerturbation, setting: Setting) -> Step | None:
    """Take what misleads classifiers for noise of as much length, spread evenly."""
    if effect.budget is None:
        return None
    count = sum(value.shape[1] for value in setting.observed.values())
    squared = torch.stack([value.square().sum(1, keepdim=True) for value in setting.observed.values()]).sum(0)
    std = effect.budget * (squared / count).sqrt()
    return lambda belief: belief.noisier(dict.fromkeys(belief.mean, std))


@likelihood_of.register
def _of_quantization(effect: Quantized, setting: Setting) -> Step:
    largest = {name: value.abs().amax(1, keepdim=True) for name, value in setting.observed.items()}
    if effect.bits is None:
        steps = {
            name: torch.tensor([[estimate_step(row)] for row in value]).to(value)
            for name, value in setting.observed.items()
        }
    elif effect.bits == 1:
        steps = {name: (2.0 if effect.rounding == "stochastic" else 1.0) * value for name, value in largest.items()}
    else:
        steps = {name: value / (2 ** (effect.bits - 1) - 1) for name, value in largest.items()}
    if (clients := setting.clientele.clients) > 1:
        coarse = 4 if effect.bits == 1 else 6
        return lambda belief: belief.noisier({name: step / (coarse * clients) ** 0.5 for name, step in steps.items()})
    law: Law = "random levels"
    if effect.rounding == "nearest":
        law = "sign" if effect.bits == 1 else "nearest level"
    return lambda belief: replace(belief, law=law, step=steps)


@likelihood_of.register
def _of_sparsity(effect: Sparse, setting: Setting) -> Step | None:
    if setting.clientele.clients > 1:
        return None
    bounded = effect.largest is not False and not effect.error_feedback and not effect.noise_std
    hidden = {}
    for names in [[name] for name in setting.observed] if effect.scope == "layer" else [list(setting.observed)]:
        sizes = torch.cat([setting.observed[name].abs() for name in names], 1)
        least = sizes.masked_fill(sizes == 0, torch.inf).amin(1, keepdim=True)
        limit = least if bounded else torch.full_like(least, torch.inf)
        for name in names:
            hidden[name] = torch.where(setting.observed[name] == 0, limit, 0.0)
    return lambda belief: replace(belief, hidden=hidden).noisier(float(effect.noise_std))


@likelihood_of.register
def _of_transforms(effect: Transformed, setting: Setting) -> Step:
    """Leave the update as it is: the guess goes through the transformations."""
    return _unchanged


@likelihood_of.register
def _of_muted(effect: MutedFeatures, setting: Setting) -> Step | None:
    """Leave open the columns of the output layer that are zero."""
    head = setting.clientele.head
    if head is None or head not in setting.observed:
        return None
    shaped = setting.observed[head].view(-1, *setting.shapes[head])
    empty = (shaped == 0).all(1, keepdim=True).expand_as(shaped).flatten(1)
    hidden = torch.where(empty, torch.inf, 0.0).to(shaped)
    return lambda belief: replace(belief, hidden={**belief.hidden, head: hidden})
