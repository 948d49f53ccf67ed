"""Likelihood of a defended update given the undefended one, for each effect of a defense."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fl_privacy import effects
from fl_privacy.attacks.adaptive.constraints import estimate_clip_norm, estimate_noise_std, estimate_step
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.types import Tensors

UNLIKELY = effects.PrivateLoss | effects.PrivateLayers | effects.OtherImages | effects.Transformed
"""Effects under which the likelihood of rows and texts is unknown."""

Law = Literal["normal", "laplace", "random levels", "nearest level", "sign", "unknown"]
_SOFT = 1e-3  # least standard deviation of an element, as a share of the root mean square of its tensor
_SAMPLES = 16  # draws that estimate the law of a simulated defense


@dataclass(frozen=True, eq=False)
class Belief:
    """Distribution of the uploads that a guess predicts for V victims, by tensor name."""

    mean: Tensors  # (V, n)
    std: Mapping[str, Tensor | float]  # (V, 1) or a number: standard deviation of the noise on the upload, 0 without
    law: Law = "normal"  # law of the noise, or of the values' encoding
    step: Mapping[str, Tensor] = field(default_factory=dict)  # (V, 1) distance of neighboring levels
    hidden: Tensors = field(default_factory=dict)  # (V, n) largest magnitude of a withheld element; 0 if uploaded

    def noisier(self, std: Mapping[str, Tensor | float] | Tensor | float, law: Law = "normal") -> "Belief":
        """Return this distribution with independent noise added; the sum of several noises counts as normal."""
        more = {name: std[name] if isinstance(std, Mapping) else std for name in self.mean}
        alone = all(isinstance(value, float) and value == 0 for value in self.std.values())
        sums = {name: (torch.as_tensor(self.std[name]) ** 2 + torch.as_tensor(more[name]) ** 2) ** 0.5 for name in more}
        return replace(self, std=sums, law=law if alone else "normal")


@dataclass(frozen=True, kw_only=True)
class Clientele:
    """Facts about the clients that determine the size and noise of uploads."""

    batch_size: int
    uploaded_per_matched: float  # factor from the guessed gradient to the upload
    local_steps: int = 1  # replayed steps of training, at least 1
    head: str | None = None  # name of the output layer's weight
    clients: int = 1  # number of clients in the observed mean, each with its own defense

    @property
    def step_noise(self) -> float:
        return self.uploaded_per_matched * math.sqrt(self.local_steps) * self.upload_noise

    @property
    def upload_noise(self) -> float:
        return 1 / math.sqrt(self.clients)


Step = Callable[[Belief], Belief]


@runtime_checkable
class HasLikelihood(Protocol):
    """Interface of an effect, a part of a defense, that defines its own likelihood.

    ``log_likelihood`` returns the log likelihood (V,) of the observed update for V victims' undefended uploads
    ``gradients`` (V, *shape), by name, and is differentiable with respect to these.
    """

    def log_likelihood(self, observed: Tensors, gradients: Tensors) -> Tensor: ...


@runtime_checkable
class Simulated(Protocol):
    """A part of a defense that can be simulated: ``simulate(update, rng)`` applies it to V victims' tensors."""

    def simulate(self, update: Tensors, rng: torch.Generator) -> Tensors: ...


