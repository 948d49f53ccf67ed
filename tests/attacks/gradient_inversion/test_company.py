"""What becomes of a victim in the company of others, as docs/attacks/index.md says it."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks import GradientInversion, idlg
from tests.attacks.victims import examples, smooth_net


def observations() -> list[Observation]:
    net, found = smooth_net(), []
    for number, (image, label) in enumerate(zip(*vars(examples(3)).values(), strict=True)):
        loss = F.cross_entropy(net(image[None].to(next(net.parameters()))), label[None])
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        found.append(Observation.of_gradients(net, gradients, input_shape=image.shape, batch_size=1, number=number))
    return found


def apart(attack: GradientInversion) -> float:
    """Return by how much the first victim's image differs alone and among three."""
    seen = observations()
    alone, among = reconstruct(seen[:1], attack)[0].batch, reconstruct(seen, attack)[0].batch
    assert alone is not None and among is not None
    return float((alone.inputs - among.inputs).abs().max())


def test_computed_alone_a_victim_is_the_same_in_any_company() -> None:
    assert apart(replace(idlg(iterations=8), most_victims=1)) == 0


def test_in_double_precision_it_is_nearly_the_same() -> None:
    assert apart(replace(idlg(iterations=8), dtype="float64")) < 1e-6
