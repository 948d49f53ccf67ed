"""Ten lines in a notebook."""

import pytest
import torch
from PIL import Image

from fl_privacy import Observation, reconstruct, show
from fl_privacy.errors import UserError
from fl_privacy.measure.images import psnr
from fl_privacy.types import Batch, LocalPlan, Reconstruction, VictimId
from tests.attacks.victims import examples, smooth_net


def gradients_of(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    batch = examples(1)
    loss = torch.nn.functional.cross_entropy(model(batch.inputs.to(next(model.parameters()))), batch.labels)
    return torch.autograd.grad(loss, list(model.parameters()))


def test_gradients_in_images_out() -> None:
    model = smooth_net()
    shape = tuple(examples(1).inputs.shape[1:])
    observation = Observation.of_gradients(model, gradients_of(model), input_shape=shape)
    found = reconstruct(observation, "idlg", iterations=40, dtype="float64")
    assert found.batch is not None
    assert psnr(found.batch.inputs.clamp(0, 1), examples(1).inputs).item() > 30
    picture = show(found, examples(1).inputs)
    assert isinstance(picture, Image.Image) and picture.height >= 128
    again = reconstruct([observation], "idlg", iterations=40, dtype="float64")
    assert torch.equal(again[0].batch.inputs, found.batch.inputs)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"gradients": ()}, "A gradient is expected for each of"),
        ({"gradients": {"0.weight": None}}, "0.weight is expected to be a tensor .*, but is NoneType"),
        ({"gradients": {"0.weight": torch.zeros(3)}}, r"but is \(3,\)"),
        ({"input_shape": "1x12x12"}, "input_shape is expected to be whole numbers of at least 1, but got '1x12x12'"),
        ({"input_shape": (3, 0, 2)}, "whole numbers of at least 1"),
        ({"input_shape": 2.5}, "whole numbers of at least 1, but got 2.5"),
        ({"input_shape": 784}, r"to take images of shape \(784,\)"),
        ({"num_examples": 4}, "of_gradients is expected .* but got num_examples; batch_size= is how many"),
        ({"colour": 4}, "but got colour; leave it out"),
        ({"gradients": {"nothing": torch.zeros(1)}}, "a parameter of the model"),
        ({"input_shape": (7, 1, 1)}, "to take images of shape"),
    ],
)
def test_what_does_not_fit_is_one_line(change: dict, line: str) -> None:
    model = smooth_net()
    given = {"gradients": gradients_of(model), "input_shape": tuple(examples(1).inputs.shape[1:]), **change}
    with pytest.raises(UserError, match=line):
        Observation.of_gradients(model, given.pop("gradients"), **given)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"batch_size": 4}, r"but got batch_size; it is the plan's: plan=LocalPlan\(batch_size=...\)"),
        ({"lr": 0.1}, r"plan=LocalPlan\(lr=...\)"),
        ({"num_examples": ...}, "missing a required .*'num_examples'"),
    ],
)
def test_what_of_update_does_not_take_is_one_line(change: dict, line: str) -> None:
    given = {"plan": LocalPlan(lr=0.1, steps=1), "input_shape": 9, "num_examples": 1, **change}
    given = {name: value for name, value in given.items() if value is not ...}
    with pytest.raises(UserError, match=line):
        Observation.of_update(torch.nn.Linear(9, 2), torch.nn.Linear(9, 2), **given)


def test_rows_have_a_shape_of_one_number() -> None:
    net = torch.nn.Linear(9, 3)
    gradients = torch.autograd.grad(net(torch.rand(1, 9)).logsumexp(1).sum(), list(net.parameters()))
    assert Observation.of_gradients(net, gradients, input_shape=9, batch_size=1).input_shape == (9,)


@pytest.mark.parametrize("kind", ["trained alone", "named", "with None"])
def test_gradients_of_what_is_trained_are_enough(kind: str) -> None:
    """As of adapters and of a new head, where the rest is frozen and ``torch.autograd.grad`` refuses it."""
    model, batch = smooth_net(), examples(1)
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    torch.nn.functional.cross_entropy(model(batch.inputs.to(next(model.parameters()))), batch.labels).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    given = {"trained alone": tuple(trained.values()), "named": trained}.get(kind, [p.grad for p in model.parameters()])
    shape = tuple(batch.inputs.shape[1:])
    assert list(Observation.of_gradients(model, given, input_shape=shape).upload.tensors) == list(trained)
    with pytest.raises(UserError, match=r"or of the 2 that are trained, but got 1; .*if p.requires_grad"):
        Observation.of_gradients(model, list(trained.values())[:1], input_shape=shape)


def test_attacks_and_options_go_by_their_names() -> None:
    model = smooth_net()
    shape = tuple(examples(1).inputs.shape[1:])
    observation = Observation.of_gradients(model, gradients_of(model), input_shape=shape)
    for attack, options, line in (("ilg", {}, "idlg"), ("idlg", {"steps": 3}, "but got steps")):
        with pytest.raises(UserError, match=line):
            reconstruct(observation, attack, **options)


def test_an_update_of_what_is_trained_is_enough() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.Linear(4, 3))
    net[0].requires_grad_(False)
    after = [p.detach() + 0.1 for p in net[1].parameters()]
    plan = LocalPlan(lr=0.1, steps=1)
    seen = Observation.of_update(net, after, plan, input_shape=9, num_examples=1)
    assert list(seen.upload.tensors) == ["1.weight", "1.bias"]


def _columns(picture: Image.Image, number: int) -> list[tuple[int, int]]:
    """Return the brightness of each original and of the guess below it."""
    width, height = picture.width // number, picture.height // 2
    return [
        (
            picture.getpixel((width * k + width // 2, height // 2)),
            picture.getpixel((width * k + width // 2, height * 3 // 2)),
        )
        for k in range(number)
    ]


def _of_brightness(*levels: float) -> torch.Tensor:
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)


@pytest.mark.parametrize(
    ("guesses", "shown"),
    [
        ([[0.9, 0.1, 0.5]], [(26, 26), (128, 128), (230, 230)]),
        ([[0.5, 0.1], [0.9]], [(26, 26), (128, 128), (230, 230)]),
        ([[0.9, 0.1]], [(26, 26), (128, 255), (230, 230)]),
        ([[0.9, 0.3, 0.1, 0.5]], [(26, 26), (128, 128), (230, 230), (255, 77)]),
    ],
    ids=["one_batch", "batches", "fewer", "more"],
)
def test_each_guess_is_below_its_original(guesses: list[list[float]], shown: list[tuple[int, int]]) -> None:
    found = [
        Reconstruction(id=VictimId(1, 0, 0), batch=Batch(_of_brightness(*own), torch.zeros(len(own)).long()), loss=0.0)
        for own in guesses
    ]
    picture = show(found, _of_brightness(0.1, 0.5, 0.9))
    for seen, wanted in zip(_columns(picture, len(shown)), shown, strict=True):
        assert seen == pytest.approx(wanted, abs=1)
