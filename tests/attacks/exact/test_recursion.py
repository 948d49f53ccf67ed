"""One image behind convolutions is solved for layer by layer, and what equations do not give is not taken for it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks import AutoAttack
from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.attacks.exact.convolution import Convolution, conjugate_gradients, solve_inputs
from fl_privacy.attacks.exact.r_gap import ACTIVATIONS, find_chain
from fl_privacy.attacks.gradient_inversion.grouping import Groups
from fl_privacy.effects import Gaussian, Part, Quantized, Truncated
from fl_privacy.models import LeNet
from fl_privacy.progress import no_progress
from fl_privacy.types import Batch, Certainty, LocalPlan, Observation
from tests.attacks.victims import CLASSES, error, examples, observations, observe

EXACT = ExactInversion()


def convolutions(activation: Callable[[], nn.Module], *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 12, 5, padding=2), activation(), nn.Conv2d(12, 12, 5, 2, padding=2), activation(), nn.Flatten(),
        nn.Linear(192, 32), activation(), nn.Linear(32, CLASSES),
    )  # fmt: skip


@pytest.mark.parametrize(
    "activation", [nn.Sigmoid, nn.Tanh, nn.ELU, nn.Softplus, nn.LeakyReLU, lambda: nn.LeakyReLU(0.2), nn.Identity]
)
def test_one_image_behind_convolutions_is_solved_for(activation):
    truth = examples(1)
    (found,) = EXACT([observe(convolutions(activation).double(), truth)], seed=0)
    assert found.certainty is Certainty.CONSISTENT
    assert error(found.batch, truth) < 1e-10
    assert torch.equal(found.batch.labels, truth.labels)


@pytest.mark.parametrize("strides", [None, (1, 2, 1), (3, 1, 1)])
def test_in_single_precision_it_is_read_beyond_what_eyes_see(strides):
    torch.manual_seed(0)
    scaled = {"mean": [0.5], "std": [0.25], "init": "uniform_0.5"}
    model = LeNet(in_channels=2, image_size=12, num_classes=CLASSES, strides=strides, **scaled)
    truth = examples(1, shape=(2, 12, 12))
    (found,) = EXACT([observe(model, replace(truth, inputs=truth.inputs.float()))], seed=0)
    assert found.certainty is Certainty.CONSISTENT and error(found.batch, truth) < 1e-6


def test_a_scaled_gradient_and_a_step_of_sgd_are_read_too():
    truth, model = examples(1), convolutions(nn.Tanh).double()
    plan = LocalPlan(shares="delta", lr=0.3)
    seen = observe(model, truth, plan=plan)
    delta = {name: -0.1 * 0.3 * gradient for name, gradient in seen.upload.tensors.items()}
    (found,) = EXACT([replace(seen, upload=replace(seen.upload, tensors=delta))], seed=0)
    assert error(found.batch, truth) < 1e-10


def test_several_victims_are_read_as_each_alone():
    seen = observations(convolutions(nn.Tanh).double(), 3)
    together = EXACT(seen, seed=0)
    for one, own in zip(seen, together, strict=True):
        (alone,) = EXACT([one], seed=0)
        torch.testing.assert_close(alone.batch.inputs, own.batch.inputs, atol=1e-6, rtol=0)


def test_equations_are_solved_once_for_all_who_know_as_much_but_for_the_defense(monkeypatch):
    solved = []
    monkeypatch.setattr(ExactInversion, "_solve", lambda self, group, seed, report: solved.append(group) or {})
    (seen,) = observations(convolutions(nn.Tanh).double(), 1)

    def solves_for(*effects, seed=0, **changes):
        known = replace(seen, **changes).given(defense=tuple(Part("part", effect=effect) for effect in effects) or None)
        (group,) = Groups([known], progress=no_progress, rounds="apart")
        EXACT.solve(group, seed, lambda share: None)
        return len(solved)

    assert solves_for() == solves_for(Quantized(bits=8)) == solves_for(Gaussian(std=0.1, clip=None)) == 1
    assert solves_for(Truncated(bound=0.1)) == 2  # equations use what a known bound cut off
    assert solves_for(Truncated(bound=0.1), Quantized(bits=8)) == 2
    assert solves_for(Truncated(bound=0.2)) == 3
    assert solves_for(seed=1) == 4
    assert solves_for(seed=1, upload=replace(seen.upload)) == 5


def test_behind_a_relu_the_smoothest_image_that_its_equations_leave_is_read():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 12, 5, 2, padding=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(432, CLASSES),
    ).double()  # fmt: skip
    few = examples(1, shape=(2, 3, 3))
    truth = replace(few, inputs=F.interpolate(few.inputs, size=12, mode="bicubic", align_corners=True).clamp(0, 1))
    (found,) = EXACT([observe(model, truth)], seed=0)
    assert error(found.batch, truth) < 1e-3


def test_auto_needs_no_descent_where_equations_give_the_image():
    (found,) = AutoAttack(evaluations=10**9)(observations(convolutions(nn.Tanh).double(), 1), seed=0)
    assert (found.member, found.certainty) == ("exact", Certainty.CONSISTENT)


def changed(seen: Observation, change: Callable[[Tensor], Tensor]) -> Observation:
    tensors = {name: change(tensor) for name, tensor in seen.upload.tensors.items()}
    return replace(seen, upload=replace(seen.upload, tensors=tensors))


def test_equations_that_disagree_give_no_image():
    (seen,) = observations(convolutions(nn.Tanh).double(), 1)
    rng = torch.Generator().manual_seed(0)
    noisy = changed(seen, lambda t: t + t.std(correction=0) * torch.randn(t.shape, generator=rng))
    (found,) = EXACT([noisy], seed=0)
    assert found.batch is None and "disagree" in found.failure


@pytest.mark.parametrize(
    "between",
    [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3, groups=8, padding=1)],
)
def test_what_is_no_chain_is_refused(between):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, 2, padding=1), between, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES))
    model.eval()(torch.zeros(1, 2, 8, 8))
    (found,) = EXACT([observe(model.double(), examples(1), plan=LocalPlan(batch_norm="eval"))], seed=0)
    assert found.batch is None and "fully connected" in found.failure


def test_a_layer_without_enough_equations_is_none_of_an_image():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(),
        nn.Linear(32, CLASSES),
    ).double()  # fmt: skip
    (found,) = EXACT([observe(model, examples(1))], seed=0)
    assert found.batch is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_inverted_and_their_slopes_are_those_of_autograd(activation):
    z = torch.linspace(-3, 3, 50, dtype=torch.float64)[None].requires_grad_()
    a = activation.value(z)
    (slope,) = torch.autograd.grad(a.sum(), z)
    torch.testing.assert_close(activation.slope(a.detach()), slope)
    known = slope > 0
    torch.testing.assert_close(activation.inverse(a)[known], z[known])


OPTIONS = [(3, 1, 1, 1), (5, 2, 2, 1), (3, 3, 0, 1), (3, 2, 1, 2)]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), OPTIONS)
def test_both_kinds_of_equations_are_those_of_autograd(kernel, stride, padding, dilation):
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, kernel, stride, padding, dilation, bias=False).double()
    layer, inputs = Convolution(module, (3, 8, 8)), torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    outputs = layer.outputs(inputs)
    deltas = torch.randn_like(outputs)
    (back,) = torch.autograd.grad(outputs, inputs, deltas, retain_graph=True)
    torch.testing.assert_close(layer.back(deltas), back)
    for row in range(2):
        (gradient,) = torch.autograd.grad(outputs[row], module.weight, deltas[row], retain_graph=True)
        sums = (layer.moved(deltas)[row] @ inputs[row].flatten(1).T).view(4, kernel, kernel, 3)
        torch.testing.assert_close(sums.permute(0, 3, 1, 2), gradient)


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), OPTIONS)
def test_what_entered_a_convolution_solves_its_least_squares(kernel, stride, padding, dilation):
    """Also where not all outputs are known and where the step does not divide the image: no slope is left."""
    torch.manual_seed(0)
    layer = Convolution(nn.Conv2d(3, 4, kernel, stride, padding, dilation).double(), (3, 8, 8))
    shape = layer.outputs(torch.zeros(1, 3, 8, 8, dtype=torch.float64)).shape[1:]
    outputs, deltas = (torch.randn(2, *shape, dtype=torch.float64) for _ in range(2))
    slopes = torch.rand(2, *shape, dtype=torch.float64).round()
    gradient = torch.randn(2, 4, 3, kernel, kernel, dtype=torch.float64)
    with torch.no_grad():
        values = solve_inputs(layer, outputs, slopes, deltas, gradient).values

    def left(inputs: Tensor) -> Tensor:
        moved = layer.moved(deltas)
        squares = (layer.back((slopes**2), squared=True), moved.square().sum(1).view(2, 1, 8, 8))
        factor = (squares[0].flatten(1).mean(1) / squares[1].flatten(1).mean(1)).sqrt()
        second = moved @ inputs.flatten(2).mT - gradient.permute(0, 1, 3, 4, 2).flatten(1, 3)
        return (slopes * (layer.outputs(inputs) - outputs)).square().sum() + (
            factor[:, None, None] * second
        ).square().sum()

    slope, blank = (
        torch.autograd.grad(left(x), x)[0].norm()
        for x in (values.requires_grad_(), torch.zeros_like(values, requires_grad=True))
    )
    assert slope < 1e-6 * blank


def test_conjugate_gradients_solve_each_system_and_leave_what_nothing_is_said_of():
    rng = torch.Generator().manual_seed(0)
    half = torch.randn(3, 12, 10, generator=rng, dtype=torch.float64)
    half[2, :, 4] = 0
    matrix, right = half.mT @ half, torch.randn(3, 10, generator=rng, dtype=torch.float64)
    right[2, 4] = 0
    diagonal = matrix.diagonal(dim1=1, dim2=2).clamp_min(1e-300)
    found = conjugate_gradients(lambda x: (matrix @ x[..., None])[..., 0], right, diagonal)
    torch.testing.assert_close((matrix @ found[..., None])[..., 0], right, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(found[:2], torch.linalg.solve(matrix[:2], right[:2]), atol=1e-6, rtol=1e-6)
    assert found[2, 4] == 0


def behind(*layers: nn.Module, shape: tuple[int, int, int] = (2, 12, 12)) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    model(torch.zeros(1, *shape, dtype=torch.float64))
    return model


def smooth() -> Batch:
    few = examples(1, shape=(2, 3, 3))
    return replace(few, inputs=F.interpolate(few.inputs, size=12, mode="bicubic", align_corners=True).clamp(0, 1))


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 5, 2, padding=2), nn.Conv2d(2, 24, 3, 2), nn.Conv2d(2, 24, 2, 3)])
def test_where_equations_are_too_few_the_smoothest_image_is_read(layer):
    """Of few channels, of a border that no output sees, of gaps between the kernel's places."""
    truth = smooth()
    (found,) = EXACT([observe(behind(layer, nn.Tanh()), truth)], seed=0)
    assert error(found.batch, truth) < 0.1 * float(truth.inputs.var())