@dataclass(frozen=True, eq=False)
class Channel:
    """Likelihood of V victims' observed updates, in one round or averaged over several, given guessed uploads."""

    observed: Tensors  # (V, n) by name, in the order of the guesses
    shapes: Mapping[str, torch.Size]
    steps: Sequence[Step]
    own: Sequence[HasLikelihood] = ()
    informative: bool = True  # ``True`` if the likelihood says more than a distance of updates
    same_noise: bool = False  # ``True`` if the defense only adds normal noise of known size
    uploads: int = 1  # number of updates whose mean is ``observed``

    def joined(self, other: "Channel") -> "Channel":
        """Return one likelihood for the mean of both updates, which is exact under normal noise of known size."""
        both, share = self.uploads + other.uploads, other.uploads / (self.uploads + other.uploads)
        observed = {name: value.lerp(other.observed[name], share) for name, value in self.observed.items()}
        return replace(self, observed=observed, uploads=both)

    def loss(self, uploads: Tensors, softening: float = 0.0, doubt: float = 0.0) -> Tensor:
        """Return the negative log likelihood (V,) of V victims' observed updates, given the undefended ``uploads``.

        ``uploads``: name -> (V, *shape); for a single victim, they may hold V guesses. ``softening``: further noise at
        the start of a descent, as a share of each tensor's root mean square. ``doubt``: relative error allowed for the
        largest magnitude of a stochastically rounded tensor; 0 skips this check.
        """
        if self.own:
            shaped = {name: value.view(-1, *self.shapes[name]) for name, value in self.observed.items()}
            return -torch.stack([one.log_likelihood(shaped, uploads) for one in self.own]).sum(0)
        belief = Belief({name: uploads[name].flatten(1) for name in self.observed}, dict.fromkeys(self.observed, 0.0))
        for step in self.steps:
            belief = step(belief)
        found = torch.stack([self._of_tensor(belief, name, softening) for name in self.observed]).sum(0)
        found = found * self.uploads
        if not doubt or belief.law != "random levels" or any(torch.is_tensor(v) or v for v in belief.std.values()):
            return found
        sizes = [belief.mean[n].abs().amax(1) / v.abs().amax(1).clamp_min(1e-30) for n, v in self.observed.items()]
        return found + 0.5 * ((torch.stack(sizes) - 1) / doubt).square().sum(0)  # its scale is the largest magnitude

    def _of_tensor(self, belief: Belief, name: str, softening: float) -> Tensor:
        observed, guessed = self.observed[name], belief.mean[name]
        usual = observed.square().mean(1, keepdim=True).sqrt().clamp_min(torch.finfo(observed.dtype).tiny ** 0.5)
        soft = max(_SOFT, softening) * usual
        noise = (torch.as_tensor(belief.std[name]).to(observed) ** 2 + soft**2).sqrt()
        if (hidden := belief.hidden.get(name)) is None:
            return _written(belief.law, observed, guessed, noise, belief.step.get(name))
        inside = interval(torch.where(hidden > 0, guessed, 0.0), -hidden, hidden, noise)
        observed, guessed = (torch.where(hidden == 0, values, 0.0) for values in (observed, guessed))
        return inside + _written(belief.law, observed, guessed, noise, belief.step.get(name))


def _written(law: Law, observed: Tensor, guessed: Tensor, noise: Tensor, step: Tensor | None) -> Tensor:
    """Return the negative log likelihood (V,) of ``observed`` (V, n), if ``guessed`` (V, n) gets noise by ``law``.

    ``noise``: its standard deviation. ``step``: (V, 1) distance of rounding levels, ``None`` without rounding.
    """
    if law == "unknown":
        # noise of unknown strength on an unknown multiple: n / 2 times the angle's log squared sine
        size = observed.square().sum(1) * guessed.square().sum(1)
        cosine = (observed * guessed).sum(1).square() / size.clamp_min(torch.finfo(size.dtype).tiny)
        return 0.5 * observed.shape[1] * torch.log((1 - cosine).clamp_min(1e-9))
    if law == "laplace":
        return laplace(observed, guessed, noise)
    if step is None:
        return normal(observed, guessed, noise)
    live = step > 0
    found = _level(law, observed, guessed, noise, torch.where(live, step, 1.0))
    return torch.where(live.squeeze(1), found, normal(observed, guessed, noise))


def _level(law: Law, observed: Tensor, guessed: Tensor, noise: Tensor, step: Tensor) -> Tensor:
    if law == "random levels":
        return stochastic_rounding(observed, guessed, step + noise)
    if law == "nearest level":
        return interval(guessed, observed - step / 2, observed + step / 2, noise + 0.05 * step)
    far = torch.full_like(observed, torch.inf)
    low, high = torch.where(observed < 0, -far, 0.0), torch.where(observed < 0, 0.0, far)
    size = guessed.abs().mean(1, keepdim=True)
    return interval(guessed, low, high, 0.1 * step + noise) + 0.5 * ((size / step - 1) / 0.05).square().squeeze(1)


def channel(defense: effects.Description, updates: Sequence[Tensors], clientele: Clientele, like: Tensor) -> Channel:
    """Build the likelihood of V victims' ``updates`` under a ``defense``, given by its public description.

    ``clientele``: facts about the clients. ``like``: tensor with device and dtype. If the description is empty or has
    an effect without a known likelihood, only the direction of updates counts.
    """
    names = list(updates[0])
    observed = {name: torch.stack([update[name].flatten() for update in updates]).to(like) for name in names}
    shapes = {name: updates[0][name].shape for name in names}
    kinds = [part.effect for part in defense]
    clients = math.prod(effect.clients for effect in kinds if isinstance(effect, effects.Summed))
    setting = Setting(observed=observed, shapes=shapes, clientele=replace(clientele, clients=clients))
    own = [effect for effect in kinds if isinstance(effect, HasLikelihood)]
    found = [(effect, likelihood_of(effect, setting)) for effect in kinds]
    known = [step for _, step in found if step is not None]
    unknown = any(step is None for _, step in found)
    steps: list[Step] = [*known, lambda belief: replace(belief, law="unknown")] if unknown or not kinds else known
    informative = bool(own) or (bool(known) and not unknown)
    return Channel(observed, shapes, steps, own, informative, bool(kinds) and all(map(_adds_known_noise, kinds)))


