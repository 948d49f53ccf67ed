"""Scores against plain loops over samples and points, in float64."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_privacy.data.transformations import read_policies
from fl_privacy.defenses.policy_search import (
    GradientSimilarity,
    PrivacyPlan,
    accuracy_scores,
    correlation_score,
    input_jacobian,
    normalized_scores,
    privacy_scores,
    transformed_by,
)
from fl_privacy.errors import UserError
from fl_privacy.models import LeNet, ResNet20
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.types import Batch, ModelState

POLICIES = read_policies(["3-43-15", "9", "21-13"])


def lenet():
    torch.manual_seed(0)
    return LeNet(in_channels=1, image_size=16, num_classes=5, width=4)


def resnet():
    """With running statistics that matter."""
    torch.manual_seed(0)
    model = ResNet20(in_channels=1, image_size=8, num_classes=5, width=2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 2)
    return model


class Odd(nn.Module):
    """A parameter outside of any layer: nothing to take apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64))
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(torch.tanh(x.flatten(1) * self.scale))


MODELS = {"lenet": (lenet, 16), "resnet20": (resnet, 8), "parameter outside of layers": (Odd, 8)}


def batch(side, number=7):
    levels = torch.randint(0, 256, (number, 1, side, side), generator=derive_generator(0, "images"))
    return Batch(levels.double() / 255, torch.arange(number) % 5)


def gradients(model, image, label):
    model.double().eval()
    loss = nn.functional.cross_entropy(model(image[None]), label[None])
    return [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]


def cosine(a, b):
    return float(nn.functional.cosine_similarity(a, b, dim=0, eps=1e-150))


def by_loops(model, given, policy, seed, *, variant, points, alpha=0.7, beta=0.3):
    start = torch.rand(given.inputs.shape, generator=derive_generator(seed, "search", "start")).double()
    goals = transformed_by(given.inputs, policy, seed)
    areas = []
    for image, goal, label in zip(start, goals, given.labels, strict=True):
        wanted, curve = gradients(model, goal, label), []
        for j in range(points):
            share = j / points if variant == "paper" else j / (points - 1)
            here = gradients(model, (1 - share) * image + share * goal, label)
            if variant == "paper":
                curve.append(cosine(torch.cat(here), torch.cat(wanted)))
            else:
                curve.append(np.mean([cosine(a, b) for a, b in zip(here, wanted, strict=True)]))
        areas.append(np.mean(curve) if variant == "paper" else np.trapezoid(curve, dx=1 / (points - 1)))
    if variant == "code_normalized":
        areas = [np.mean([a for a, k in zip(areas, given.labels, strict=True) if k == label]) for label in range(5)]
        areas = [mean for mean in areas if not np.isnan(mean)]
    return alpha * np.mean(areas) + beta * np.mean((np.array(areas) - np.mean(areas)) ** 2)


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value encountered")
@pytest.mark.parametrize("variant", ["paper", "code", "code_normalized"])
@pytest.mark.parametrize(("make", "side"), MODELS.values(), ids=MODELS.keys())
def test_privacy_score_equals_a_loop_over_samples_and_points(make, side, variant):
    model, given = make(), batch(side)
    similarity = GradientSimilarity(model, ModelState.of(model), (1, side, side), dtype=torch.float64)
    plan = PrivacyPlan.named(variant, points=4)
    found = privacy_scores(similarity, given, POLICIES, plan=plan, seed=3)
    for score, policy in zip(found, POLICIES, strict=True):
        expected = by_loops(make(), given, policy, 3, variant=variant, points=4)
        assert score.score == pytest.approx(expected, rel=1e-9)
        assert score.score == pytest.approx(0.7 * score.mean + 0.3 * score.variance)


def by_the_authors_program(class_means, alpha=0.7):
    """Compare policies as ``searchalg/search_best.py`` does."""

    def normalize(score):
        return (score - np.min(score)) / (np.max(score) - np.min(score))

    means, variances = [np.mean(one) for one in class_means], [np.var(one) for one in class_means]
    return alpha * normalize(means) + (1 - alpha) * normalize(variances)


def test_policies_are_compared_as_by_the_authors_program():
    class_means = np.random.default_rng(0).uniform(0, 1, size=(6, 10)) ** 2
    means, variances = class_means.mean(1).tolist(), class_means.var(1).tolist()
    plan = PrivacyPlan.named("code_normalized")
    found = normalized_scores(means, variances, plan)
    assert found == pytest.approx(by_the_authors_program(class_means))
    assert normalized_scores(means, [0.5] * 6, plan) == pytest.approx(
        [0.7 * (m - min(means)) / (max(means) - min(means)) for m in means]
    )
    other = PrivacyPlan.named("code_normalized", alpha=0.0, beta=1.0)
    assert np.argsort(normalized_scores(means, variances, other)).tolist() == np.argsort(variances).tolist()


