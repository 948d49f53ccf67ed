"""One image behind a residual network is solved for block by block, and what is no such update is not taken for one."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_privacy.attacks import AutoAttack
from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.attacks.exact.attack import BLOCKS
from fl_privacy.attacks.exact.certificate import _labels as labels_of_errors
from fl_privacy.attacks.exact.convolution import (
    Convolution,
    Equations,
    Slopes,
    can_be_blind,
    gated_inputs,
    inputs_up_to_a_factor,
)
from fl_privacy.attacks.exact.residual import complete_head, find_residual, known_between
from fl_privacy.attacks.gradient_inversion.evident_defense import undo_evident_defenses
from fl_privacy.attacks.gradient_inversion.targets import as_gradient, stack
from fl_privacy.defenses import percentile
from fl_privacy.effects import Part, Truncated
from fl_privacy.measure.images import psnr
from fl_privacy.models import ResNet20
from fl_privacy.types import Batch, LocalPlan, Observation
from tests.attacks.victims import observe

EVAL = LocalPlan(batch_norm="eval")


def blocks(*, seed: int = 0, **settings: object) -> nn.Module:
    """Build a residual network whose batch norms have statistics that are not 0 and 1."""
    torch.manual_seed(seed)
    model = ResNet20(in_channels=3, image_size=16, num_classes=5, width=16, **settings)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return model.eval()


def picture(seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    small = torch.rand(1, 3, 5, 5, generator=rng)
    return Batch(
        F.interpolate(small, size=16, mode="bicubic", align_corners=True).clamp(0, 1), torch.tensor([seed % 5])
    )


def product(slopes, inputs, module):
    return torch.nn.grad.conv2d_weight(inputs[None], module.weight.shape, slopes[None], padding=module.padding)


@pytest.mark.parametrize(("size", "padding"), [(3, 1), (5, 2)])
def test_both_factors_of_a_weights_gradient_are_found_up_to_one_number(size, padding):
    rng = torch.Generator().manual_seed(0)
    module = nn.Conv2d(20, 18, size, padding=padding, bias=False).double()
    inputs = torch.rand(20, 4, 4, generator=rng, dtype=torch.float64).sub(0.6).relu()
    slopes = torch.randn(18, 4, 4, generator=rng, dtype=torch.float64)
    slopes *= torch.rand(18, 4, 4, generator=rng, dtype=torch.float64) > 0.5
    layer = Convolution(module, (20, 4, 4))
    assert can_be_blind(layer)
    found = inputs_up_to_a_factor(layer, product(slopes, inputs, module))
    assert found is not None and found.unique
    assert F.cosine_similarity(found.values.flatten(), inputs.flatten(), dim=0).abs() > 1 - 1e-9


@pytest.mark.parametrize(("count", "channels"), [(1, 8), (2, 20), (4, 30)])
def test_inputs_of_several_images_are_separated_by_their_zeros(count, channels):
    rng = torch.Generator().manual_seed(1)
    module = nn.Conv2d(channels, channels, 3, padding=1, bias=False).double()
    inputs = torch.randn(count, channels, 4, 4, generator=rng, dtype=torch.float64).relu()
    slopes = torch.randn(inputs.shape, generator=rng, dtype=torch.float64)
    gradient = torch.nn.grad.conv2d_weight(inputs, module.weight.shape, slopes, padding=1)
    layer = Convolution(module, (channels, 4, 4))
    assert can_be_blind(layer, count) and not can_be_blind(layer, 10)
    found = inputs_up_to_a_factor(layer, gradient, count)
    assert found is not None and found.unique
    for values, own in ((found.values, inputs), (found.slopes, slopes)):
        alike = F.normalize(values.flatten(1), dim=1) @ F.normalize(own.flatten(1), dim=1).T
        assert alike.abs().amax(1).min() > 1 - 1e-9 and alike.abs().argmax(1).unique().numel() == count


def test_sums_of_images_without_zeros_are_not_separated():
    rng = torch.Generator().manual_seed(1)
    module = nn.Conv2d(20, 20, 3, padding=1, bias=False).double()
    inputs, slopes = (torch.rand(2, 20, 4, 4, generator=rng, dtype=torch.float64) + 0.1 for _ in range(2))
    gradient = torch.nn.grad.conv2d_weight(inputs, module.weight.shape, slopes, padding=1)
    assert inputs_up_to_a_factor(Convolution(module, (20, 4, 4)), gradient, 2) is None


def test_what_is_no_such_product_is_not_taken_for_one():
    module = nn.Conv2d(20, 18, 3, padding=1, bias=False).double()
    layer = Convolution(module, (20, 4, 4))
    noise = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = inputs_up_to_a_factor(layer, noise)
    assert found is None or not found.unique
    assert inputs_up_to_a_factor(layer, torch.zeros_like(noise)) is None
    assert not can_be_blind(Convolution(module, (20, 8, 8)))  # more places than channels


def test_outputs_on_the_wrong_side_of_a_relu_are_turned_back():
    rng = torch.Generator().manual_seed(0)
    module = nn.Conv2d(6, 8, 3, padding=1, bias=False).double()
    inputs = torch.rand(2, 6, 5, 5, generator=rng, dtype=torch.float64)
    full = torch.randn(2, 8, 5, 5, generator=rng, dtype=torch.float64)
    gates = torch.rand(2, 8, 5, 5, generator=rng) > 0.5
    pairs = zip(full * gates, inputs, strict=True)
    gradient = torch.stack([product(slopes, own, module) for slopes, own in pairs])
    wrong = gates.clone()
    wrong[0, 3, 2, 2] ^= True
    wrong[1, 1, 0, 4] ^= True
    wrong[1, 5, 3, 1] ^= True
    found, left = gated_inputs([Equations(Convolution(module, (6, 5, 5)), Slopes(full, wrong), gradient)])
    assert torch.equal(wrong, gates)
    assert left.max() < 1e-9
    torch.testing.assert_close(found, inputs, atol=1e-7, rtol=0)


def test_features_in_front_of_blocks_are_those_of_the_image():
    model, truths = blocks(), [picture(seed) for seed in range(2)]
    seen = [observe(model, truth, plan=EVAL) for truth in truths]
    network = find_residual(seen[0])
    assert network is not None
    gradients = stack([as_gradient(one) for one in seen], list(network.names), network.device, torch.float64)
    known = known_between(network, gradients)
    assert known.found.all() and known.left.max() < 1e-4
    images = torch.cat([truth.inputs for truth in truths]).double()
    for node, values in known.values.items():
        true = network.graph.run({network.graph.image: images}, node)
        assert (values - true).norm() < 1e-4 * true.norm(), node
    assert len(known.values) >= 8


def test_inputs_of_one_place_are_a_direction_of_the_gradient():
    rng, module = torch.Generator().manual_seed(0), nn.Conv2d(6, 9, 3, padding=1, bias=False).double()
    slopes, inputs = (torch.rand(n, 1, 1, generator=rng, dtype=torch.float64) for n in (9, 6))
    layer, gradient = Convolution(module, (6, 1, 1)), product(slopes, inputs, module)
    found = inputs_up_to_a_factor(layer, gradient)
    assert found.unique
    torch.testing.assert_close(found.values[0].abs(), inputs / inputs.mean())
    gradient[:, :, 1, 1] += torch.rand(9, 6, generator=rng) / 100
    assert not inputs_up_to_a_factor(layer, gradient).unique
    single = nn.Conv2d(1, 9, 3, padding=1, bias=False).double()
    found = inputs_up_to_a_factor(Convolution(single, (1, 1, 1)), product(slopes, inputs[:1], single))
    assert found.unique and float(found.values.abs()) == pytest.approx(1)


def with_head() -> tuple[Observation, str, tuple[str, str]]:
    seen = observe(blocks(), picture(), plan=EVAL)
    head = str(find_residual(seen).head.target)
    return seen, head, (f"{head}.weight", f"{head}.bias")


def test_a_head_is_completed_if_some_slopes_are_zeroed_and_one_tensor_is_not_cut():
    seen, head, names = with_head()
    whole = seen.upload.tensors
    sizes, gamma = whole[names[1]].abs(), float(whole[names[1]].abs().median())
    filtered = {n: t.clamp(-gamma, gamma) for n, t in whole.items()}
    filtered[names[1]] = filtered[names[1]].where(sizes > sizes.min(), 0.0)
    untouched = next(name for name in whole if name not in names)
    filtered[untouched] = whole[untouched].clone().index_fill_(0, torch.tensor([0]), 9 * gamma)
    cut = replace(seen, upload=replace(seen.upload, tensors=filtered))
    found = complete_head(cut.given(defense=(Part("cut", effect=Truncated(bound=gamma)),)), head).upload.tensors
    for name in names:
        assert (found[name] - whole[name]).norm() < 1e-4 * whole[name].norm()


def test_a_head_without_a_slope_or_behind_weight_decay_is_left_as_it_is():
    seen, head, _ = with_head()
    known = seen.given(defense=(Part("cut", effect=Truncated(bound=1e-6)),))
    assert complete_head(known, head) is known
    decayed = replace(
        seen.given(defense=(Part("cut", effect=Truncated(bound=0.3)),)), plan=replace(EVAL, weight_decay=0.1)
    )
    assert complete_head(decayed, head) is decayed


def test_a_head_that_a_filter_cut_is_completed():
    """NVFlare's PercentilePrivacy zeroes the smallest values and cuts the largest: those between suffice."""
    seen, head, names = with_head()
    gamma = float(seen.upload.tensors[names[1]].abs().sort().values[2])
    whole, filtered = seen.upload.tensors, percentile(percentile=10, gamma=gamma).apply(dict(seen.upload.tensors))
    cut = replace(seen, upload=replace(seen.upload, tensors=filtered))
    assert complete_head(cut, head) is cut, "no defense is known"
    (cut,) = undo_evident_defenses([cut])
    found = complete_head(cut, head).upload.tensors
    for name in names:
        assert (filtered[name] - whole[name]).norm() > 0.1 * whole[name].norm()
        assert (found[name] - whole[name]).norm() < 1e-4 * whole[name].norm()


