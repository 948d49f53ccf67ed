"""Lemmas, theorems and equations that papers print, held against numbers: what holds as printed, and what does not."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn import functional as F

from fl_privacy.defenses.robust_data import pull_within
from fl_privacy.measure.images import mse
from fl_privacy.measure.registry import METRICS
from fl_privacy.models import TransformerLM

WEDIN = (1 + math.sqrt(5)) / 2  # of matrices of one rank, in the spectral norm


def norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def of_rank(rng: np.random.Generator, rows: int, columns: int, rank: int) -> np.ndarray:
    return rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns))


# Refiner


def test_the_best_classifier_scores_the_js_divergence() -> None:
    """Equation 5 and Appendix C: half of the largest score and log 2 make the divergence."""
    rng = np.random.default_rng(0)
    p, q = (one / one.sum() for one in rng.uniform(size=(2, 8)))

    def score(d: np.ndarray) -> np.ndarray:
        return (p * np.log(1 - d) + q * np.log(d)).sum(-1)

    middle = (p + q) / 2
    divergence = 0.5 * (p * np.log(p / middle) + q * np.log(q / middle)).sum()
    assert 0.5 * score(q / (p + q)) + math.log(2) == pytest.approx(divergence)
    assert (score(rng.uniform(1e-3, 1 - 1e-3, size=(1000, 8))) <= score(q / (p + q))).all()


def test_thresholds_are_those_of_section_5_3() -> None:
    printed = {"psnr": 15.0, "ssim": 0.5, "lpips": 0.05, "noise_ratio": 0.4}
    assert {name: getattr(METRICS[name].threshold, "value", None) for name in printed} == printed


def bound_of_theorem_1(
    rounds: int,
    *,
    smooth: float,
    convex: float,
    epsilon: float,
    variance: float,
    length: float,
    skew: float,
    far: float,
) -> float:
    """Compute the right side of Theorem 1 for four clients; ``length`` is G, ``skew`` Gamma, ``far`` the start."""
    kappa = smooth / convex
    gamma, clients = max(8 * kappa, 1.0), 4
    q = (epsilon**2 + variance) / clients + 6 * smooth * skew
    c = 4 / clients * (epsilon**2 + length**2)
    return 2 * kappa / (gamma + rounds) * ((q + c) / convex + convex * gamma / 2 * far**2)


class Regression:
    """Four clients' logistic regressions with a ridge, whose constants are known."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.inputs = rng.normal(size=(4, 20, 5))
        self.labels = np.sign(self.inputs[..., 0] + 0.5 * rng.normal(size=(4, 20)) + np.linspace(-0.5, 0.5, 4)[:, None])
        self.convex = 0.5
        self.smooth = self.convex + max(norm(x) ** 2 / len(x) / 4 for x in self.inputs)

    def loss(self, at: np.ndarray, clients: slice = slice(None)) -> float:
        margins = self.labels[clients] * (self.inputs[clients] @ at)
        return float(np.log1p(np.exp(-margins)).mean() + self.convex / 2 * at @ at)

    def gradients(self, at: np.ndarray) -> np.ndarray:
        """Compute those of each client's examples (4, 20, 5)."""
        weight = -self.labels / (1 + np.exp(self.labels * (self.inputs @ at)))
        return weight[..., None] * self.inputs + self.convex * at

    def least(self, clients: slice = slice(None)) -> np.ndarray:
        return minimize(self.loss, np.zeros(5), args=(clients,), tol=1e-12).x


def test_theorem_1_bounds_the_loss_if_shifts_have_mean_zero() -> None:
    """FedSGD with the theorem's eta, one example a step, and uploads brought within epsilon as Refiner does it."""
    task, epsilon, start, best = Regression(), 0.3, np.full(5, 2.0), Regression().least()
    skew = task.loss(best) - np.mean([task.loss(task.least(slice(k, k + 1)), slice(k, k + 1)) for k in range(4)])
    gamma = max(8 * task.smooth / task.convex, 1.0)
    gaps: dict[int, list[float]] = {20: [], 80: [], 320: []}
    variance = length = 0.0
    for seed in range(6):
        rng, at = np.random.default_rng(seed), start.copy()
        for step in range(1, 321):
            every = task.gradients(at)
            variance = max(variance, float(((every - every.mean(1, keepdims=True)) ** 2).sum(-1).mean(1).max()))
            length = max(length, math.sqrt((every**2).sum(-1).mean(1).max()))
            drawn = every[np.arange(4), rng.integers(20, size=4)]
            sent = [
                pull_within({"w": one + 100 * torch.from_numpy(rng.normal(size=5))}, {"w": one}, epsilon)["w"].numpy()
                for one in torch.from_numpy(drawn)
            ]
            at = at - 2 / (task.convex * (gamma + step)) * np.mean(sent, axis=0)
            if step in gaps:
                gaps[step].append(task.loss(at) - task.loss(best))
    constants = {"smooth": task.smooth, "convex": task.convex, "epsilon": epsilon, "variance": variance}
    for rounds, found in gaps.items():
        bound = bound_of_theorem_1(
            rounds, length=length, skew=skew, far=float(np.linalg.norm(start - best)), **constants
        )
        assert 0 < np.mean(found) <= bound


