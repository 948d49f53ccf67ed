import pytest
import torch
from torch import Tensor

from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.attacks.optimizers.lbfgs import LineSearch
from fl_privacy.errors import UserError


def _functions(count: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(count, size, size, generator=generator, dtype=torch.float64) / size**0.5
    return mix, torch.randn(count, size, generator=generator, dtype=torch.float64)


def _loss(variables: Tensor, mix: Tensor, target: Tensor) -> Tensor:
    return ((torch.einsum("vij,vj->vi", mix, variables).tanh() - target) ** 2).sum(-1) + 0.1 * variables.pow(4).sum(-1)


def _reference(start: Tensor, mix: Tensor, target: Tensor, settings: LBFGS, iterations: int) -> Tensor:
    x = start.clone().requires_grad_()
    search = None if settings.line_search == "none" else settings.line_search
    optimizer = torch.optim.LBFGS(
        [x], lr=settings.lr, max_iter=settings.inner, history_size=settings.history, line_search_fn=search
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(x[None], mix[None], target[None])[0]
        loss.backward()
        if settings.sign == "hard":
            x.grad.sign_()
        return loss

    for _ in range(iterations):
        optimizer.step(closure)
    return x.detach()


@pytest.mark.parametrize("history", [4, 20, 100])
@pytest.mark.parametrize("iterations", [1, 3])
def test_every_victim_moves_as_torch_moves_it_alone(history: int, iterations: int) -> None:
    _compare(LBFGS(lr=0.5, inner=15, history=history), iterations)


@pytest.mark.parametrize("lr", [1e-4, 0.1])
@pytest.mark.parametrize("iterations", [1, 3])
def test_signed_gradients_move_it_as_they_move_torch(lr: float, iterations: int) -> None:
    _compare(LBFGS(lr=lr, inner=15, sign="hard"), iterations)


def test_signed_gradients_and_line_searches_exclude_each_other() -> None:
    with pytest.raises(UserError, match="line_search=none"):
        LBFGS(sign="hard", line_search="strong_wolfe")


@pytest.mark.parametrize("inner", [1, 6, 15])
@pytest.mark.parametrize("lr", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("iterations", [1, 3])
def test_line_searches_try_the_steps_that_torch_tries(inner: int, lr: float, iterations: int) -> None:
    _compare(LBFGS(lr=lr, inner=inner, history=5, line_search="strong_wolfe"), iterations)


def _compare(settings: LBFGS, iterations: int) -> None:
    mix, target = _functions(6, 12)
    start = torch.linspace(-1, 1, 12, dtype=torch.float64).expand(6, -1) * torch.arange(1, 7)[:, None] / 3

    variables, finished = start.clone(), torch.zeros(6, dtype=torch.bool)
    run = settings.start(variables, iterations=iterations, images=12)
    while not finished.all():
        leaf = variables.clone().requires_grad_()
        loss = _loss(leaf, mix, target)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        variables, _, finished = run.step(variables, loss.detach(), gradient)

    for row in range(6):
        expected = _reference(start[row], mix[row], target[row], settings, iterations)
        torch.testing.assert_close(variables[row], expected, rtol=1e-7, atol=1e-7)


def test_a_flat_start_is_finished_at_once() -> None:
    run = LBFGS().start(torch.zeros(2, 3), iterations=5, images=3)
    gradient = torch.tensor([[0.0, 0, 0], [1, 0, 0]])
    variables, _, finished = run.step(torch.zeros(2, 3), torch.tensor([0.0, 1]), gradient)
    assert finished.tolist() == [True, False]
    assert variables[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("line_search", ["none", "strong_wolfe"])
def test_forgotten_and_dropped_victims_leave_the_others_as_they_were(line_search: LineSearch) -> None:
    mix, target = _functions(3, 5)

    def descend(forget: bool, keep: list[int]) -> Tensor:
        variables = torch.ones(3, 5, dtype=torch.float64)
        run = LBFGS(lr=0.5, line_search=line_search).start(variables, iterations=100, images=5)
        rows = torch.arange(3)
        for step in range(12):
            leaf = variables.clone().requires_grad_()
            loss = _loss(leaf, mix[rows], target[rows])
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
            variables, _, _ = run.step(variables, loss.detach(), gradient)
            if step == 5:
                if forget:
                    run.restart(torch.tensor([True, False, False]))
                rows = torch.tensor(keep)
                run.select(rows)
                variables = variables[rows]
        return variables[-1]

    torch.testing.assert_close(descend(True, [0, 2]), descend(False, [0, 1, 2]))


def test_unknown_line_searches_are_refused() -> None:
    with pytest.raises(UserError, match="strong_wolfe"):
        LBFGS(line_search="armijo")  # type: ignore[arg-type]
