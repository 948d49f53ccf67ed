"""What is read exactly is exact, and what is called proven is right."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy.optimize import linear_sum_assignment, nnls
from torch import Tensor, nn

from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.attacks.exact.certificate import nonnegative_least_squares
from fl_privacy.attacks.exact.spear import column_space
from fl_privacy.errors import UserError
from fl_privacy.models import MLP, LeNet
from fl_privacy.types import Batch, Certainty, LocalPlan, Observation, Reconstruction, Upload, VictimId
from tests.attacks.victims import CLASSES, observe


def mlp(seed: int = 0, activation: str = "relu", widths: tuple[int, ...] = (96, 32), image_size: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    normalized = {"mean": [0.5], "std": [0.25]}
    return MLP(
        in_channels=2, image_size=image_size, num_classes=CLASSES, widths=widths, activation=activation, **normalized
    )


def batch(count: int, seed: int, image_size: int = 8) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 2, image_size, image_size, generator=rng)
    return Batch(images, torch.randint(CLASSES, (count,), generator=rng))


def victims(model: nn.Module, count: int, number: int, **options) -> tuple[list[Observation], list[Batch]]:
    truths = [batch(count, seed) for seed in range(number)]
    return [observe(model, truth, id=VictimId(0, 0, k), **options) for k, truth in enumerate(truths)], truths


def worst(found: Reconstruction, truth: Batch) -> float:
    """Compute the largest error of a pixel over images in their best order; infinite if a label is wrong."""
    assert found.batch is not None
    apart = (found.batch.inputs[:, None] - truth.inputs[None].float()).abs().flatten(2).amax(2)
    rows, columns = linear_sum_assignment(apart.numpy())
    right = torch.equal(found.batch.labels[list(rows)], truth.labels[list(columns)])
    return float(apart[rows, columns].max()) if right else float("inf")


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_batches_in_front_of_a_relu_are_read_and_proven(count):
    seen, truths = victims(mlp(), count, 4)
    for found, truth in zip(ExactInversion()(seen, seed=0), truths, strict=True):
        assert found.certainty is Certainty.PROVEN
        assert worst(found, truth) < 1e-3


def test_a_first_layer_that_clients_keep_is_said():
    seen = observe(mlp(), batch(1, 0))
    kept = list(seen.upload.tensors)[:2]
    public = {name: value for name, value in seen.sent.parameters.items() if name not in kept}
    upload = replace(seen.upload, tensors={n: t for n, t in seen.upload.tensors.items() if n not in kept})
    kept_back = replace(seen, sent=replace(seen.sent, parameters=public), upload=upload)
    (found,) = ExactInversion()([kept_back.given(private=seen.sent)], seed=0)
    assert found.batch is None and "was withheld" in found.failure


def test_larger_batches_are_proven_in_front_of_wider_layers():
    truth = batch(20, 0, 16)
    (found,) = ExactInversion()([observe(mlp(widths=(512, 32), image_size=16), truth)], seed=0)
    assert found.certainty is Certainty.PROVEN
    assert worst(found, truth) < 1e-3


@pytest.mark.parametrize(
    "plan",
    [LocalPlan(shares="delta", lr=0.3), LocalPlan(shares="weights", lr=0.1), LocalPlan(loss_scale=3.0)],
    ids=["delta", "weights", "scaled"],
)
def test_what_is_shared_does_not_matter(plan):
    seen, (truth,) = victims(mlp().double(), 4, 1, plan=plan)
    if plan.shares != "gradient":
        seen = [as_update(each, plan) for each in seen]
    (found,) = ExactInversion()(seen, seed=0)
    assert found.certainty is Certainty.PROVEN
    assert worst(found, truth) < 1e-3


def as_update(observation: Observation, plan: LocalPlan) -> Observation:
    """Turn the gradient of ``observation`` into the step that a client makes of it."""
    sent = observation.sent.parameters
    delta = {name: -plan.lr * g for name, g in observation.upload.tensors.items()}
    tensors = {name: d + sent[name] for name, d in delta.items()} if plan.shares == "weights" else delta
    return replace(observation, upload=replace(observation.upload, tensors=tensors))


def test_without_relu_a_batch_is_not_called_proven():
    seen, _ = victims(mlp(activation="sigmoid"), 3, 2)
    assert {found.certainty for found in ExactInversion()(seen, seed=0)} == {Certainty.APPROXIMATE}


def test_one_image_is_proven_behind_any_activation():
    seen, (truth,) = victims(mlp(activation="sigmoid"), 1, 1)
    (found,) = ExactInversion()(seen, seed=0)
    assert found.certainty is Certainty.PROVEN
    assert worst(found, truth) < 1e-4


def test_other_local_work_than_one_step_is_not_called_proven():
    model = mlp()
    plan = LocalPlan(shares="delta", lr=0.5, steps=2, batch_size=2)
    (seen,), _ = victims(model, 4, 1)
    second, _ = victims(model, 4, 2)
    mixed = {name: -plan.lr * (g + second[1].upload.tensors[name]) / 2 for name, g in seen.upload.tensors.items()}
    (found,) = ExactInversion(rounds=3)(
        [replace(seen, plan=plan, upload=Upload(tensors=mixed, num_examples=4))], seed=0
    )
    assert found.certainty is Certainty.APPROXIMATE


def test_the_same_whatever_else_is_attacked():
    seen, _ = victims(mlp(), 5, 3)
    together = ExactInversion()(seen, seed=3)
    for alone, found in zip([ExactInversion()([each], seed=3)[0] for each in seen], together, strict=True):
        assert torch.equal(alone.batch.inputs, found.batch.inputs)
        assert torch.equal(alone.batch.labels, found.batch.labels)


def test_mixed_labels_are_read_as_probabilities():
    model, truth = mlp(), batch(3, 0)
    mixed = torch.nn.functional.one_hot(truth.labels, CLASSES).float() * 0.6 + 0.4 / CLASSES
    (found,) = ExactInversion()([observe(model, Batch(truth.inputs, mixed))], seed=0)
    assert found.certainty is Certainty.PROVEN
    assert found.batch.labels.is_floating_point()
    apart = (found.batch.inputs[:, None] - truth.inputs[None]).abs().flatten(2).amax(2)
    rows, columns = linear_sum_assignment(apart.numpy())
    torch.testing.assert_close(found.batch.labels[list(rows)].float(), mixed[list(columns)], atol=1e-3, rtol=0)


def test_batches_behind_convolutions_are_refused_with_the_reason():
    model = LeNet(in_channels=2, image_size=8, num_classes=CLASSES)
    seen, _ = victims(model, 2, 1)
    (found,) = ExactInversion()(seen, seed=0)
    assert found.batch is None
    assert "fully connected" in found.failure


def test_a_withheld_layer_is_named():
    (seen,), _ = victims(mlp(), 2, 1)
    tensors = {name: t for name, t in seen.upload.tensors.items() if name != "features.0.bias"}
    (found,) = ExactInversion()([replace(seen, upload=replace(seen.upload, tensors=tensors))], seed=0)
    assert found.failure == "features.0.bias is expected, but was withheld; use attack=auto."


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"starts": 0}, {"starts": 2.5}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match="whole number of at least 1"):
        ExactInversion(**wrong)


def test_the_rank_is_the_number_of_different_images():
    (seen,), _ = victims(mlp(), 6, 1)
    weight = seen.upload.tensors["features.0.weight"]
    basis = column_space(weight, 6)
    torch.testing.assert_close(basis @ (basis.T @ weight.double()), weight.double(), atol=1e-7, rtol=0)
    assert column_space(weight, 5) is None
    assert column_space(weight, 7) is None


def noise(share: float):
    def change(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {n: t + share * t.std() * torch.randn(t.shape, generator=rng) for n, t in tensors.items()}

    return change


def pruned(share: float):
    def change(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {n: t * (t.abs() >= t.abs().flatten().quantile(share)) for n, t in tensors.items()}

    return change


def columns_gone(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    """As Soteria leaves the weight of a layer: nothing of some of the features that enter it."""
    weight = tensors["features.0.weight"]
    return {**tensors, "features.0.weight": weight * (torch.rand(weight.shape[1], generator=rng) > 0.2)}


def rows_gone(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    kept = torch.rand(len(tensors["features.0.bias"]), generator=rng) > 0.3
    return {
        **tensors,
        "features.0.weight": tensors["features.0.weight"] * kept[:, None],
        "features.0.bias": tensors["features.0.bias"] * kept,
    }


def rounded(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    return {n: (t / t.abs().max() * 127).round() * t.abs().max() / 127 for n, t in tensors.items()}


def clipped(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    return {n: 0.1 * t for n, t in tensors.items()}


CHANGES = {
    "clean": lambda tensors, rng: tensors,
    "rounding": noise(1e-8),
    "some noise": noise(1e-4),
    "much noise": noise(0.1),
    "slightly pruned": pruned(0.05),
    "pruned": pruned(0.9),
    "columns gone": columns_gone,
    "rows gone": rows_gone,
    "rounded": rounded,
    "clipped": clipped,
}


@pytest.mark.parametrize("gone", [1, 5, 40])
def test_one_layer_whose_columns_are_gone_is_not_called_proven(gone):
    """Its outputs hardly depend on a pixel, and no ReLU speaks against a wrong one."""
    model = mlp(widths=())
    (seen, undefended), _ = victims(model, 1, 2)
    weight = seen.upload.tensors["classifier.weight"].clone()
    weight[:, :gone] = 0
    tensors = {**seen.upload.tensors, "classifier.weight": weight}
    defended, clean = ExactInversion()(
        [replace(seen, upload=replace(seen.upload, tensors=tensors)), undefended], seed=0
    )
    assert defended.certainty is not Certainty.PROVEN
    assert clean.certainty is Certainty.PROVEN


@pytest.mark.long
@pytest.mark.parametrize("victims_drawn", [60, pytest.param(1000, marks=pytest.mark.fuzz)])
def test_proven_is_never_wrong(victims_drawn):
    """Batches of 1 to 6 from networks trained and not, changed in ten ways."""
    networks = {name: [mlp(seed, name, (64, 24)) for seed in range(5)] for name in ("relu", "sigmoid")}
    verdicts: Counter[tuple[str, Certainty]] = Counter()
    seen, truths = [], [batch(1 + number % 6, number) for number in range(victims_drawn)]
    kinds = [list(CHANGES)[number % len(CHANGES)] for number in range(victims_drawn)]
    for number, (truth, kind) in enumerate(zip(truths, kinds, strict=True)):
        model = networks["sigmoid" if number % 7 == 0 else "relu"][number % 5]
        clean = observe(model, truth, id=VictimId(0, 0, number))
        tensors = CHANGES[kind](dict(clean.upload.tensors), torch.Generator().manual_seed(number))
        seen.append(replace(clean, upload=replace(clean.upload, tensors=tensors)))
    for found, truth, kind in zip(ExactInversion(rounds=4, starts=16)(seen, seed=0), truths, kinds, strict=True):
        verdicts[kind, found.certainty] += 1
        if found.certainty is Certainty.PROVEN:
            assert worst(found, truth) < 1e-2, (found.id, kind)
    assert verdicts["clean", Certainty.PROVEN] > 0.06 * victims_drawn
    assert all(verdicts[kind, Certainty.PROVEN] == 0 for kind in ("much noise", "pruned", "columns gone", "rounded"))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", ["module", "smoothed", "function"])
def test_losses_with_weights_of_classes_are_computed_in_double_precision_as_well(count, kind):
    model, truth, weight = mlp(), batch(count, 0), torch.linspace(1, 2, CLASSES)
    if kind == "function":

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(outputs, labels, weight=weight)
    else:
        loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1 * (kind == "smoothed"))
    gradients = torch.autograd.grad(loss(model(truth.inputs), truth.labels), list(model.parameters()))
    seen = Observation.of_gradients(model, gradients, input_shape=(2, 8, 8), batch_size=count, loss=loss)
    (found,) = ExactInversion()([seen], seed=0)
    assert found.failure is None and found.certainty is Certainty.PROVEN
    assert worst(found, truth) < 1e-3


def test_nonnegative_least_squares_are_those_of_scipy_where_columns_are_alike() -> None:
    """Columns that differ little have slopes that are small long before the solution is reached."""
    rng = torch.Generator().manual_seed(0)
    base = torch.rand(20, 12, generator=rng).double()
    known = torch.cat([base, base[:, :6] + 1e-4 * torch.rand(20, 6, generator=rng).double()], 1)
    sums = known @ torch.rand(18, generator=rng).double()
    left = (known @ nonnegative_least_squares(known, sums) - sums).norm()
    assert left <= nnls(known.numpy(), sums.numpy())[1] + 1e-8 * sums.norm()