def test_theorem_1_fails_if_all_gradients_are_shifted_alike() -> None:
    """Each client's loss is half the squared length, and each upload its gradient with the same shift of epsilon."""
    epsilon, at, shift, lengths = 0.3, torch.zeros(5), F.normalize(torch.ones(5), dim=0), []
    for step in range(1, 101):
        sent = pull_within({"w": at + 10 * shift}, {"w": at}, epsilon)["w"]
        assert float((sent - at).norm()) <= epsilon * (1 + 1e-6)
        lengths.append(float(at.norm()))
        at = at - 2 / (8 + step) * sent
    loss = float(at @ at / 2)
    constants = {"smooth": 1.0, "convex": 1.0, "epsilon": epsilon, "variance": 0.0, "skew": 0.0, "far": 0.0}
    assert loss > 2 * bound_of_theorem_1(100, length=max(lengths), **constants)
    assert loss == pytest.approx(epsilon**2 / 2, rel=0.05)


# SPN


def test_inputs_of_layers_solve_the_system_of_lemma_5_1() -> None:
    torch.manual_seed(0)
    first, second = (torch.nn.Linear(6, 4).double(), torch.nn.Linear(4, 3).double())
    inputs = torch.rand(1, 6, dtype=torch.float64)
    between = torch.sigmoid(first(inputs))
    F.cross_entropy(second(between), torch.tensor([1])).backward()
    for layer, entered in ((first, inputs), (second, between.detach())):
        weight, bias = layer.weight.grad, layer.bias.grad
        assert weight is not None and bias is not None
        system = torch.cat([torch.eye(entered.shape[1], dtype=torch.float64) * b for b in bias])
        torch.testing.assert_close(system @ entered[0], weight.flatten())
        torch.testing.assert_close(torch.linalg.lstsq(system, weight.flatten()).solution, entered[0])


def test_the_error_of_a_disturbed_system_is_that_of_lemma_5_2() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-3, 0.1, 1.0):
        b, x = rng.normal(size=(5, 5)), rng.normal(size=5)
        other, w = b + scale * rng.normal(size=(5, 5)), b @ x
        shifted = w + scale * rng.normal(size=5)
        found = np.linalg.solve(other, shifted)
        apart = np.linalg.norm(w - shifted) + norm(b - other) * np.linalg.norm(found)
        assert np.linalg.norm(x - found) <= norm(np.linalg.inv(b)) * apart * (1 + 1e-9)


def test_gradients_bound_the_distance_of_images_by_the_constant_of_lemma_5_2_and_not_by_the_printed_one() -> None:
    """Theorem 5.3, (11), behind a layer that can be inverted; M as printed has the image's length in it."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 3).double()

    def gradients(image: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(second(torch.sigmoid(first(image))), torch.tensor([1]))
        return torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, list(second.parameters()))])

    printed_holds = []
    for length in (1e-3, 1.0, 3.0):
        image = length * F.normalize(torch.rand(1, 5, dtype=torch.float64))
        between = torch.sigmoid(first(image)).detach()
        slopes = (between * (1 - between)).T * first.weight.detach()
        inverse, of_bias = norm(np.linalg.inv(slopes.numpy())), float(gradients(image)[-3:].norm())
        by_lemma = inverse / of_bias * (1 + float(between.norm()))
        for _ in range(30):
            other = image + 1e-5 * F.normalize(torch.randn(1, 5, dtype=torch.float64))
            apart = float((gradients(image) - gradients(other)).norm())
            assert float((image - other).norm()) <= by_lemma * apart * (1 + 1e-3)
            printed_holds.append(float((image - other).norm()) <= (inverse * length / of_bias + 1) * apart)
    assert not all(printed_holds)


def test_a_convolution_is_a_matrix_of_shifted_kernels() -> None:
    torch.manual_seed(0)
    kernel, images = torch.rand(4, 3, 5, 5), torch.rand(2, 3, 8, 8)
    matrix = torch.zeros(4, 4, 4, 3, 12, 12)  # stride 2, two pixels of padding
    for row in range(4):
        for column in range(4):
            matrix[:, row, column, :, 2 * row : 2 * row + 5, 2 * column : 2 * column + 5] = kernel
    matrix = matrix[..., 2:-2, 2:-2].reshape(4 * 16, 3 * 64)
    expected = F.conv2d(images, kernel, stride=2, padding=2)
    torch.testing.assert_close((images.flatten(1) @ matrix.T).view_as(expected), expected)


# FDL-PP


def test_the_divergence_to_a_normal_guess_is_the_squared_error() -> None:
    """Equation 11, without the entropy of the truth, on which no guess has an influence."""
    torch.manual_seed(0)
    truth, guess, deviation = torch.rand(50).double(), torch.rand(50).double(), 0.3
    printed = -math.log(1 / math.sqrt(2 * math.pi * deviation**2)) + (guess - truth).square() / (2 * deviation**2)
    torch.testing.assert_close(-torch.distributions.Normal(guess, deviation).log_prob(truth), printed)


def pairs_of_one_rank() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    made = [(of_rank(rng, 5, 3, rank), of_rank(rng, 5, 3, rank)) for rank in (1, 2, 3) for _ in range(50)]
    return made + [(w, w @ (np.eye(3) + 0.1 * rng.normal(size=(3, 3)))) for w, _ in made]


def test_pseudo_inverses_differ_by_at_most_wedins_bound() -> None:
    for w, other in pairs_of_one_rank():
        one, two = np.linalg.pinv(w), np.linalg.pinv(other)
        assert norm(two - one) <= WEDIN * norm(one) * norm(two) * norm(other - w) * (1 + 1e-9)


def test_lemma_3_holds_as_its_proof_has_it_and_not_as_printed() -> None:
    rng = np.random.default_rng(1)

    def sides(w: np.ndarray, other: np.ndarray, o: np.ndarray, read: np.ndarray) -> tuple[float, float, float]:
        one, two = np.linalg.pinv(w), np.linalg.pinv(other)
        apart, length = norm(one) * norm(two) * np.linalg.norm(o) * norm(other - w), np.linalg.norm(o - read)
        left = float(np.linalg.norm(two @ read - one @ o))
        return left, WEDIN * (apart + norm(two) * length), WEDIN * (apart + norm(one) * length)

    for w, other in pairs_of_one_rank():
        left, by_proof, _ = sides(w, other, *rng.normal(size=(2, 5)))
        assert left <= by_proof * (1 + 1e-9)
    left, by_proof, printed = sides(np.eye(2), 0.01 * np.eye(2), np.zeros(2), np.ones(2))
    assert printed < left <= by_proof


def seen_by_one_alone(w: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Find a unit vector in the column space of ``w`` that is orthogonal to that of ``other``."""
    basis = np.linalg.svd(w, full_matrices=False)[0][:, : np.linalg.matrix_rank(w)]
    along = np.linalg.svd(other.T @ basis)[2][-1]
    found = basis @ along
    assert np.linalg.norm(other.T @ found) < 1e-9
    return found


