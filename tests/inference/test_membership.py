"""What holds for every membership method. A new one is one row of ``METHODS``."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from fl_privacy.attacks.inference import Membership, ReadRound
from fl_privacy.attacks.inference.membership import METHODS, share_below_others
from fl_privacy.attacks.inference.read_round import margins_of, mean_gradient, mean_over_steps, measured, model_after
from fl_privacy.attacks.inference.shadow_models import likelihood_ratio
from fl_privacy.errors import UserError
from fl_privacy.measure.roc import Separation, auc
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, LocalPlan, ModelState
from tests.inference.rounds import CLASSES, CLIENTS, OWN, asked, network, rounds

NAMES = tuple(name for name, method in METHODS.items() if not method.of_tokens)
every_method = pytest.mark.parametrize("name", NAMES)


def watched(reads: Sequence[ReadRound], clients: tuple[int, ...] = CLIENTS, names: Sequence[str] = NAMES) -> Any:
    watch = Membership(methods=names).begin(len(reads[0].candidates), clients, CLASSES)
    for read in reads:
        watch.add(read)
    return watch


def scores(name: str, reads: list[ReadRound]) -> torch.Tensor:
    return watched(reads, names=[name]).answers()[name]


@cache
def first_rounds(number: int) -> Any:
    """Watch them by all methods at once, which train reference models together."""
    return watched(rounds(number))


@cache
def plain(number: int) -> dict[str, torch.Tensor]:
    return first_rounds(number).answers()


@cache
def of_other_rounds() -> dict[str, dict[str, torch.Tensor]]:
    """How two rounds differ from ``rounds(2)`` -> scores by each method."""
    reads = rounds(2)
    first = reads[0].observations[0]
    broken = replace(first.upload, tensors={n: t * torch.nan for n, t in first.upload.tensors.items()})
    spoiled = replace(reads[0], observations=(replace(first, upload=broken), *reads[0].observations[1:]))
    return {
        "turned": watched([replace(read, observations=read.observations[::-1]) for read in reads]).answers(),
        "again": watched(reads).answers(),
        "absent": watched(reads, (*CLIENTS, 9)).answers(),
        "spoiled": watched([spoiled, reads[1]]).answers(),
    }


@every_method
def test_members_are_told_from_others(name: str) -> None:
    """Of each client's own examples and of examples that nobody has; the network fits 16 of 64 random labels."""
    found = plain(4)[name]
    assert found.shape == (len(asked()), len(CLIENTS)) and bool(found.isfinite().all())
    members = torch.cat([found[k * OWN : (k + 1) * OWN, k] for k in range(len(CLIENTS))])
    others = found[len(CLIENTS) * OWN :].flatten()
    assert auc(Separation(positives=members.numpy(), negatives=others.numpy())).low > 0.5


@every_method
def test_what_is_kept_does_not_grow_with_the_rounds(name: str) -> None:
    def held(number: int) -> int:
        kept = vars(first_rounds(number).methods[name]).values()
        return sum(t.numel() for t in kept if isinstance(t, torch.Tensor))

    assert held(1) == held(3) <= 2 * len(asked()) * len(CLIENTS)


@every_method
def test_the_order_of_clients_means_nothing_and_seeds_repeat(name: str) -> None:
    found = plain(2)[name]
    torch.testing.assert_close(found, of_other_rounds()["turned"][name], rtol=1e-4, atol=1e-4)
    assert torch.equal(found, of_other_rounds()["again"][name])


@pytest.mark.parametrize("name", ["loss", "lira", "final_rmia"])
def test_a_method_alone_says_what_it_says_among_others(name: str) -> None:
    torch.testing.assert_close(scores(name, rounds(2)), plain(2)[name])


@every_method
def test_clients_that_were_never_read_have_no_score_and_broken_uploads_no_say(name: str) -> None:
    absent = of_other_rounds()["absent"][name]
    assert bool(absent[:, -1].isnan().all()) and torch.equal(absent[:, :-1], plain(2)[name])
    assert bool(of_other_rounds()["spoiled"][name].isfinite().all())


def test_shadow_models_that_diverge_where_clipped_clients_do_not_are_trained_again() -> None:
    torch.manual_seed(0)
    widths = (64, 64, 64, 64, CLASSES)
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(one, other) for one, other in pairwise(widths)))
    sent = ModelState.of(model)
    nothing = {name: torch.zeros_like(value) for name, value in sent.parameters.items()}
    read = rounds(1)[0]
    seen = [
        replace(o, model=model, sent=sent, upload=replace(o.upload, tensors=nothing), plan=replace(o.plan, lr=50.0))
        for o in read.observations
    ]
    assert bool(scores("lira", [replace(read, observations=tuple(seen))]).isfinite().all())