@pytest.mark.long
def test_the_image_is_reconstructed_and_no_descent_on_the_update_is_needed():
    truth = picture()
    (found,) = AutoAttack(evaluations=400)([observe(blocks(), truth, plan=EVAL)], seed=0)
    assert found.member == BLOCKS
    assert torch.equal(found.batch.labels, truth.labels)
    assert float(psnr(found.batch.inputs, truth.inputs)) > 18
    assert float(psnr(found.batch.inputs, picture(1).inputs)) < 12  # another's, as a control


def test_labels_are_classes_also_where_a_softmax_in_single_precision_is_one():
    probabilities = torch.tensor([[1 - 4e-9, 3e-9, 1e-9]], dtype=torch.float64)
    errors = torch.tensor([[0, 3e-9, 1e-9]], dtype=torch.float64)  # p - y in single precision
    assert torch.equal(labels_of_errors((probabilities, errors)), torch.tensor([0]))


def test_an_update_of_noise_is_refused_in_a_line():
    seen = observe(blocks(), picture(), plan=EVAL)
    rng = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(value.shape, generator=rng) for name, value in seen.upload.tensors.items()}
    (found,) = ExactInversion()([replace(seen, upload=replace(seen.upload, tensors=noise))], seed=0)
    assert found.batch is None and "those of the layers disagree" in found.failure


@pytest.mark.parametrize("settings", [{"norm": "none"}, {"norm": "group"}, {"activation": "sigmoid"}])
def test_of_other_networks_nothing_wrong_is_said(settings):
    seen = observe(blocks(**settings), picture(), plan=EVAL)
    (found,) = ExactInversion(evaluations=40)([seen], seed=0)
    assert found.failure is not None or found.member == BLOCKS


def test_more_images_than_the_rank_allows_are_left_to_other_members():
    some = [picture(seed) for seed in range(11)]
    batch = Batch(torch.cat([one.inputs for one in some]), torch.cat([one.labels for one in some]))
    assert find_residual(observe(blocks(), batch, plan=EVAL)) is None