def test_pseudo_inverses_of_other_ranks_are_apart() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        w, other = of_rank(rng, 5, 3, 3), of_rank(rng, 5, 3, 2)
        o = seen_by_one_alone(w, other)
        assert np.linalg.norm((np.linalg.pinv(w) - np.linalg.pinv(other)) @ o) >= (1 - 1e-9) / norm(w - other)


def test_case_1_bounds_the_error_of_linear_layers() -> None:
    """Theorem 1, case 1, with Wedin's constant for C1: features of unit length, inverted by the accomplice's layer."""
    rng = np.random.default_rng(3)
    for w, other in pairs_of_one_rank():
        o = w @ rng.normal(size=3)
        o /= np.linalg.norm(o)
        one, two = np.linalg.pinv(w), np.linalg.pinv(other)
        assert np.linalg.norm(two @ o - one @ o) <= WEDIN * norm(one) * norm(two) * norm(w - other) * (1 + 1e-9)


def test_case_2_bounds_the_root_of_the_error_and_not_its_square() -> None:
    """Theorem 1, case 2, whose C2 is the inverse of the largest norm of the weights without their scale."""
    rng, squares = np.random.default_rng(4), []
    for scale in (0.1, 1.0, 10.0):
        for _ in range(30):
            weights, others = rng.normal(size=(2, 3, 3))
            gamma, sparse = np.diag(scale * rng.uniform(0.5, 1.5, size=3)), np.diag([scale, scale * 0.5, 0.0])
            o = seen_by_one_alone(gamma @ weights, sparse @ others)
            error = np.linalg.norm((np.linalg.pinv(gamma @ weights) - np.linalg.pinv(sparse @ others)) @ o)
            bound = 1 / max(norm(weights), norm(others)) / (norm(gamma) + norm(sparse))
            assert error >= bound * (1 - 1e-9)
            squares.append(error**2 >= bound)
    assert not all(squares)


# SAPAG


def test_the_error_is_the_mean_over_pixels_of_the_squared_difference() -> None:
    """Equation 9, and BPMSE of FDL-PP."""
    rng = np.random.default_rng(5)
    guesses, truths = rng.uniform(size=(2, 4, 3, 6, 5))
    found = mse(torch.from_numpy(guesses), torch.from_numpy(truths))
    np.testing.assert_allclose(found.numpy(), [((g - t) ** 2).sum() / 90 for g, t in zip(guesses, truths, strict=True)])


def test_the_language_model_has_gelu() -> None:
    model = TransformerLM(num_classes=50, vocabulary_size=50, max_length=8, width=16, layers=2, heads=4, hidden=20)
    between = [type(m) for m in model.modules() if isinstance(m, torch.nn.GELU | torch.nn.ReLU)]
    assert between == [torch.nn.GELU] * 2
