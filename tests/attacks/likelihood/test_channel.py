"""Every effect has a likelihood: the client's own gradient is likelier than another, and probabilities are right."""

import math
from dataclasses import dataclass

import pytest
import torch

from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.attacks.likelihood import Clientele
from fl_privacy.attacks.likelihood.channel import channel, stochastic_rounding
from fl_privacy.defenses import dp_noise, pruning, quantization, selective_sharing
from fl_privacy.defenses._quantization import quantize
from fl_privacy.effects import (
    AdversarialPerturbation,
    Clipped,
    ClippedExamples,
    Effect,
    Gaussian,
    Laplace,
    MutedFeatures,
    Noise,
    NoisedLayers,
    Part,
    Quantized,
    RobustGradient,
    SlicedNoise,
    Sparse,
    Summed,
)

SHAPES = {"conv.weight": (6, 3, 3, 3), "head.weight": (10, 40), "head.bias": (10,)}
ALONE = Clientele(batch_size=1, uploaded_per_matched=1.0, head="head.weight")


def gradient(seed):
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def losses(effects, observed, clientele=ALONE):
    """Of the client's own gradient, of one that has half of it, and of another."""
    own, other = gradient(0), gradient(1)
    half = {name: 0.5 * (own[name] + other[name]) for name in own}
    guesses = {name: torch.stack([own[name], half[name], other[name]]) for name in own}
    parts = tuple(Part("defense", effect=effect) for effect in effects)
    made = channel(parts, [observed] * 3, clientele, torch.empty(0))
    return made, made.loss(guesses).tolist()


def noised(update, std, law="normal"):
    rng = torch.Generator().manual_seed(5)
    draw = torch.distributions.Laplace(0.0, std / math.sqrt(2))
    if law == "laplace":
        torch.manual_seed(5)
        return {name: value + draw.sample(value.shape) for name, value in update.items()}
    return {name: value + std * torch.randn(value.shape, generator=rng) for name, value in update.items()}


def defended(defense):
    return defense.upload[0](gradient(0), {}, torch.Generator().manual_seed(3))


def muted(update):
    weight = update["head.weight"].clone()
    weight[:, ::2] = 0
    return {**update, "head.weight": weight}