def _adds_known_noise(effect: effects.Effect) -> bool:
    """Return whether ``effect`` only adds normal noise of known size, or clips to a known norm."""
    if type(effect) is effects.ClippedExamples:
        return effect.norm is not None and bool(effect.noise_multiplier)
    if type(effect) is effects.Gaussian:
        return bool(effect.std) and (effect.clip is None or effect.clip.norm is not None)
    return type(effect) is effects.Clipped and effect.norm is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What the attacker knows to compute the likelihood of a defense's effect; ``observed``: updates (V, n) by name."""

    observed: Tensors
    shapes: Mapping[str, torch.Size]
    clientele: Clientele

    def each(self, measure: Callable[[Tensors], float]) -> Tensor:
        number = len(next(iter(self.observed.values())))
        values = [measure({name: value[row] for name, value in self.observed.items()}) for row in range(number)]
        return torch.tensor(values)[:, None].to(next(iter(self.observed.values())))


@singledispatch
def likelihood_of(effect: effects.Effect, setting: Setting) -> Step | None:
    """Return the function that applies ``effect``, a part of a defense, to a :class:`Belief`; ``None`` if unknown.

    ``setting``: what the attacker knows. Register a function here for an effect without ``log_likelihood`` and
    ``simulate`` (``@likelihood_of.register``).
    """
    if isinstance(effect, HasLikelihood):
        return lambda belief: belief
    return _simulated(effect, setting) if isinstance(effect, Simulated) else None


def _simulated(effect: Simulated, setting: Setting) -> Step:
    """Return the function that adds normal noise to a :class:`Belief`, with simulated mean and spread (Wood 2010)."""

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
def _of_clipping(effect: effects.Clipped, setting: Setting) -> Step:
    return _clipping(effect, 0.0, setting) if setting.clientele.clients == 1 else _unchanged


@likelihood_of.register
def _of_sum(effect: effects.Summed, setting: Setting) -> Step:
    return lambda belief: belief.noisier(float(effect.rounding)) if effect.rounding else belief


def _unchanged(belief: Belief) -> Belief:
    return belief


def _clipping(effect: effects.Clipped, std: float | None, setting: Setting, unit: float = 1.0) -> Step:
    """Return the function that clips a :class:`Belief` to the norm of ``effect``.

    If the norm is unknown, guesses are scaled to the norm estimated from each update. ``std``: noise on the update,
    ``None`` if unknown. ``unit``: factor from ``effect.norm`` to the upload's norm.
    """

    def norm(update: Tensors) -> float:
        if effect.norm is not None:
            return float(effect.norm) * unit
        return estimate_clip_norm(update, estimate_noise_std(update) if std is None else std)

    norms = setting.each(norm)

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
def _of_noise(effect: effects.Noise, setting: Setting) -> Step:
    if type(effect) is not effects.Noise and not isinstance(effect, effects.Gaussian | effects.Laplace):
        own = likelihood_of.dispatch(object)(effect, setting)
        if own is None:
            raise NotAttackableError(
                f"Normal or Laplace noise is expected, but {type(effect).__name__} is neither; give the effect"
                " log_likelihood or simulate, or register a function for it with likelihood_of."
            )
        return own
    at_step = effect.at == "gradient"
    unit = setting.clientele.step_noise if at_step else setting.clientele.upload_noise
    std = None if effect.std is None else effect.std * unit
    alone = setting.clientele.clients == 1  # each client clips its own; see ``Guesser.norm``
    clip: Step = _unchanged
    if effect.clip is not None and alone and (not at_step or setting.clientele.local_steps == 1):
        clip = _clipping(effect.clip, std, setting, setting.clientele.uploaded_per_matched if at_step else 1.0)
    return _noise(std, setting, clip, "laplace" if isinstance(effect, effects.Laplace) else "normal")


def _noise(std: float | None, setting: Setting, clip: Step, law: Law = "normal") -> Step:
    std_each = setting.each(estimate_noise_std) if std is None else std
    return lambda belief: clip(belief).noisier(std_each, law)


