"""Ten lines in a notebook."""

import pytest
import torch
from PIL import Image

from fl_privacy import Observation, reconstruct, show
from fl_privacy.errors import UserError
from fl_privacy.metrics.images import psnr
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