KINDS = {
    "noise": ([Gaussian(std=2.0, clip=None)], lambda: noised(gradient(0), 2.0)),
    "laplace": ([Laplace(std=2.0, clip=None)], lambda: noised(gradient(0), 2.0, "laplace")),
    "clipped, then noise": (
        [Gaussian(std=0.05, clip=Clipped(norm=1.0))],
        lambda: defended(dp_noise(scale=0.05, clip_norm=1.0)),
    ),
    "noise on one layer": (
        [NoisedLayers(added=Gaussian(std=5.0, clip=Clipped(norm=1e3)), layers=("conv",))],
        lambda: defended(dp_noise(scale=5.0, clip_norm=1e3, layers=["conv"])),
    ),
    "noise of unknown size on one layer": (
        [NoisedLayers(added=Laplace(std=None, clip=None), layers=(1,))],
        lambda: defended(dp_noise(scale=5.0, layers=[1])),
    ),
    "noise of unknown size": ([Gaussian(std=None, clip=None)], lambda: noised(gradient(0), 2.0)),
    "dp_sgd": ([ClippedExamples(norm=100.0, noise_multiplier=0.01)], lambda: noised(gradient(0), 1.0)),
    "slices": ([SlicedNoise(std=1.0)], lambda: noised(gradient(0), 0.7)),
    "perturbed": ([AdversarialPerturbation(budget=0.5)], lambda: noised(gradient(0), 0.5)),
    "one bit": ([Quantized(bits=1)], lambda: defended(quantization(bits=1))),
    "signs": ([Quantized(bits=1, rounding="nearest")], lambda: defended(quantization(bits=1, rounding="nearest"))),
    "two bits": ([Quantized(bits=2)], lambda: defended(quantization(bits=2))),
    "nearest": ([Quantized(bits=3, rounding="nearest")], lambda: defended(quantization(bits=3, rounding="nearest"))),
    "pruning": ([Sparse(largest=True, dropped=0.9)], lambda: defended(pruning(rate=0.9))),
    "at random": ([Sparse(largest=False)], lambda: defended(selective_sharing(share=0.3, by="random"))),
    "muted": ([MutedFeatures(dropped=0.5)], lambda: muted(gradient(0))),
    "not declared": ([RobustGradient()], lambda: noised(gradient(0), 1.0)),
    "pruned, then rounded": (
        [Sparse(largest=True, dropped=0.5), Quantized(bits=4)],
        lambda: {
            name: quantize(value, 4, torch.Generator().manual_seed(1))
            for name, value in defended(pruning(rate=0.5)).items()
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_clients_own_gradient_is_likeliest(kind):
    effects, observed = KINDS[kind]
    made, (own, half, other) = losses(effects, observed())
    assert own < half < other
    assert made.informative == (kind != "not declared")


@pytest.mark.parametrize("kind", KINDS)
def test_likelihoods_have_a_slope_everywhere(kind):
    effects, observed = KINDS[kind]
    parts = tuple(Part("defense", effect=effect) for effect in effects)
    made = channel(parts, [observed()], ALONE, torch.empty(0))
    guess = {name: (3 * value[None]).requires_grad_() for name, value in gradient(2).items()}
    made.loss(guess).sum().backward()
    assert all(value.grad.isfinite().all() and value.grad.any() for value in guess.values())


def test_one_bit_is_as_likely_as_the_client_draws_it():
    value, largest = torch.tensor([0.3]), 1.0
    rng = torch.Generator().manual_seed(0)
    draws = torch.stack([quantize(torch.tensor([0.3, largest]), 1, rng)[:1] for _ in range(4000)])
    ups = float((draws > 0).double().mean())
    step = torch.tensor([[2 * largest]])
    chances = [math.exp(-float(stochastic_rounding(torch.tensor([[s]]), value[None], step))) for s in (1.0, -1.0)]
    assert sum(chances) == pytest.approx(1)
    assert ups == pytest.approx(chances[0], abs=0.03)


def test_scales_signs_and_strength_that_nobody_knows_change_nothing():
    """As of a defense that flips the sign of single tensors."""
    observed = noised(gradient(0), 1.0)
    flipped = {name: -7 * value if name.startswith("conv") else value for name, value in observed.items()}
    assert losses([Effect()], observed)[1] == pytest.approx(losses([Effect()], flipped)[1], rel=1e-4)


@dataclass(frozen=True, kw_only=True)
class Halved(Effect):
    """Half of the gradient with a little noise; says how likely that is."""

    def log_likelihood(self, observed, gradients):
        apart = [(observed[name] - 0.5 * value).flatten(1).square().sum(1) for name, value in gradients.items()]
        return -50 * torch.stack(apart).sum(0)


@dataclass(frozen=True, kw_only=True)
class HalvedBySimulation(Effect):
    """The same, which can be simulated alone."""

    def simulate(self, update, rng):
        return {name: 0.5 * v + 0.1 * torch.randn(v.shape, generator=rng) for name, v in update.items()}


@pytest.mark.parametrize("effect", [Halved(), HalvedBySimulation()])
def test_a_defense_of_ones_own_says_how_likely_an_update_is_or_is_simulated(effect):
    observed = noised({name: 0.5 * value for name, value in gradient(0).items()}, 0.1)
    made, (own, half, other) = losses([effect], observed)
    assert made.informative and own < half < other


class Uniform(Noise):
    """Noise that is neither normal nor Laplace."""


class UniformBySimulation(Uniform):
    """The same, which can be simulated."""

    def simulate(self, update, rng):
        edge = 3**0.5 * self.std
        return {name: v + edge * (2 * torch.rand(v.shape, generator=rng) - 1) for name, v in update.items()}


@pytest.mark.parametrize("layers", [False, True])
def test_noise_of_another_law_is_never_taken_for_normal(layers):
    observed = noised(gradient(0), 0.1)
    effect = Uniform(std=0.1, clip=None)
    with pytest.raises(NotAttackableError, match="Uniform is neither"):
        losses([NoisedLayers(added=effect, layers=("head",)) if layers else effect], observed)
    _, (own, half, other) = losses([UniformBySimulation(std=0.1, clip=None)], observed)
    assert own < half < other


def test_noise_of_unknown_law_counts_as_normal():
    observed = noised(gradient(0), 0.1)
    assert losses([Noise(std=0.1, clip=None)], observed)[1] == losses([Gaussian(std=0.1, clip=None)], observed)[1]


def test_a_mean_over_clients_has_less_noise():
    observed = noised(gradient(0), 1.0)
    alone, among = (
        losses([Gaussian(std=4.0, clip=Clipped(norm=0.1)), Summed(clients=n)], observed)[1] for n in (1, 16)
    )
    assert among[2] - among[0] > 10 * abs(alone[2] - alone[0])


@pytest.mark.parametrize(
    "effect",
    [
        Gaussian(std=0.1, clip=Clipped(norm=4.0)),
        ClippedExamples(norm=2.0, noise_multiplier=0.3),
        Gaussian(std=0.1, clip=None),
    ],
)
def test_updates_behind_known_noise_are_joined_as_their_mean(effect):
    parts, guesses = (Part("defense", effect=effect),), {n: torch.stack([v, -v]) for n, v in gradient(0).items()}
    each = [channel(parts, [noised(gradient(seed), 0.1)] * 2, ALONE, torch.empty(0)) for seed in (0, 2, 3)]
    joined = each[0].joined(each[1]).joined(each[2])
    assert all(one.same_noise for one in each) and joined.uploads == 3
    apart = sum(one.loss(guesses) for one in each)
    assert (joined.loss(guesses).diff() - apart.diff()).abs() <= 2e-3 * apart.diff().abs()


@pytest.mark.parametrize("effect", [Laplace(std=0.1, clip=None), Gaussian(std=None, clip=None), Quantized(bits=1)])
def test_other_updates_are_not_joined(effect):
    assert not channel((Part("defense", effect=effect),), [gradient(0)], ALONE, torch.empty(0)).same_noise
