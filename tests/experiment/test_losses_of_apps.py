"""Losses of several batches, and of several inputs: what is attacked is all that the step was made of."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy.attacks.auto import AutoAttack
from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.auditing.instrument.watch import MOST_ADDED, TrainingWatch, Watched
from fl_privacy.auditing.scenario_problem import MIXED, NotAttackedError, StepProblem, gradient_plan, read_problem
from fl_privacy.auditing.scenarios import entered_apart

Train = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 128), nn.ReLU(), nn.Linear(128, 4))


def watched(train: Train, net: nn.Module | None = None) -> tuple[Watched, StepProblem]:
    net, watch = net or network(), TrainingWatch(program=True)
    inputs = torch.rand(6, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with watch.looking() as seen:
        train(net, torch.optim.SGD(net.parameters(), 0.1), inputs, torch.tensor([0, 1, 2, 3, 0, 1]))
    problem = read_problem(seen, [inputs])
    problem.model.load_state_dict(problem.sent.parameters, strict=False)
    return seen, problem


def halves(share: float, loss: Callable[..., Tensor] = F.cross_entropy) -> Train:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        for start in (0, 2):
            (loss(net(x[start : start + 2]), y[start : start + 2]) * share).backward()
        optimizer.step()

    return train


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_half_batches_that_are_added_up_are_one_batch(share: float) -> None:
    """Their loss is the mean over all of both, or twice that."""
    seen, problem = watched(halves(share))
    assert len(problem.truth) == 4 and problem.labels is not None and problem.labels.tolist() == [0, 1, 2, 3]
    assert problem.loss.name == "cross entropy" and "of 2 losses are added up" in problem.notes[-1]
    loss = problem.loss(problem.model(problem.truth), problem.labels)
    assert float(loss.detach()) == pytest.approx(2 * share * 1.4, abs=0.2)
    made = torch.autograd.grad(loss, list(problem.model.parameters()))
    for (name, _), gradient in zip(problem.model.named_parameters(), made, strict=True):
        torch.testing.assert_close(gradient, seen.gradients[name])


def test_labels_in_a_column_are_those_of_one_example_too() -> None:
    one, column = torch.rand(1, 1, 6, 6), torch.tensor([[0]])

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        F.nll_loss(F.log_softmax(net(one), 1), column.squeeze(-1)).backward()
        optimizer.step()

    _, problem = watched(train)
    outputs = problem.model(problem.truth)
    expected = F.cross_entropy(outputs, torch.tensor([0]))
    torch.testing.assert_close(problem.loss(outputs, torch.tensor([0])), expected)


@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_loss_may_be_summed_up_in_place_from_zero(shape: tuple[int, ...]) -> None:
    said = list[float]()

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        loss, outputs = torch.zeros(shape), net(x)
        for part in (0.5, 0.25):
            loss += part * F.cross_entropy(outputs, y)
        loss.backward()
        said.append(loss.item())
        optimizer.step()

    seen, problem = watched(train)
    loss = problem.loss(problem.model(problem.truth), problem.labels)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(said[0], rel=1e-5)
    made = torch.autograd.grad(loss, list(problem.model.parameters()))
    for (name, _), gradient in zip(problem.model.named_parameters(), made, strict=True):
        torch.testing.assert_close(gradient, seen.gradients[name])


def test_examples_of_a_client_are_counted_once_whatever_the_epochs() -> None:
    """The second loader of the same data set, and a test loader without gradients, add nothing."""
    data = TensorDataset(torch.rand(5, 1, 6, 6), torch.zeros(5, dtype=torch.long))

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        for _ in range(3):
            for images, labels in DataLoader(data, batch_size=2):
                F.cross_entropy(net(images), labels).backward()
                optimizer.step()
        with torch.no_grad():
            list(DataLoader(TensorDataset(x, y), batch_size=2))

    seen, _ = watched(train)
    assert seen.loaded == 15 and sum(seen.passes.values()) == 5


def unequal(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for part in (slice(0, 4), slice(4, 6)):
        (F.cross_entropy(net(x[part]), y[part]) / 2).backward()
    optimizer.step()


def test_a_shorter_last_batch_has_a_mean_of_its_own() -> None:
    seen, problem = watched(unequal)
    assert problem.labels is not None and problem.labels.tolist() == [0, 1, 2, 3, 0, 1]
    made = torch.autograd.grad(
        problem.loss(problem.model(problem.truth), problem.labels), list(problem.model.parameters())
    )
    for (name, _), gradient in zip(problem.model.named_parameters(), made, strict=True):
        torch.testing.assert_close(gradient, seen.gradients[name])
    (found,) = ExactInversion(rounds=20, starts=16)([problem.observed(0, seen.gradients, gradient_plan(seen))], seed=0)
    assert found.batch is not None
    errors = torch.cdist(problem.truth.flatten(1), found.batch.inputs.flatten(1)).amin(1)
    assert int((errors < 1e-3).sum()) >= 4, "those with neurons of their own"


@pytest.mark.parametrize("train", [halves(0.5), unequal])
def test_batches_that_batch_norm_normalizes_one_by_one_are_not_attacked_as_one(train: Train) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    with pytest.raises(NotAttackedError, match="that batch norm normalizes one by one"):
        watched(train, net)


def test_two_losses_of_one_batch_are_added_up() -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        outputs = net(x[:2])
        F.cross_entropy(outputs, y[:2]).backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()

    seen, problem = watched(train)
    assert len(problem.truth) == 2 and problem.whole and seen.added == 2
    made = torch.autograd.grad(problem.model(problem.truth).mean(), list(problem.model.parameters()))
    for (name, _), gradient in zip(problem.model.named_parameters(), made, strict=True):
        torch.testing.assert_close(gradient, seen.gradients[name])


def noisy(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for start in (0, 2):
        F.cross_entropy(net(x[start : start + 2]), y[start : start + 2]).backward()
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_gradients_that_are_changed_before_the_step_are_not_said_to_be_understood() -> None:
    with pytest.raises(NotAttackedError, match="in a way that was not understood"):
        watched(noisy)


def test_losses_that_no_optimizer_of_pytorch_steps_after_are_not_added_up() -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        for start in (0, 2):
            net.zero_grad()
            F.cross_entropy(net(x[start : start + 2]), y[start : start + 2]).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(0.1 * torch.as_tensor(parameter.grad))

    seen, problem = watched(train)
    assert seen.added == 1 and len(problem.truth) == 2


def triplets(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.triplet_margin_loss(net(x[:2]), net(x[2:4]), net(x[4:])).backward()
    optimizer.step()


def triplets_together(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.triplet_margin_loss(*net(torch.cat([x[:2], x[2:4], x[4:]])).chunk(3)).backward()
    optimizer.step()


@pytest.mark.parametrize("train", [triplets, triplets_together])
def test_inputs_of_triplets_that_have_neurons_of_their_own_are_reconstructed(train: Train) -> None:
    seen, problem = watched(train)
    found = entered_apart(problem.observed(0, seen.gradients, gradient_plan(seen))).flatten(1)
    errors = torch.cdist(problem.truth.flatten(1), found).amin(1)
    assert float(errors.min()) < 1e-3, "one at least, to the last digits"
    assert torch.equal(problem.model(problem.truth[:1]), problem.model(problem.truth[:1])), "of any number"


def test_triplets_behind_batch_norm_are_attacked_and_the_limit_is_said() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    seen, problem = watched(triplets, net)
    assert MIXED in problem.notes
    (found,) = AutoAttack(evaluations=25)([problem.observed(0, seen.gradients, gradient_plan(seen))], seed=0)
    assert found.failure is None and found.batch is not None
    assert MIXED not in watched(triplets)[1].notes


def many(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for _ in range(MOST_ADDED + 2):
        F.cross_entropy(net(x[:2]), y[:2]).backward()
    optimizer.step()


def different(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    labeled, other = x[:2].clone(), x[2:].clone()
    F.cross_entropy(net(labeled), y[:2]).backward()
    net(other).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("train", "said"), [(many, "too many to follow"), (different, "of different batches")])
def test_what_would_be_attacked_in_part_or_given_is_not_attacked(train: Train, said: str) -> None:
    with pytest.raises(NotAttackedError, match=said):
        watched(train)


def in_place(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for start in (0, 2):
        own = x[start : start + 2].clone().sub_(0.5).div_(0.5)
        F.cross_entropy(net(own + 0.01 * torch.randn_like(own)), y[start : start + 2]).backward()
    before = x.clone(), torch.get_rng_state()
    optimizer.step()
    assert torch.equal(x, before[0]) and torch.equal(torch.get_rng_state(), before[1]), "watching changes nothing"


def test_watching_summed_losses_changes_neither_data_nor_streams() -> None:
    net, watch = network(), TrainingWatch(program=True)
    with watch.looking() as seen:
        in_place(net, torch.optim.SGD(net.parameters(), 0.1), torch.rand(6, 1, 6, 6), torch.tensor([0, 1, 2, 3, 0, 1]))
    assert seen.steps == 1


class Recomputed(nn.Module):
    """A network whose last layers are computed again in the backward pass, which differentiates within another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = (
            nn.Sequential(nn.Flatten(), nn.Linear(36, 128)),
            nn.Sequential(nn.ReLU(), nn.Linear(128, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.rest, self.first(x), use_reentrant=True)
        return found


def test_a_step_that_recomputes_layers_has_one_loss() -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    seen, problem = watched(train, Recomputed())
    assert seen.backwards == 1 and seen.added == 1
    assert problem.labels is not None and problem.labels.tolist() == [0, 1, 2, 3, 0, 1]


class Trains(nn.Module):
    """A network that differentiates its own loss, with a step that is no optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        return loss.detach()


def test_a_loss_that_is_differentiated_in_a_network_is_seen() -> None:
    net, watch = Trains(), TrainingWatch(program=True)
    with watch.looking() as seen:
        net(torch.rand(6, 1, 6, 6), torch.tensor([0, 1, 2, 3, 0, 1]))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(0.1 * parameter.grad)
    assert seen.backwards == seen.steps == 1 and len(seen.gradients) == len(list(net.parameters()))


class Returning(nn.Module):
    """A network that also returns what entered it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), x


def test_a_network_may_also_return_its_input() -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(net(x)[0], y).backward()
        optimizer.step()

    seen, problem = watched(train, Returning())
    assert problem.truth.shape == (6, 1, 6, 6) and problem.labels is not None
    made = torch.autograd.grad(
        problem.loss(problem.model(problem.truth), problem.labels), list(problem.model.parameters())
    )
    for (name, _), gradient in zip(problem.model.named_parameters(), made, strict=True):
        torch.testing.assert_close(gradient, seen.gradients[name])


class Gated(nn.Module):
    """A network with hard sigmoids, which PyTorch differentiates once only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.gate = network(), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made * self.gate(made) * F.hardsigmoid(input=made)


def test_hard_sigmoids_have_a_second_derivative_in_a_replay() -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    seen, problem = watched(train, Gated())
    inputs, parameters = problem.truth.clone().requires_grad_(), list(problem.model.parameters())
    first = torch.autograd.grad(problem.loss(problem.model(inputs), problem.labels), parameters, create_graph=True)
    for (name, _), gradient in zip(problem.model.named_parameters(), first, strict=True):
        torch.testing.assert_close(gradient, seen.gradients[name])
    (second,) = torch.autograd.grad(sum(each.square().sum() for each in first), inputs)
    assert second.isfinite().all() and second.abs().max() > 0
