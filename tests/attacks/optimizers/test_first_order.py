import pytest
import torch
from torch import Tensor

from fl_privacy.attacks.optimizers import Adam, ConstantRate, CosineRate, GradientDescent, Optimizer, StepDecay


def _descend(optimizer: Optimizer, start: Tensor, iterations: int) -> Tensor:
    variables, run = start.clone(), optimizer.start(start, iterations=iterations, images=start.shape[1])
    for _ in range(iterations):
        variables, _, _ = run.step(variables, torch.zeros(len(start)), _gradient(variables))
    return variables


def _gradient(variables: Tensor) -> Tensor:
    return torch.cos(3 * variables) + variables


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (Adam(lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
        (Adam(lr=0.05, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)),
        (GradientDescent(lr=0.05, momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8)),
        (
            GradientDescent(lr=0.05, momentum=0.8, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
        ),
        (GradientDescent(lr=0.05, momentum=0), lambda p: torch.optim.SGD(p, lr=0.05)),
    ],
)
def test_moves_as_torch_does(ours: Optimizer, reference) -> None:
    start = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = start.clone().requires_grad_()
    optimizer = reference([x])
    for _ in range(30):
        x.grad = _gradient(x.detach())
        optimizer.step()
    torch.testing.assert_close(_descend(ours, start, 30), x.detach())


def test_long_gradients_are_clipped_as_torch_does_each_victim_by_itself() -> None:
    start = 3 * torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = [row.clone().requires_grad_() for row in start]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    for _ in range(30):
        for row in parameters:
            row.grad = _gradient(row.detach())
            torch.nn.utils.clip_grad_norm_(row, 5.0)
        optimizer.step()
    ours = _descend(Adam(lr=0.05, weight_decay=0.1, clip=5.0), start, 30)
    torch.testing.assert_close(ours, torch.stack(parameters).detach())


def test_hard_sign_ignores_the_size_of_pixel_gradients_but_not_of_labels() -> None:
    optimizer = GradientDescent(lr=1.0, momentum=0.0, sign="hard")
    run = optimizer.start(torch.zeros(1, 3), iterations=1, images=2)
    moved, _, _ = run.step(torch.zeros(1, 3), torch.zeros(1), torch.tensor([[0.2, -5.0, 0.3]]))
    torch.testing.assert_close(moved, torch.tensor([[-1.0, 1.0, -0.3]]))


def test_soft_sign_hardens_from_tanh_to_the_gradient_itself() -> None:
    optimizer = GradientDescent(lr=1.0, momentum=0.0, sign="soft")
    run = optimizer.start(torch.zeros(1, 1), iterations=2, images=1)
    gradient = torch.tensor([[2.0]])
    moves = [run.step(torch.zeros(1, 1), torch.zeros(1), gradient)[0].item() for _ in range(2)]
    assert moves == pytest.approx([-torch.tensor(2.0).tanh().item(), -torch.tensor(1.0).tanh().item() / 0.5])


def test_schedules() -> None:
    steps = [StepDecay()(i, 800) for i in (0, 298, 299, 498, 499, 699, 700, 799)]
    assert steps == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert ConstantRate()(5, 10) == 1
    cosine = CosineRate(warmup=2)
    assert [cosine(i, 12) for i in (0, 1, 2, 7)] == pytest.approx([0.5, 1, 1, 0.5])