def test_wrong_settings_are_told() -> None:
    with pytest.raises(UserError, match="methods is expected to be one of"):
        Membership(methods=("los",))
    with pytest.raises(UserError, match="members"):
        Membership(members=0)


def test_the_share_below_the_others_is_the_normal_one() -> None:
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    values[0, 2] = torch.nan
    found = share_below_others(values)
    for row in range(1, 5):
        for column in range(6):
            others = torch.cat([values[row, :column], values[row, column + 1 :]]).double()
            expected = torch.distributions.Normal(others.mean(), others.std()).cdf(values[row, column].double())
            torch.testing.assert_close(found[row, column], expected)
    assert bool(found[0, 2].isnan()) and bool(found[0, 0].isfinite())
    assert bool(share_below_others(values[:, :2]).isnan().all()), "one other has no spread"


def test_a_change_of_weights_becomes_the_mean_gradient_of_its_steps() -> None:
    read = rounds(1)[0]
    observation = read.observations[0]
    assert observation.plan.shares == "delta"
    after, sent = model_after(observation), observation.sent.parameters
    for name, delta in observation.upload.tensors.items():
        torch.testing.assert_close(after.parameters[name], sent[name] + delta)
        steps = 4 * -(-OWN // 8)
        torch.testing.assert_close(mean_gradient(observation)[name], -delta / (observation.plan.lr * steps))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_weight_decay_are_no_part_of_the_mean_gradient(nesterov: bool) -> None:
    plan = LocalPlan(shares="delta", lr=0.01, steps=3, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    sent, gradient = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 0.1, -0.2])
    trained = nn.Parameter(sent.clone())
    optimizer = torch.optim.SGD([trained], lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    for _ in range(3):
        trained.grad = gradient.clone()
        optimizer.step()
    found = mean_over_steps({"w": trained.detach() - sent}, {"w": sent}, plan, steps=3)["w"]
    torch.testing.assert_close(found, gradient, rtol=0.01, atol=1e-3)


def test_margins_are_logits_of_the_own_class() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    batch = Batch(torch.rand(5, 3, 2, 2), torch.tensor([0, 1, 2, 1, 0]))
    p = model(batch.inputs).softmax(1).gather(1, batch.labels[:, None])[:, 0]
    torch.testing.assert_close(measured(model, ModelState.of(model), batch, margins_of), (p / (1 - p)).log())


def test_products_are_those_of_gradients_one_by_one() -> None:
    read = rounds(1)[0]
    model, state = network(), read.observations[0].sent
    for index in (0, 20):
        one = Batch(read.candidates.inputs[index : index + 1], read.candidates.labels[index : index + 1])
        gradients = loss_gradients(model, state, one).gradients
        for column, observation in enumerate(read.observations):
            direction = mean_gradient(observation)
            expected = sum((gradients[n] * direction[n]).sum() for n in gradients)
            torch.testing.assert_close(read.products[0][index, column], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(read.products[1][index, 0], sum(g.square().sum() for g in gradients.values()))


def test_the_likelihood_ratio_is_that_of_normal_distributions() -> None:
    """With many shadow models per example; with few, the mean difference of all examples stands in."""
    rng = torch.Generator().manual_seed(0)
    inside = torch.rand(4000, 3, generator=rng) < 0.5
    margins = torch.randn(4000, 3, generator=rng) + 2.0 * inside + torch.tensor([0.0, 5.0, -5.0])
    observed = torch.tensor([[0.0, 2.0], [5.0, 7.0], [-5.0, -3.0]])
    found = likelihood_ratio(observed, margins, inside)
    expected = torch.tensor([-2.0, 2.0], dtype=torch.float64).expand(3, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.3)
    few = likelihood_ratio(observed, margins[:200], inside[:200] & (torch.arange(3) > 0))
    torch.testing.assert_close(few[:, 1] - few[:, 0], torch.full((3,), 4.0, dtype=torch.float64), rtol=0, atol=1.5)


def test_shadow_models_are_trained_in_the_last_rounds_alone() -> None:
    watch = Membership(methods=("lira",), shadows=8).begin(len(asked()), CLIENTS, CLASSES)
    watch.add(replace(rounds(1)[0], remaining=1))
    assert bool(watch.answers()["lira"].isnan().all())
    watch.add(rounds(2)[1])
    assert bool(watch.answers()["lira"].isfinite().all())