def test_hidden_values_that_no_kernel_sees_count_for_nothing():
    torch.manual_seed(0)
    model = behind(nn.Conv2d(2, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 96, 3, 2), nn.Tanh())
    truth = smooth()
    (found,) = EXACT([observe(model, truth)], seed=0)
    assert error(found.batch, truth) < 1e-6


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(2, 8, 5, padding="same"), nn.Tanh()],
        [nn.Conv2d(2, 8, 3, padding="valid"), nn.Tanh()],
        [nn.Conv2d(2, 8, 5, padding=2), nn.LeakyReLU(0.1)],
        [nn.Conv2d(2, 8, 5, padding=2), nn.SELU()],
        [nn.Conv2d(2, 8, 5, padding=2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(16), nn.GELU()],
        [nn.Unflatten(1, (2, 1)), nn.Flatten(1, 2), nn.Conv2d(2, 8, 5, padding=2), nn.Tanh()],
        [nn.Flatten(), nn.Unflatten(1, (8, 6, 6)), nn.Conv2d(8, 12, 3, padding=1), nn.Tanh()],
    ],
)
def test_networks_of_other_kinds_are_read_too(layers):
    truth = smooth()
    (found,) = EXACT([observe(behind(*layers), truth)], seed=0)
    assert found.certainty is Certainty.CONSISTENT and error(found.batch, truth) < 1e-8


