"""Planted faults are found with their reason, and honest mechanisms are not accused."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fl_privacy.dp_check import Claim, Neighbors, check_mechanism
from fl_privacy.dp_check.bounds import gaussian_epsilon, gaussian_mu
from fl_privacy.dp_check.draws import ManyAtOnce, Mechanism
from fl_privacy.errors import UserError
from fl_privacy.types import Tensors
from tests.selection import few

LIKE = {"conv.weight": torch.zeros(8, 3, 3, 3), "conv.bias": torch.zeros(8), "fc.weight": torch.zeros(10, 30)}
DELTA = 1e-5


def norm(update: Tensors) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in update.values()))


def clipped(update: Tensors, bound: float = 1.0) -> dict[str, Tensor]:
    return {name: value * min(1.0, bound / max(norm(update), 1e-12)) for name, value in update.items()}


def per_array(update: Tensors) -> dict[str, Tensor]:
    return {name: clipped({name: value})[name] for name, value in update.items()}


def noised(
    std: float, *, clip: Callable[[Tensors], Tensors] = clipped, bare: Sequence[str] = (), seed: int | None = None
) -> Mechanism:
    """Clip and add Gaussian noise; the noise of ``seed`` is the same each time."""
    own = torch.Generator().manual_seed(11)

    def many(update: Tensors, n: int) -> Tensors:
        rng, drawn = (own, n) if seed is None else (torch.Generator().manual_seed(seed), 1)
        return {
            name: (value if name in bare else value + std * torch.randn(drawn, *value.shape, generator=rng)).expand(
                n, *value.shape
            )
            for name, value in clip(update).items()
        }

    return ManyAtOnce(many=many)


def after_noise(std: float) -> Mechanism:
    noisy = noised(std, clip=lambda update: update)
    return lambda update: clipped(noisy(update))


def needed(epsilon: float) -> float:
    """Compute the standard deviation that the claim needs at a sensitivity of 1."""
    return 1 / gaussian_mu(epsilon, DELTA)


PLANTED: dict[str, tuple[Mechanism, float, str]] = {
    "no noise": (noised(0.0), 1.0, "no noise is added"),
    "half of the noise": (noised(needed(1) / 2), 1.0, "standard deviation"),
    "no clipping": (noised(needed(1), clip=lambda update: update), 1.0, "nothing is clipped"),
    "clipping of each array": (noised(needed(1), clip=per_array), 1.0, "clipping each array"),
    "noise of the mean of 32": (noised(needed(3) / 32), 3.0, "standard deviation"),
    "noise shared by ten clients": (noised(needed(8) / 10), 8.0, "standard deviation"),
    "one seed for all rounds": (noised(needed(1), seed=3), 1.0, "the same noise is added each time"),
    "the last layer left out": (noised(needed(1), bare=["fc.weight"]), 1.0, "fc.weight leaves without noise"),
    "a bias left out": (noised(needed(8), bare=["conv.bias"]), 8.0, "conv.bias leaves without noise"),
    "clipping to twice the norm": (noised(needed(1), clip=lambda u: clipped(u, 2.0)), 1.0, "changes what is sent by"),
    "clipping after noise": (after_noise(needed(1)), 1.0, "before the clipping"),
}


@pytest.mark.parametrize("name", few(PLANTED, 4, all_but_fuzz=-1))
def test_planted_faults_are_found_with_their_reason(name: str) -> None:
    mechanism, epsilon, reason = PLANTED[name]
    found = check_mechanism(mechanism, claimed=epsilon, delta=DELTA, like=LIKE, clip_norm=1.0, draws=1500)
    assert found.contradicted
    assert reason in found.sentence
    assert "the claim is false" in found.sentence


def test_epsilon_of_one_round_claimed_for_fifty() -> None:
    claim = Claim(epsilon=1.0, delta=DELTA, rounds=50)
    found = check_mechanism(noised(needed(1)), claimed=claim, like=LIKE, clip_norm=1.0, draws=1500)
    assert found.contradicted
    assert "one round alone needs" in found.reason


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
def test_honest_noise_is_not_accused(epsilon: float) -> None:
    found = check_mechanism(noised(needed(epsilon)), claimed=epsilon, delta=DELTA, like=LIKE, clip_norm=1.0, draws=1000)
    assert not found.contradicted
    assert found.reason == ""
    assert "nothing contradicts the claim" in found.sentence
    assert found.moved == pytest.approx(1.0, abs=0.3 * needed(epsilon))


def test_the_bound_comes_near_the_truth() -> None:
    found = check_mechanism(noised(1.0), claimed=math.inf, delta=DELTA, like=LIKE, clip_norm=1.0, draws=6000)
    assert found.epsilon_if_gaussian is not None
    assert 0.9 * gaussian_epsilon(1.0, DELTA) <= found.epsilon_if_gaussian <= 1.02 * gaussian_epsilon(1.0, DELTA)
    assert 0.5 < found.epsilon <= found.showable


def test_a_replaced_unit_moves_twice_as_far() -> None:
    claim = Claim(epsilon=1.0, delta=DELTA, neighbors="replace")
    assert check_mechanism(noised(needed(1)), claimed=claim, like=LIKE, clip_norm=1.0, draws=2500).contradicted
    assert not check_mechanism(noised(2 * needed(1)), claimed=claim, like=LIKE, clip_norm=1.0, draws=1000).contradicted


@pytest.mark.long
def test_noise_of_another_shape_is_judged_by_counts_alone() -> None:
    rng = torch.Generator().manual_seed(4)

    def laplace(value: Tensor) -> Tensors:
        uniform = torch.rand(1, generator=rng) - 0.5
        return {"sum": value - torch.sign(uniform) * torch.log1p(-2 * uniform.abs())}

    pair = Neighbors(first=torch.ones(1), second=torch.zeros(1), what="a count of one against none")
    honest = check_mechanism(laplace, claimed=Claim(epsilon=1.0, delta=0.0), neighbors=pair, noise="other", draws=4000)
    assert not honest.contradicted
    assert honest.epsilon_if_gaussian is None
    assert honest.epsilon > 0.6
    assert check_mechanism(laplace, claimed=0.5, delta=0.0, neighbors=pair, noise="other", draws=4000).contradicted


def test_what_can_not_be_tested_is_said() -> None:
    with pytest.raises(UserError, match="what an update looks like"):
        check_mechanism(noised(1.0), claimed=1.0, delta=DELTA)
    with pytest.raises(UserError, match="arrays by name"):
        check_mechanism(lambda update: 3, claimed=1.0, delta=DELTA, like=LIKE)  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match="finite"):
        check_mechanism(lambda u: {"a": torch.tensor([math.nan])}, claimed=1.0, delta=DELTA, like=LIKE)