@likelihood_of.register
def _of_noised_layers(effect: effects.NoisedLayers, setting: Setting) -> Step | None:
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
def _of_dp_sgd(effect: effects.ClippedExamples, setting: Setting) -> Step:
    # in larger batches, :class:`Guesser` has already clipped each example's gradient
    clientele = setting.clientele
    known = effect.norm is not None and effect.noise_multiplier is not None
    std = (effect.norm or 0) * (effect.noise_multiplier or 0) * clientele.step_noise / clientele.batch_size
    alone = clientele.batch_size == 1 and clientele.local_steps == 1
    clip = (
        _clipping(effects.Clipped(norm=effect.norm), std, setting, clientele.uploaded_per_matched)
        if alone
        else _unchanged
    )
    return _noise(std if known else None, setting, clip)


@likelihood_of.register
def _of_slices(effect: effects.SlicedNoise, setting: Setting) -> Step:
    return _noise(effect.std and effect.std * setting.clientele.step_noise, setting, _unchanged)


@likelihood_of.register
def _of_perturbation(effect: effects.AdversarialPerturbation, setting: Setting) -> Step | None:
    if effect.budget is None:
        return None
    count = sum(value.shape[1] for value in setting.observed.values())
    squared = torch.stack([value.square().sum(1, keepdim=True) for value in setting.observed.values()]).sum(0)
    std = effect.budget * (squared / count).sqrt()
    return lambda belief: belief.noisier(std)


@likelihood_of.register
def _of_quantization(effect: effects.Quantized, setting: Setting) -> Step:
    largest = {name: value.abs().amax(1, keepdim=True) for name, value in setting.observed.items()}
    if effect.bits is None:
        rows = setting.observed.items()
        steps = {name: torch.tensor([[estimate_step(row)] for row in value]).to(value) for name, value in rows}
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
def _of_sparsity(effect: effects.Sparse, setting: Setting) -> Step | None:
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
def _of_transforms(effect: effects.Transformed, setting: Setting) -> Step:
    return _unchanged


@likelihood_of.register
def _of_muted(effect: effects.MutedFeatures, setting: Setting) -> Step | None:
    head = setting.clientele.head
    if head is None or head not in setting.observed:
        return None
    shaped = setting.observed[head].view(-1, *setting.shapes[head])
    hidden = torch.where((shaped == 0).all(1, keepdim=True).expand_as(shaped).flatten(1), torch.inf, 0.0).to(shaped)
    return lambda belief: replace(belief, hidden={**belief.hidden, head: hidden})


_EDGE = 0.98  # steps beyond which the loss of stochastic rounding is a parabola, so that every guess has a gradient
_ROUNDED_OFF = 0.1  # share of a Laplace scale within which the loss is smoothed


def normal(observed: Tensor, guessed: Tensor, std: Tensor) -> Tensor:
    """Return the negative log likelihood (V,) of ``observed`` (V, n) under Gaussian noise ``std`` on ``guessed``."""
    return (0.5 * ((observed - guessed) / std).square()).sum(1)


def laplace(observed: Tensor, guessed: Tensor, std: Tensor) -> Tensor:
    """Return the negative log likelihood (V,) of ``observed`` (V, n) under Laplace noise ``std`` on ``guessed``."""
    apart = (observed - guessed) / (std / 2**0.5)
    return ((apart.square() + _ROUNDED_OFF**2).sqrt() - _ROUNDED_OFF).sum(1)


def stochastic_rounding(observed: Tensor, guessed: Tensor, step: Tensor) -> Tensor:
    """Return the negative log likelihood (V,) of stochastically rounded values (QSGD, Alistarh et al. 2017).

    A value ``guessed`` is rounded to a level ``observed`` at distance d, among levels ``step`` apart, with probability
    1 - d / step. From d = 0.98 step on, minus the log continues as a parabola.
    """
    apart = (observed - guessed).abs() / step
    inside = -torch.log1p(-apart.clamp(max=_EDGE))
    beyond = (apart - _EDGE).clamp_min(0) / (1 - _EDGE)
    return (inside + beyond + 0.5 * beyond.square()).sum(1)


def interval(guessed: Tensor, low: Tensor, high: Tensor, std: Tensor) -> Tensor:
    """Return half the squared distance (V,) of ``guessed`` (V, n) from [``low``, ``high``], in units of ``std``."""
    beyond = (low - guessed).clamp_min(0) + (guessed - high).clamp_min(0)
    return (0.5 * (beyond / std).square()).sum(1)
