import math
from dataclasses import replace

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from scipy import stats
from torch import nn

from fl_privacy.defenses import dp_sgd
from fl_privacy.errors import UserError
from fl_privacy.federation import training as plain_pass
from fl_privacy.federation.training import local_update
from fl_privacy.models.gradients import clipped_sum, per_example as examples
from fl_privacy.types import Batch, LocalPlan, ModelState

from ..harness import clean_gradient, flat, local_step, run, small_model

CLIP = 0.4


def clipped(step, clip_norm):
    return clipped_sum(step.model, step.sent, step.batch, clip_norm, plan=step.plan, changes=step.changes)[0]


def opacus_gradient(step, clip_norm):
    wrapped = GradSampleModule(small_model(), loss_reduction="mean")
    wrapped.load_state_dict({f"_module.{n}": p for n, p in step.sent.parameters.items()})
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        expected_batch_size=len(step.batch),
    )
    nn.functional.cross_entropy(wrapped(step.batch.inputs), step.batch.labels).backward()
    optimizer.pre_step()
    return torch.cat([p.grad.flatten() for p in wrapped.parameters()])


@pytest.mark.parametrize("chunk_elements", [1, 7000, 1 << 26])
@pytest.mark.parametrize("clip_norm", [0.4, 5.29])
def test_clipped_gradients_are_those_of_opacus(monkeypatch, chunk_elements, clip_norm):
    monkeypatch.setattr(examples, "_CHUNK_ELEMENTS", chunk_elements)
    step = local_step(examples=9)
    clean = clean_gradient(step)
    ours = flat(run(dp_sgd(clip_norm=clip_norm, noise_multiplier=0), clean, step))
    assert not torch.allclose(ours, flat(clean)), "some examples are clipped"
    torch.testing.assert_close(ours, opacus_gradient(step, clip_norm), rtol=1e-4, atol=1e-6)


def test_noise_on_the_mean_is_that_of_abadi():
    step = local_step(examples=4)
    total = flat(clipped(step, CLIP)) / 4
    defended = flat(run(dp_sgd(clip_norm=CLIP, noise_multiplier=2.0), clean_gradient(step), step))
    assert stats.kstest((defended - total).numpy(), stats.norm(scale=2.0 * CLIP / 4).cdf).pvalue > 0.01


def test_no_example_moves_the_sum_by_more_than_the_clip_norm():
    step = local_step(examples=5)
    without = replace(step, batch=Batch(step.batch.inputs[1:], step.batch.labels[1:]))
    change = flat(clipped(step, CLIP)) - flat(clipped(without, CLIP))
    assert change.norm() <= CLIP * (1 + 1e-5)


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 5))


@pytest.mark.parametrize("make", [small_model, wide, lambda: nn.Sequential(nn.Dropout(1e-9), small_model())])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_an_example_without_a_finite_gradient_costs_only_itself(make, value):
    """Layer by layer, by inner products of wide layers, and by ``vmap``."""
    torch.manual_seed(0)
    model, plan = make(), LocalPlan()
    inputs, labels = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    inputs[1, 0, 2:4] = value
    state, rest = ModelState.of(model), torch.tensor([0, 2, 3])
    total, _ = clipped_sum(model, state, Batch(inputs, labels), CLIP, plan=plan)
    others, _ = clipped_sum(model, state, Batch(inputs[rest], labels[rest]), CLIP, plan=plan)
    moved = flat(total) - flat(others)
    assert moved.norm() <= (1e-5 if not math.isfinite(value) else CLIP * (1 + 1e-5))


class Canceling(nn.Module):
    """Its two positions are subtracted from each other, a hundred million times enlarged."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        first, second = self.shared(x.flatten(2).movedim(1, 2)).unbind(1)
        return 1e8 * (first - second)


def test_positions_that_cancel_each_other_do_not_pass_for_a_short_gradient():
    """Rounding errors of an inner product would, of which half are below zero."""
    torch.manual_seed(0)
    model, plan = Canceling(), LocalPlan()
    images = torch.rand(40, 64, 1, 1).expand(40, 64, 2, 1).clone()
    images[..., 1, :] *= 1 + 1e-5 * torch.rand(40, 1, 1)
    for image in images:
        total, _ = clipped_sum(model, ModelState.of(model), Batch(image[None], torch.tensor([0])), 1.0, plan=plan)
        assert flat(total).norm() <= 1.01


def test_loss_scale_and_soft_labels_hold():
    step = local_step()
    soft = torch.softmax(torch.arange(20.0).view(4, 5), dim=1)
    step = replace(step, batch=Batch(step.batch.inputs, soft), plan=LocalPlan(loss_scale=3.0))
    expected = 3 * flat(clean_gradient(step))
    torch.testing.assert_close(flat(clipped(step, 1e6)) / 4, expected, rtol=1e-4, atol=1e-6)


def test_batch_norm_is_refused_in_training_mode_and_right_in_evaluation_mode():
    model = small_model()
    model.insert(1, nn.BatchNorm2d(12))
    step = local_step(model)
    with pytest.raises(UserError, match="batch_norm=eval"):
        clipped(step, CLIP)
    step = replace(step, plan=LocalPlan(batch_norm="eval"))
    total = flat(clipped(step, 1e6)) / 4
    torch.testing.assert_close(total, flat(clean_gradient(step)), rtol=1e-4, atol=1e-6)


def test_held_parameters_have_no_part_in_the_clipping():
    step = local_step(examples=5)
    head = frozenset({"5.weight", "5.bias"})
    held = frozenset(step.sent.parameters) - head
    clean = {name: g for name, g in clean_gradient(step).items() if name in head}
    defense = dp_sgd(clip_norm=0.3, noise_multiplier=0)
    found = run(defense, clean, replace(step, held=held))
    assert set(found) == head
    expected = torch.zeros(725)
    for image, label in zip(step.batch.inputs, step.batch.labels, strict=True):
        one = clean_gradient(replace(step, batch=Batch(image[None], label[None])))
        gradient = flat({name: one[name] for name in found})
        expected += gradient * min(1.0, 0.3 / float(gradient.norm()))
    torch.testing.assert_close(flat(found) * 5, expected, rtol=1e-4, atol=1e-6)


def test_a_step_is_one_pass_with_its_loss(monkeypatch):
    """The gradient of the mean loss, which the defense does not look at, is not computed."""
    step = local_step(examples=6)
    mean = torch.nn.functional.cross_entropy(step.model(step.batch.inputs), step.batch.labels)
    monkeypatch.setattr("fl_privacy.defenses.defense.loss_gradients", None)
    result = local_update(
        step.model,
        step.sent,
        [step.batch],
        num_examples=6,
        plan=LocalPlan(),
        defense=dp_sgd(),
        state=step.state,
        rng=step.rng,
        private_rng=step.rng,
    )
    assert math.isnan(result.train_loss)  # an exact loss stays with the client
    assert float(step.losses[-1] if step.losses else mean.detach()) == pytest.approx(float(mean.detach()), rel=1e-5)
    assert set(result.upload.tensors) == set(step.sent.parameters)


def test_nobody_looks_at_gradients_that_are_not_clipped():
    step = local_step()
    with pytest.raises(UserError, match="gradient hook behind it"):
        plain_pass.StepGradients(step, dp_sgd())["5.weight"]


def test_a_network_that_is_frozen_as_a_whole_is_one_line():
    step = local_step()
    with pytest.raises(UserError, match="all are frozen"):
        run(dp_sgd(), {}, replace(step, held=frozenset(step.sent.parameters)))
