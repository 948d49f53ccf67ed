"""Noise that does not cover all that moves is found, and honest mechanisms of unusual kinds are not accused."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_privacy.dp_check import Claim, check as asking, check_mechanism
from fl_privacy.dp_check.bounds import aligned_epsilon, gaussian_mu
from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.draws import ByRound, ManyAtOnce, Mechanism, Neighbors
from fl_privacy.dp_check.mechanism import MechanismCheck, _streams, by_known_seeds
from fl_privacy.dp_check.verdict import Status
from fl_privacy.types import Tensors
from tests.selection import few

DELTA = 1e-5
LIKE = {"a": torch.zeros(6, 8), "b": torch.zeros(6, 8), "c": torch.zeros(2, 3, 2), "d": torch.zeros(9)}
STD = 1 / gaussian_mu(3.0, DELTA)
Noise = dict[str, Tensor]


def clipped(update: Tensors) -> dict[str, Tensor]:
    norm = math.sqrt(sum(float(value.square().sum()) for value in update.values()))
    return {name: value / max(1.0, norm) for name, value in update.items()}


def drawn(shapes: Tensors, n: int, rng: torch.Generator) -> Noise:
    return {name: STD * torch.randn(n, *value.shape, generator=rng) for name, value in shapes.items()}


def changed(name: str, change: Callable[[Noise], Tensor]) -> Mechanism:
    """Clip and add Gaussian noise that ``change`` spoils in one array."""
    rng = torch.Generator().manual_seed(4)

    def many(update: Tensors, n: int) -> Tensors:
        noise = drawn(update, n, rng)
        noise[name] = change(noise)
        return {each: value + noise[each] for each, value in clipped(update).items()}

    return ManyAtOnce(many=many)


def halves(value: Tensor) -> Tensor:
    return torch.cat([value[:, :3], -value[:, :3]], dim=1)


def low_rank(value: Tensor) -> Tensor:
    basis = torch.randn(9, 6, 8, generator=torch.Generator().manual_seed(1))
    return torch.einsum("nr,rij->nij", value[:, 0, :].repeat(1, 2)[:, :9] / 3 + value[:, 1, :1], basis)


def mostly(rare: float, instead: Callable[[Tensor, Tensor], Tensor]) -> Mechanism:
    """Clip and add Gaussian noise, but in some calls send what ``instead`` makes of the update and the noise."""
    rng = torch.Generator().manual_seed(5)

    def many(update: Tensors, n: int) -> Tensors:
        noise, kept = drawn(update, n, rng), clipped(update)
        now = torch.rand(n, generator=rng) < rare
        return {
            name: torch.where(now.view(n, *[1] * value.dim()), instead(value, noise[name]), value + noise[name])
            for name, value in kept.items()
        }

    return ManyAtOnce(many=many)


def of_a_pool(size: int) -> Mechanism:
    """Add noise that was drawn in advance."""
    rng = torch.Generator().manual_seed(6)
    pool = drawn(LIKE, size, rng)

    def many(update: Tensors, n: int) -> Tensors:
        number = torch.randint(size, (n,), generator=rng)
        return {name: value + pool[name][number] for name, value in clipped(update).items()}

    return ManyAtOnce(many=many)


def in_pairs() -> Mechanism:
    """Add the noise of the call before with the other sign, every second time."""
    rng = torch.Generator().manual_seed(8)

    def many(update: Tensors, n: int) -> Tensors:
        once = drawn(update, n // 2 + 1, rng)
        both = {name: torch.stack([each, -each], dim=1).flatten(0, 1)[:n] for name, each in once.items()}
        return {name: value + both[name] for name, value in clipped(update).items()}

    return ManyAtOnce(many=many)


def with_gaps() -> Mechanism:
    """Leave the noise of each value out in one call of twenty."""
    rng = torch.Generator().manual_seed(9)

    def many(update: Tensors, n: int) -> Tensors:
        noise = drawn(update, n, rng)
        return {
            name: value + noise[name] * (torch.rand(noise[name].shape, generator=rng) > 0.05)
            for name, value in clipped(update).items()
        }

    return ManyAtOnce(many=many)


def of_few_levels() -> Mechanism:
    rng = torch.Generator().manual_seed(7)

    def many(update: Tensors, n: int) -> Tensors:
        noise = drawn({"a": LIKE["a"]}, n, rng)
        return {"a": clipped(update)["a"] + noise["a"].sign() * STD}

    return ManyAtOnce(many=many)


def seeded(seeds: Callable[[], int]) -> Mechanism:
    def mechanism(update: Tensors) -> Tensors:
        noise = drawn(update, 1, torch.Generator().manual_seed(seeds()))
        return {name: value + noise[name][0] for name, value in clipped(update).items()}

    return mechanism


def by_round(update: Tensors, number: int) -> Tensors:
    noise = drawn(update, 1, torch.Generator().manual_seed(77 * number))
    return {name: value + noise[name][0] for name, value in clipped(update).items()}


def in_half_precision() -> Mechanism:
    """Add noise that was rounded to 16 bits to an update of 32 bits."""
    rng = torch.Generator().manual_seed(10)

    def many(update: Tensors, n: int) -> Tensors:
        noise, kept = drawn(update, n, rng), clipped(update)
        return {name: value + noise[name].half().float() for name, value in kept.items()}

    return ManyAtOnce(many=many)


def momentum(*, noised: bool) -> Mechanism:
    """Keep a momentum of .9 over all calls, of clipped updates or of what is released anyway."""
    rng, kept = torch.Generator().manual_seed(11), {name: torch.zeros_like(value) for name, value in LIKE.items()}

    def mechanism(update: Tensors) -> Tensors:
        noise = {name: value[0] for name, value in drawn(update, 1, rng).items()}
        for name, value in clipped(update).items():
            kept[name] = 0.9 * kept[name] + value + (noise[name] if noised else 0)
        return dict(kept) if noised else {name: value + noise[name] for name, value in kept.items()}

    return mechanism


SAME = "carry the same noise"
FAULTS: dict[str, tuple[Mechanism, str]] = {
    "one row over a matrix": (changed("a", lambda n: n["a"][:, :1].expand(-1, 6, 8)), SAME),
    "one channel like another": (changed("c", lambda n: n["c"][:, :1].expand(-1, 2, 3, 2)), SAME),
    "two layers alike": (changed("b", lambda n: n["a"]), SAME),
    "two layers of other shapes alike": (changed("d", lambda n: n["a"].flatten(1)[:, :9]), SAME),
    "pairs of both signs": (changed("a", lambda n: halves(n["a"])), SAME),
    "rows that sum to zero": (changed("a", lambda n: n["a"] - n["a"].mean(2, keepdim=True)), "sums to zero"),
    "slices that sum to zero": (changed("c", lambda n: n["c"] - n["c"].mean((1, 3), keepdim=True)), "sums to zero"),
    "all sums to zero": (changed("d", lambda n: n["d"] - n["d"].mean(1, keepdim=True)), "sums to zero"),
    "few directions": (changed("b", lambda n: low_rank(n["b"])), "directions"),
    "one row and a little": (
        changed("a", lambda n: n["a"][:, :1] + 0.1 * n["a"]),
        "standard deviation",
    ),
    "the update in one call of 200": (mostly(1 / 200, lambda value, noise: value.expand(noise.shape)), "come again"),
    "hardly any noise in one call of 200": (mostly(1 / 200, lambda value, noise: value + 1e-3 * noise), "some calls"),
    "noise of a pool": (of_a_pool(900), "come again"),
    "noise of two levels": (of_few_levels(), "few values"),
    "noise of 16 bits": (in_half_precision(), "rounded to 16 bits"),
    "noise with gaps": (with_gaps(), "missing in some calls"),
    "noise in pairs of calls": (in_pairs(), "with the other sign"),
    "seeded by the number of the call": (seeded(itertools.count(3).__next__), "seeds its noise"),
    "seeded by the round": (ByRound(by_round), "from its number"),
    "always the same seed": (seeded(lambda: 12345), "the same noise is added each time"),
    "seeded by the number of a late call": (seeded(itertools.count(12_000).__next__), "seeds its noise"),
}


def checked(mechanism: Mechanism, *, epsilon: float = 3.0, draws: int = 4000) -> MechanismCheck:
    return check_mechanism(mechanism, claimed=epsilon, delta=DELTA, like=LIKE, clip_norm=1.0, draws=draws)


@pytest.mark.parametrize("name", few(FAULTS, 8, all_but_fuzz=-1))
def test_noise_that_does_not_cover_all_is_found(name: str) -> None:
    mechanism, reason = FAULTS[name]
    many = isinstance(mechanism, ManyAtOnce)
    found = checked(mechanism, draws=4000 if many else 200)
    assert found.contradicted
    assert reason in found.sentence


def clipped_and_noised(after: Callable[[Tensor], Tensor], std: float, rng: torch.Generator) -> Mechanism:
    def many(update: Tensors, n: int) -> Tensors:
        sent = {name: value + std * torch.randn(n, *value.shape, generator=rng) for name, value in
                clipped(update).items()}  # fmt: skip
        return {name: after(value) for name, value in sent.items()}

    return ManyAtOnce(many=many)


def one_bit(epsilon: float, rng: torch.Generator) -> Mechanism:
    """Make a randomized response about the sign of one value."""

    def many(update: Tensors, n: int) -> Tensors:
        size = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
        shared = (1 + max(-1.0, min(1.0, float(update["d"].sum()))) / size) / 2
        return {"bit": torch.where(torch.rand(n, 1, generator=rng) < shared, size, -size)}

    return ManyAtOnce(many=many)


def coarse_count(epsilon: float, rng: torch.Generator) -> Mechanism:
    """Add discrete Laplace noise to a count of units of .37: at epsilon 8 it changes in one call of 1,500."""

    def many(update: Tensors, n: int) -> Tensors:
        steps = torch.log(torch.rand(2, n, 1, generator=rng)).div(-epsilon).floor()
        return {"count": 0.37 * (round(float(clipped({"d": update["d"]})["d"].norm())) + steps[0] - steps[1])}

    return ManyAtOnce(many=many)


def of_two(epsilon: float, rng: torch.Generator) -> Mechanism:
    """Choose by the exponential mechanism between two public vectors."""
    vectors = torch.randn(2, 20, generator=torch.Generator().manual_seed(3))

    def many(update: Tensors, n: int) -> Tensors:
        lies = torch.rand(n, generator=rng) < 1 / (1 + math.exp(epsilon))
        return {"chosen": vectors[(lies != (float(update["a"].sum()) > 0)).long()]}

    return ManyAtOnce(many=many)


def sent_twice(epsilon: float, rng: torch.Generator) -> Mechanism:
    """Send what was noised again, in other precisions, with its sum and with a constant."""
    std = 1 / gaussian_mu(epsilon, DELTA)

    def many(update: Tensors, n: int) -> Tensors:
        sent = {name: value + std * torch.randn(n, *value.shape, generator=rng) for name, value in
                clipped(update).items()}  # fmt: skip
        return {
            **sent,
            "half": sent["a"].half(),
            "triple": 3 * sent["b"].double(),
            "sum": sent["d"].sum(1)[:, None],
            "constant": torch.full((n, 3), 0.3),
        }

    return ManyAtOnce(many=many)


def of_a_sketch(epsilon: float, rng: torch.Generator) -> Mechanism:
    """Project the update into a public subspace, and add noise there."""
    basis, std = torch.linalg.qr(torch.randn(48, 12, generator=torch.Generator().manual_seed(2)))[0], 1 / gaussian_mu(
        epsilon, DELTA
    )  # fmt: skip

    def many(update: Tensors, n: int) -> Tensors:
        inside = clipped(update)["a"].reshape(-1) @ basis + std * torch.randn(n, 12, generator=rng)
        return {"a": (inside @ basis.T).view(n, 6, 8)}

    return ManyAtOnce(many=many)


HONEST: dict[str, Callable[[float, torch.Generator], Mechanism]] = {
    "bfloat16": lambda e, rng: clipped_and_noised(lambda v: v.to(torch.bfloat16), 1 / gaussian_mu(e, DELTA), rng),
    "a coarse grid": lambda e, rng: clipped_and_noised(lambda v: v.round(), 1 / gaussian_mu(e, DELTA), rng),
    "signs": lambda e, rng: clipped_and_noised(torch.sign, 1 / gaussian_mu(e, DELTA), rng),
    "clamped": lambda e, rng: clipped_and_noised(lambda v: v.clamp(-1, 1), 1 / gaussian_mu(e, DELTA), rng),
    "largest values": lambda e, rng: clipped_and_noised(lambda v: v * (v.abs() > 1.5), 1 / gaussian_mu(e, DELTA), rng),
    "centered after the noise": lambda e, rng: clipped_and_noised(
        lambda v: v - v.flatten(1).mean(1).view(-1, *[1] * (v.dim() - 1)), 1 / gaussian_mu(e, DELTA), rng
    ),
    "one bit": one_bit,
    "a count": coarse_count,
    "one of two": of_two,
    "sent twice": sent_twice,
    "a sketch": of_a_sketch,
}


@pytest.mark.parametrize("name", few(HONEST, 4, all_but_fuzz=len(HONEST)))
def test_honest_mechanisms_of_unusual_kinds_are_not_accused(name: str) -> None:
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        found = checked(HONEST[name](8.0, rng), epsilon=8.0, draws=400)
        assert not found.contradicted, found.sentence


@pytest.mark.long
def test_honest_rounds_may_be_asked_again() -> None:
    rng = torch.Generator().manual_seed(9)

    def at(update: Tensors, number: int) -> Tensors:
        noise = drawn(update, 1, rng)
        return {name: value + noise[name][0] for name, value in clipped(update).items()}

    assert not checked(ByRound(at), draws=200).contradicted


@pytest.mark.long
def test_momentum_of_what_is_not_noised_yet_is_a_fault() -> None:
    found = checked(momentum(noised=False), draws=200)
    assert found.contradicted
    assert "send an update again" in found.reason


@pytest.mark.long
def test_momentum_of_what_was_noised_is_no_fault() -> None:
    found = checked(momentum(noised=True), draws=200)
    assert not found.contradicted, found.sentence


def test_laplace_noise_of_a_claim_without_delta_is_not_judged_as_gaussian() -> None:
    laplace = torch.distributions.Laplace(0.0, math.sqrt(117.0))  # norm 1 in 117 values

    def many(update: Tensors, n: int) -> Tensors:
        return {name: value + laplace.sample((n, *value.shape)) for name, value in clipped(update).items()}

    pure = Claim(epsilon=1.0, delta=0.0)
    found = check_mechanism(ManyAtOnce(many=many), claimed=pure, like=LIKE, clip_norm=1.0, draws=2000)
    assert found.epsilon_if_gaussian is None and not found.contradicted


def test_more_calls_along_the_update_than_chance_bound_epsilon_without_a_limit() -> None:
    rng = torch.Generator().manual_seed(0)
    line = torch.nn.functional.normalize(torch.randn(20, generator=rng), dim=0)
    rows = torch.randn(4000, 20, generator=rng)
    across = rows - (rows @ line)[:, None] * line
    sines = (across.norm(dim=1) / rows.norm(dim=1)).double().numpy()[:, None]
    assert aligned_epsilon(sines, [20], delta=DELTA, error=0.001) == 0.0, "noise alone"
    sines[:20] = 1e-6
    assert aligned_epsilon(sines, [20], delta=DELTA, error=0.001) > 100
    assert aligned_epsilon(sines, [20], delta=0.01, error=0.001) == 0.0, "as seldom as delta allows"


def test_a_bound_above_the_claim_is_not_called_nothing() -> None:
    found = MechanismCheck(
        claim=Claim(epsilon=3.0, delta=DELTA), epsilon=1.0, epsilon_if_gaussian=3.38, confidence=0.95, showable=5.0,
        noticed=3.54, draws=4000, compared="", by="", contradicted=False, reason="", noise_std=1.0, moved=1.0, bare=(),
    )  # fmt: skip
    assert "nothing contradicts" not in found.sentence
    assert "99.9 % are needed" in found.sentence and "16,000 draws" in found.sentence


def test_the_default_update_has_a_matrix_over_which_one_row_may_be_broadcast() -> None:
    asked, rng = DpCheckRequest(parameters=200, draws=400), torch.Generator().manual_seed(1)
    assert [value.dim() for value in asked.shapes.values()] == [2, 1]
    assert sum(value.numel() for value in asked.shapes.values()) == 200

    def many(update: Tensors, n: int) -> Tensors:
        weight, bias = clipped(update).values()
        row = STD * torch.randn(n, 1, weight.shape[1], generator=rng)
        return {"weight": weight + row, "bias": bias + STD * torch.randn(n, len(bias), generator=rng)}

    found = asking.tested("a mod", ManyAtOnce(many=many), None, replace(asked, epsilon=3.0))
    assert found.status is Status.CONTRADICTED
    assert SAME in found.reason


GENERATORS: dict[str, Callable[[int], np.ndarray]] = {
    "torch": lambda seed: torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).numpy(),
    "default_rng": lambda seed: np.random.default_rng(seed).normal(size=(6, 8)),
    "RandomState": lambda seed: np.random.RandomState(seed).normal(size=(6, 8)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_noise_of_small_seeds_is_found_whatever_generator_draws_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.dp_check.mechanism.SEEDS", 16)
    _streams.cache_clear()
    seeds, zero = itertools.count(), {"a": torch.zeros(6, 8)}
    pair = Neighbors(first=zero, second=zero, what="nothing")
    found = by_known_seeds(lambda update: {"a": torch.from_numpy(GENERATORS[name](next(seeds)))}, pair)
    _streams.cache_clear()
    assert [each.arrays for each in found] == [("a",)]
