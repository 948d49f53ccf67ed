from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fl_privacy.defenses import _soteria as features, compose, dp_sgd, soteria
from fl_privacy.defenses._soteria import feature_mask, feature_scores, find_head, published_mask, representation
from fl_privacy.errors import UserError
from fl_privacy.types import Batch

from ..harness import clean_gradient, local_step, run, small_model


class Headed(nn.Module):
    """A head that was made first, is called before a side branch, and follows a batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(48, 5)
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 5, stride=4), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 48), nn.GELU()
        )
        self.side = nn.Linear(5, 5)

    def forward(self, inputs):
        logits = self.out(self.body(inputs))
        self.seen = self.side(logits).detach().sum()
        return logits


def looped_scores(step, head):
    """One backward pass for each feature, example by example: the definition."""
    total = 0
    for image in step.batch.inputs:
        x = image.unsqueeze(0).requires_grad_()
        r = representation(step.model, step.sent, x, head)[0]
        norms = torch.stack([torch.autograd.grad(r[i], x, retain_graph=True)[0].norm() for i in range(len(r))])
        total = total + norms / (r.abs() + 1e-10)
    return total.detach()


@pytest.mark.parametrize("model, head", [(small_model, "5"), (Headed, "out")])
@pytest.mark.parametrize("kept_bytes", [1, 200_000, 1 << 25])
def test_exact_scores_are_those_of_a_loop_of_backward_passes(monkeypatch, model, head, kept_bytes):
    monkeypatch.setattr(features, "_KEPT_BYTES", kept_bytes)
    step = local_step(model(), examples=3)
    assert find_head(step.model, step.sent, step.batch.inputs) == head
    torch.testing.assert_close(feature_scores(step, head), looped_scores(step, head), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model, head", [(small_model, "5"), (Headed, "out")])
def test_estimated_scores_come_close(model, head):
    step = local_step(model(), examples=2)
    exact = feature_scores(step, head)
    near, far = (feature_scores(step, head, directions=n) for n in (4096, 64))
    live = exact > 0
    assert ((near - exact).abs() / exact)[live].max() < 0.1
    assert (near - exact)[live].norm() < 0.5 * (far - exact)[live].norm()
    same = feature_mask(exact, 0.75) == feature_mask(near, 0.75)
    assert same.double().mean() > 0.95


def test_lowest_scores_are_withheld_in_every_row_of_the_head_alone():
    step = local_step(Headed())
    clean = clean_gradient(step)
    defended = run(soteria(rate=0.5), clean, step)
    withheld = looped_scores(step, "out").topk(24, largest=False).indices
    assert (defended["out.weight"][:, withheld] == 0).all()
    kept = torch.ones(48, dtype=torch.bool).index_fill_(0, withheld, False)
    assert torch.equal(defended["out.weight"][:, kept], clean["out.weight"][:, kept])
    assert all(torch.equal(t, clean[n]) for n, t in defended.items() if n != "out.weight")


def test_scores_leave_running_statistics_and_look_at_each_example_alone():
    step = local_step(Headed())
    before = {name: b.clone() for name, b in step.sent.buffers.items()}
    scores = feature_scores(step, "out")
    assert all(torch.equal(b, before[name]) for name, b in step.sent.buffers.items())
    single = [Batch(step.batch.inputs[i : i + 1], step.batch.labels[i : i + 1]) for i in range(len(step.batch))]
    apart = sum(feature_scores(replace(step, batch=batch), "out") for batch in single)
    torch.testing.assert_close(scores, apart, rtol=1e-4, atol=1e-6)


def test_reads_the_noised_gradient_when_composed():
    step = local_step()
    defended = run(compose(dp_sgd(noise_multiplier=5.0), soteria(rate=0.5)), clean_gradient(step), step)
    assert (defended["5.weight"] == 0).all(0).sum() == 72
    assert not torch.allclose(defended["5.bias"], clean_gradient(step)["5.bias"], atol=0.1)


def test_models_without_a_vector_before_a_linear_layer_are_refused():
    convolution = nn.Sequential(nn.Conv2d(3, 5, 16), nn.Flatten())
    with pytest.raises(UserError, match="Linear"):
        run(soteria(), {}, local_step(convolution))
    tokens = nn.Sequential(nn.Linear(16, 5), nn.Flatten(2))
    with pytest.raises(UserError, match="one vector"):
        run(soteria(), {"0.weight": torch.ones(5, 16)}, local_step(tokens))
    with pytest.raises(UserError, match="withheld"):
        run(soteria(), {}, local_step())


@pytest.mark.parametrize("options", [{"rate": 1}, {"scores": "x"}, {"directions": 0}, {"epsilon": 0}, {"form": "x"}])
def test_bad_options_are_one_line(options):
    with pytest.raises(UserError, match="expected") as error:
        soteria(**options)
    assert "\n" not in str(error.value)


def test_mask_drops_exactly_the_share():
    assert feature_mask(torch.zeros(10), 0.3).sum() == 7


def as_the_scripts_do(step, head, percent):
    """Compute the mask by the authors' loop, feature by feature, and NumPy's percentile."""
    x = step.batch.inputs.clone().requires_grad_()
    r = representation(step.model, step.sent, x, head)
    scores = np.zeros(r.shape[1])
    for i in range(r.shape[1]):
        (slope,) = torch.autograd.grad(r[:, i].sum(), x, retain_graph=True)
        scores[i] = (slope.flatten(1).norm(dim=1) / (r[:, i].detach() + 0.1)).sum()
    return np.abs(scores) >= np.percentile(scores, percent)


def bounded():
    """Features in (0, 1), which an epsilon of 0.1 is not little for."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 40), nn.Sigmoid(), nn.Linear(40, 5))
    nn.init.uniform_(net[1].weight, -0.3, 0.3)
    return net


@pytest.mark.parametrize("model, head", [(bounded, "3"), (Headed, "out")])
@pytest.mark.parametrize("rate", [0.01, 0.5, 0.8])
def test_the_codes_form_withholds_what_the_published_scripts_do(model, head, rate):
    step = local_step(model(), examples=3)
    clean = clean_gradient(step)
    kept = run(soteria(rate=rate, form="code"), clean, step)[f"{head}.weight"]
    expected = torch.from_numpy(as_the_scripts_do(step, head, 100 * rate))
    assert torch.equal(kept, clean[f"{head}.weight"] * expected)


def test_the_forms_differ_where_features_are_bounded():
    step = local_step(bounded())
    paper = feature_mask(feature_scores(step, "3"), 0.5)
    code = published_mask(feature_scores(step, "3", epsilon=0.1, form="code"), 0.5)
    assert 0 < (paper != code).sum() < 20
    assert soteria().parts[0].settings["epsilon"] == 1e-10
    assert soteria(form="code").parts[0].settings["epsilon"] == 0.1


def test_negative_features_are_judged_by_the_magnitude_of_their_score():
    assert published_mask(torch.tensor([-9.0, -1, 2, 3]), 0.5).tolist() == [True, True, True, True]
    assert published_mask(torch.tensor([1.0, 2, 3, 4]), 0.5).tolist() == [False, False, True, True]
