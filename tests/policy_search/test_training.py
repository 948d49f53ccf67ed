import pytest
import torch

from fl_privacy.defenses.policy_search import TrainingPlan, train_model
from fl_privacy.errors import UserError
from fl_privacy.models import LeNet
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, ModelState


def model():
    torch.manual_seed(0)
    return LeNet(in_channels=1, image_size=12, num_classes=2, width=4, activation="tanh")


def batch():
    labels = torch.arange(40) % 2
    noise = torch.rand(40, 1, 12, 12, generator=derive_generator(0))
    return Batch(0.5 * noise + 0.5 * labels.view(-1, 1, 1, 1), labels)


def by_pytorch(network, given, plan, seed):
    """Train the same with PyTorch's own optimizer and learning rates set by hand."""
    rng = derive_generator(seed, "training", "order")
    optimizer = torch.optim.SGD(network.parameters(), lr=plan.lr, momentum=0.9, weight_decay=5e-4)
    for epoch in range(plan.epochs):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * 0.1 ** sum(epoch >= plan.epochs * share for share in (3 / 8, 5 / 8, 7 / 8))
        for chosen in torch.randperm(len(given), generator=rng).split(plan.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(given.inputs[chosen]), given.labels[chosen]).backward()
            optimizer.step()
    return network


def test_equals_pytorch_and_leaves_the_model():
    plan = TrainingPlan(epochs=8, lr=0.05, batch_size=16)
    given, network = batch(), model()
    state = train_model(network, given, plan, seed=3)
    expected = dict(by_pytorch(model(), given, plan, 3).named_parameters())
    before = ModelState.of(model())
    for name, value in state.parameters.items():
        assert torch.allclose(value, expected[name], atol=1e-6)
        assert torch.equal(dict(network.named_parameters())[name], before.parameters[name])
        assert not value.requires_grad


def test_a_diverged_training_is_one_line():
    with pytest.raises(UserError, match=r"lower training\.lr") as error:
        train_model(model(), batch(), TrainingPlan(epochs=8, lr=1e30, batch_size=8), seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"momentum": -1}, {"momentum": 1}, {"weight_decay": -1e-3}, {"lr": 0}])
def test_wrong_plans_are_one_line(wrong):
    with pytest.raises(UserError, match=f"training.{next(iter(wrong))}"):
        TrainingPlan(**wrong)
