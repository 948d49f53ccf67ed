"""A fully connected first layer gives its input away."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.attacks import AnalyticInversion
from fl_privacy.attacks.exact import first_layer
from fl_privacy.attacks.exact.first_layer import distinct_ratios
from fl_privacy.errors import UserError
from fl_privacy.models import MLP, LeNet
from fl_privacy.types import Batch, LocalPlan, VictimId
from tests.attacks.victims import CLASSES, SHAPE, error, examples, observations, observe


def mlp(activation: str = "relu", widths: tuple[int, ...] = (96, 32), **options) -> nn.Module:
    torch.manual_seed(0)
    return MLP(in_channels=2, image_size=8, num_classes=CLASSES, widths=widths, activation=activation, **options)


def single(model: nn.Module, count: int, **options):
    """Victims of one image in float32, and the truth."""
    truth = examples(count)
    batch = Batch(truth.inputs.float(), truth.labels)
    seen = [
        observe(model, Batch(batch.inputs[k : k + 1], batch.labels[k : k + 1]), id=VictimId(0, 0, k), **options)
        for k in range(count)
    ]
    return seen, batch


NETWORKS = {
    "relu": mlp(),
    "sigmoid": mlp("sigmoid"),
    "normalized": mlp("tanh", mean=[0.5, 0.3], std=[0.25, 0.2]),
    "one layer": mlp(widths=()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_one_image_is_recovered_exactly(name):
    seen, truth = single(NETWORKS[name], 3)
    for k, found in enumerate(AnalyticInversion()(seen, seed=0)):
        assert found.batch is not None
        torch.testing.assert_close(found.batch.inputs[0], truth.inputs[k], rtol=0, atol=1e-5)
        assert found.batch.labels.tolist() == truth.labels[k : k + 1].tolist()
        assert found.loss < 1e-5


@pytest.mark.parametrize(
    "plan", [LocalPlan(shares="delta", lr=0.3), LocalPlan(loss_scale=4.0)], ids=["delta", "scaled"]
)
def test_what_is_shared_does_not_matter(plan):
    model = mlp()
    seen, truth = single(model, 1, plan=plan)
    if plan.shares == "delta":
        tensors = {name: -plan.lr * g for name, g in seen[0].upload.tensors.items()}
        seen = [replace(seen[0], upload=replace(seen[0].upload, tensors=tensors))]
    found = AnalyticInversion()(seen, seed=0)[0].batch
    torch.testing.assert_close(found.inputs, truth.inputs, rtol=0, atol=1e-5)


def test_a_batch_is_recovered_where_neurons_are_active_for_one_image():
    model = mlp(widths=(512,))
    with torch.no_grad():
        model.get_parameter("features.0.bias").fill_(-2.5)
        model.get_parameter("features.0.weight").mul_(8)
    truth = examples(3)
    batch = Batch(truth.inputs.float(), truth.labels)
    found = AnalyticInversion()([observe(model, batch)], seed=0)[0].batch
    assert found is not None
    nearest = torch.cdist(batch.inputs.flatten(1), found.inputs.flatten(1)).amin(1)
    assert (nearest < 1e-3).all()


def test_noise_spoils_it_gradually():
    seen, truth = single(mlp(), 1)
    errors = []
    for std in (1e-4, 1e-2, 1.0):
        rng = torch.Generator().manual_seed(0)
        noisy = {n: g + std * torch.randn(g.shape, generator=rng) for n, g in seen[0].upload.tensors.items()}
        observed = replace(seen[0], upload=replace(seen[0].upload, tensors=noisy))
        errors.append(error(AnalyticInversion()([observed], seed=0)[0].batch, truth))
    assert errors[0] < 0.3 * errors[1] < 0.3 * errors[2]


def test_networks_without_such_a_layer_are_named():
    torch.manual_seed(0)
    convolutional = LeNet(in_channels=2, image_size=8, num_classes=CLASSES).double()
    no_bias = nn.Sequential(nn.Flatten(), nn.Linear(128, CLASSES, bias=False)).double()
    mixing = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Flatten(), nn.Linear(128, CLASSES)).double()
    pooled = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)).double()
    expected = {"Conv2d": convolutional, "without bias": no_bias, "mixed before": mixing, "takes \\(3, 32\\)": pooled}
    for words, model in expected.items():
        (found,) = AnalyticInversion()(observations(model, 1), seed=0)
        assert found.batch is None and re.search(words, found.failure)


def test_victims_fail_alone_and_progress_is_told():
    seen, _ = single(mlp(), 3)
    bias = {name: t for name, t in seen[1].upload.tensors.items() if name != "features.0.bias"}
    broken = [seen[0], replace(seen[1], upload=replace(seen[1].upload, tensors=bias)), seen[2]]
    told = []
    found = AnalyticInversion()(broken, seed=0, progress=lambda done, total: told.append((done, total)))
    assert [r.id.probe for r in found] == [0, 1, 2] and told[-1] == (3000, 3000)
    assert found[1].failure == "features.0.bias is expected, but was withheld; use attack=auto."
    assert found[0].batch is not None and found[0].batch.inputs.shape == (1, *SHAPE)


def test_labels_that_are_known_are_taken():
    seen, truth = single(mlp(), 1, told=True)
    found = AnalyticInversion()(seen, seed=0)[0]
    assert found.label_source == "known" and found.batch.labels.tolist() == truth.labels.tolist()


def test_steps_of_adam_are_refused():
    plan = LocalPlan(shares="delta", optimizer="adam", lr=0.01)
    (found,) = AnalyticInversion()(single(mlp(), 1, plan=plan)[0], seed=0)
    assert found.batch is None and "of Adam" in found.failure


@pytest.mark.parametrize("images", [1, 2])
def test_a_layer_without_gradient_is_named_and_others_go_on(images):
    truth = examples(2 * images)
    parts = [slice(k * images, (k + 1) * images) for k in range(2)]
    model = mlp()
    seen = [
        observe(model, Batch(truth.inputs[p].float(), truth.labels[p]), id=VictimId(0, 0, k))
        for k, p in enumerate(parts)
    ]
    silent = {n: t * (not n.startswith("features.0")) for n, t in seen[0].upload.tensors.items()}
    found = AnalyticInversion()([replace(seen[0], upload=replace(seen[0].upload, tensors=silent)), seen[1]], seed=0)
    assert found[0].failure == "features.0.bias is expected, but its gradient is zero; check the upload."
    assert found[1].batch is not None and found[1].batch.inputs.isfinite().all()


def test_rows_without_gradient_are_never_taken():
    """One row that counts for two images: it is taken twice, rather than a row of nothing."""
    x = torch.rand(5, generator=torch.Generator().manual_seed(0))
    biases = torch.tensor([[0.0, 2.0, 0.0]])
    found = distinct_ratios(biases[..., None] * x, biases, count=2, smallest=1e-4, alike=1e-2)
    torch.testing.assert_close(found[0], torch.stack([x, x]).double())


def test_many_victims_are_solved_in_parts(monkeypatch):
    seen, truth = single(mlp(), 3)
    weight = seen[0].upload.tensors["features.0.weight"].numel()
    monkeypatch.setattr(first_layer, "_CHUNK_ELEMENTS", 2 * weight)
    told = []
    found = AnalyticInversion()(seen, seed=0, progress=lambda done, total: told.append(round(3 * done / total)))
    assert told == [2, 3, 3] and [r.id.probe for r in found] == [0, 1, 2]
    torch.testing.assert_close(torch.cat([r.batch.inputs for r in found]), truth.inputs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"smallest": 1.0}, {"alike": 0.0}])
def test_wrong_settings_are_named(options):
    with pytest.raises(UserError, match=next(iter(options))):
        AnalyticInversion(**options)