class Largest(TorchDispatchMode):
    """The elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.long
def test_points_are_made_as_they_are_compared():
    model, given = lenet(), batch(16)
    similarity = GradientSimilarity(model, ModelState.of(model), (1, 16, 16), dtype=torch.float64, at_once=5)
    with Largest() as largest:
        privacy_scores(similarity, given, POLICIES, plan=PrivacyPlan(points=100), seed=0)
    points = 100 * given.inputs.numel() * len(POLICIES)
    assert largest.elements < 0.1 * points


def test_single_precision_is_close_and_chunks_do_not_matter():
    model, given = lenet(), batch(16)
    exact = GradientSimilarity(lenet(), ModelState.of(model), (1, 16, 16), dtype=torch.float64)
    fast = GradientSimilarity(lenet(), ModelState.of(model), (1, 16, 16))
    plan = PrivacyPlan(points=5)
    expected = [s.score for s in privacy_scores(exact, given, POLICIES, plan=plan, seed=0)]
    single = Batch(given.inputs.float(), given.labels)
    assert [s.score for s in privacy_scores(fast, single, POLICIES, plan=plan, seed=0)] == pytest.approx(expected, 1e-3)
    for number in (1, 3, 6, 17):
        some = GradientSimilarity(lenet(), ModelState.of(model), (1, 16, 16), dtype=torch.float64, at_once=number)
        assert [s.score for s in privacy_scores(some, given, POLICIES, plan=plan, seed=0)] == pytest.approx(expected)


def test_company_changes_no_score():
    model, given = lenet(), batch(16)
    similarity = GradientSimilarity(model, ModelState.of(model), (1, 16, 16), dtype=torch.float64)
    plan = PrivacyPlan(points=3)
    together = privacy_scores(similarity, given, POLICIES, plan=plan, seed=0)
    alone = [privacy_scores(similarity, given, [policy], plan=plan, seed=0)[0] for policy in POLICIES]
    assert [s.score for s in together] == pytest.approx([s.score for s in alone])


def test_the_end_of_the_way_is_the_image_itself():
    model, given = lenet(), batch(16)
    similarity = GradientSimilarity(model, ModelState.of(model), (1, 16, 16), dtype=torch.float64)
    products = similarity(given.inputs, given.inputs, given.labels, torch.ones(1))
    for of in ("whole", "layers"):
        assert products.cosine(of).flatten().tolist() == pytest.approx([1.0] * 7)


def test_jacobian_equals_a_loop_over_images():
    model, images = resnet().double(), batch(8).inputs
    found = input_jacobian(model, ModelState.of(model), images)
    model.eval()
    for row, image in zip(found, images, strict=True):
        (expected,) = torch.autograd.functional.jacobian(lambda x: model(x[None]).sum(), (image,))
        assert torch.allclose(row, expected.flatten())


def accuracy_by_numpy(rows, eta=1e-5):
    values = np.linalg.eigvalsh(np.corrcoef(rows))
    return -float(np.sum(np.log(values + eta) + 1 / (values + eta)))


def test_accuracy_score_equals_the_formula():
    rows = torch.rand(3, 6, 40, generator=derive_generator(0), dtype=torch.float64)
    expected = [accuracy_by_numpy(matrix.numpy()) for matrix in rows]
    assert correlation_score(rows, total="sum").tolist() == pytest.approx(expected, rel=1e-6)
    assert correlation_score(rows).tolist() == pytest.approx([e / 6 for e in expected], rel=1e-6)


def test_images_alike_score_low():
    apart = torch.eye(8).repeat(1, 4) - 1 / 8
    alike = torch.rand(1, 32, generator=derive_generator(0)) + 1e-3 * apart
    assert correlation_score(alike) < correlation_score(apart) <= 0


def test_accuracy_scores_equal_a_loop_over_policies_and_draws():
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        states.append(ModelState.of(LeNet(in_channels=1, image_size=16, num_classes=5, width=4).double()))
    images = [batch(16, 9).inputs, batch(16, 12).inputs[:9].flip(0)]
    model = lenet().double()
    found = accuracy_scores(model, states, images, POLICIES, seed=4)
    for score, policy in zip(found, POLICIES, strict=True):
        draws = []
        for number, (state, given) in enumerate(zip(states, images, strict=True)):
            inputs = transformed_by(given, policy, derive_seed(4, "draw", number)).requires_grad_()
            model.eval()
            logits = functional_call(model, state.parameters, (inputs,))
            (slope,) = torch.autograd.grad(logits.sum(), inputs)
            draws.append(accuracy_by_numpy(slope.flatten(1).numpy()) / len(given))
        assert score == pytest.approx(np.mean(draws), rel=1e-5)


@pytest.mark.parametrize(("variant", "points"), [("paper", 0), ("code", 1), ("code_normalized", 1), ("other", 5)])
def test_wrong_plans_are_one_line(variant, points):
    with pytest.raises(UserError):
        PrivacyPlan.named(variant, points=points)
