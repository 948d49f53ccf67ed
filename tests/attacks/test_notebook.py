"""Ten lines in a notebook."""

import pytest
import torch
from PIL import Image

from fl_privacy import Observation, reconstruct, show
from fl_privacy.errors import UserError
from fl_privacy.metrics.images import psnr
from fl_privacy.types import Batch, Reconstruction, VictimId
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
        ({"gradients": {"nothing": torch.zeros(1)}}, "a parameter of the model"),
        ({"input_shape": (7, 1, 1)}, "to take images of shape"),
    ],
)
def test_what_does_not_fit_is_one_line(change: dict, line: str) -> None:
    model = smooth_net()
    given = {"gradients": gradients_of(model), "input_shape": tuple(examples(1).inputs.shape[1:]), **change}
    with pytest.raises(UserError, match=line):
        Observation.of_gradients(model, given["gradients"], input_shape=given["input_shape"])


def test_attacks_and_options_go_by_their_names() -> None:
    model = smooth_net()
    shape = tuple(examples(1).inputs.shape[1:])
    observation = Observation.of_gradients(model, gradients_of(model), input_shape=shape)
    for attack, options, line in (("ilg", {}, "idlg"), ("idlg", {"steps": 3}, "but got steps")):
        with pytest.raises(UserError, match=line):
            reconstruct(observation, attack, **options)


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