def test_what_is_behind_a_fully_connected_layer_with_a_bias_does_not_matter():
    """Dropout, and an output layer whose gradient has no bias."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 5, padding=2), nn.Tanh(), nn.Flatten(), nn.Linear(1152, 32), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(32, CLASSES, bias=False),
    ).double()  # fmt: skip
    truth = smooth()
    (found,) = EXACT([observe(model, truth)], seed=0)
    assert error(found.batch, truth) < 1e-8 and found.certainty is not Certainty.PROVEN


def test_activations_are_told_apart_where_outputs_are_small_or_of_one_sign():
    model = convolutions(nn.Tanh).double()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(1e-3)
    truth = examples(1)
    (found,) = EXACT([observe(model, truth)], seed=0)
    assert error(found.batch, truth) < 1e-12
    chain = find_chain(observe(convolutions(nn.ReLU).double(), truth))
    assert chain is not None and bool((chain.layers[0].activation.value(-torch.ones(1)) == 0).all())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.cell = nn.Conv2d(2, 8, 3, 2, padding=1), nn.LSTM(16, 8, batch_first=True)
        self.output = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.cell(torch.tanh(self.convolution(inputs)).flatten(2))
        logits: Tensor = self.output(outputs[:, -1])
        return logits


def test_a_layer_that_returns_more_than_one_thing_is_refused_in_words():
    torch.manual_seed(0)
    (found,) = EXACT([observe(Recurrent().double(), examples(1))], seed=0)
    assert found.batch is None and "fully connected" in found.failure


def test_products_of_columns_are_left_out_where_they_are_larger_than_the_columns():
    """Gray images of 120 pixels a side would take gigabytes."""
    layer = Convolution(nn.Conv2d(1, 4, 3, padding=1), (1, 120, 120))
    assert layer.numbers == 4 * 9 * 120**2
    lenet = Convolution(nn.Conv2d(3, 12, 5, 2, padding=2), (3, 32, 32))
    assert lenet.numbers == 12 * 25 * 32**2 + 4 * 256**2


def test_what_is_handed_out_is_what_reproduces_the_update():
    """An image beyond black and white is not cut, which would no longer be consistent, and a sentence says so."""
    truth = examples(1)
    far = replace(truth, inputs=2 * truth.inputs - 0.5)
    (found,) = EXACT([observe(convolutions(nn.Tanh).double(), far)], seed=0)
    assert found.certainty is Certainty.CONSISTENT and error(found.batch, far) < 1e-6
    assert "not in [0, 1]" in found.notes[0]


@pytest.mark.long
def test_behind_a_relu_silent_outputs_are_told_from_noise():
    """Behind all but one of eight networks: with the values of the first the equations of layers disagree."""
    read = 0
    for seed in range(8):
        torch.manual_seed(seed)
        layers = nn.Conv2d(2, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 5, 2, 2), nn.ReLU()
        model, truth, rng = behind(*layers), smooth(), torch.Generator().manual_seed(0)
        noisy = changed(observe(model, truth), lambda t, r=rng: t + 1e-4 * t.std() * torch.randn(t.shape, generator=r))
        (found,) = EXACT([noisy], seed=0)
        read += found.batch is not None and error(found.batch, truth) < 0.2 * float(truth.inputs.var())
    assert read >= 7


def test_an_output_layer_without_gradient_gives_no_image():
    model = behind(nn.Conv2d(2, 8, 5, padding=2), nn.ReLU())
    seen = observe(model, smooth())
    tensors = {n: t if n.startswith("0.") else torch.zeros_like(t) for n, t in seen.upload.tensors.items()}
    (found,) = EXACT([replace(seen, upload=replace(seen.upload, tensors=tensors))], seed=0)
    assert found.batch is None and "disagree" in found.failure
