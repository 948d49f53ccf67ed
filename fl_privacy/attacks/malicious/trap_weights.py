"""Trap weights (Boenisch et al. 2023): rows of a first layer that fire for few images."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.first_layer import distinct_ratios
from fl_privacy.attacks.gradient_inversion.grouping import failed
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.attacks.malicious import server_attack
from fl_privacy.attacks.malicious.inconsistent import leaves_such_a_bias
from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator
from fl_privacy.types import ModelState, Observation, Reconstruction

_SMALLEST = 1e-6  # rows whose bias gradient is below this share of the largest hold only rounding
_SAME = 1.0  # root mean square distance in levels below which two rows hold the same image
_ANOTHER = 25.0  # the same, below which a mixture is mostly an image that another row holds alone
_TRIED_IMAGES, _TRIED_ROWS = 500, 128  # public images and rows from which the factor is computed


@dataclass(frozen=True, kw_only=True)
class TrapWeights(server_attack.ServerAttack):
    """Crafts a first layer whose rows fire for few images (Boenisch et al. 2023, section 5.2).

    A random half of each row is negative; the other half has the same magnitudes, scaled down by a factor that is
    fitted on public images. A row that fired for one image reveals it: weight gradient over bias gradient. ``fires``:
    share of images that a row fires for, about one over the batch size.
    """

    fires: float = 0.01
    seed: int = 0

    level = server_attack.ThreatLevel.PARAMETERS
    description = (
        "The server sent a first layer whose rows fire for few images (trap weights), and reconstructs these from them."
    )

    def __post_init__(self) -> None:
        number("server.fires", self.fires, above=0, below=1, example=0.01)
        whole("server.seed", self.seed, at_least=0, example=0)

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        server_attack.expect_whole(model, state, "Trap weights")
        layer = server_attack.first_layer(model, state, tuple(self.public.shape[1:]), "Trap weights")
        weight, bias = state.parameters[layer.weight], state.parameters[layer.bias]
        rows, pixels = weight.shape
        rng = derive_generator(self.seed, "trap-weights")
        negative, half = torch.rand(weight.shape, generator=rng).argsort(1), pixels // 2
        values = torch.randn(rows, half, generator=rng).abs() / pixels**0.5
        traps = torch.zeros(weight.shape).scatter_(1, negative[:, :half], -values)
        traps.scatter_(1, negative[:, half : 2 * half], values)
        images = self.public[:_TRIED_IMAGES].flatten(1)
        if len(images) < 1 / self.fires:
            raise UserError(
                f"At least {1 / self.fires:.0f} public images are expected to set trap weights, but there are"
                f" {len(images)}; raise server.fires."
            )
        tried = traps[:_TRIED_ROWS].to(images)
        ratios = (images @ tried.clamp_max(0).T).neg() / (images @ tried.clamp_min(0).T).clamp_min(1e-12)
        traps = torch.where(traps > 0, float(ratios.flatten().double().quantile(self.fires)) * traps, traps).to(weight)
        seen = traps / layer.scale.to(weight)
        crafted = {layer.weight: seen, layer.bias: (-(seen @ layer.shift.to(weight))).to(bias)}
        return ModelState({**state.parameters, **crafted}, state.buffers)

    def read(self, observation: Observation) -> Reconstruction:
        layer = server_attack.first_layer(observation.model, observation.sent, observation.input_shape, "Trap weights")
        gradient = as_gradient(observation)
        if missing := {layer.weight, layer.bias} - gradient.keys():
            return failed(
                observation, f"The gradient of {min(missing)} is expected, but was withheld; use defense=none."
            )
        weight, bias = gradient[layer.weight].double(), gradient[layer.bias].double()
        strongest = bias.abs().argsort(descending=True)
        fired = strongest[bias[strongest].abs() > _SMALLEST * bias.abs().max()]
        weight, bias = weight[fired], bias[fired]
        pixels, blur = layer.pixels(weight / bias[:, None]), torch.zeros_like(bias)
        if observation.plan.shares != "gradient":  # standard deviation by rounding of trained weights
            sent, shift = (observation.sent.parameters[name] for name in layer.names)
            size = (sent[fired].double().square().mean(1) + shift[fired].double().square()).sqrt()
            blur = torch.finfo(sent.dtype).eps * size / 12**0.5 / observation.plan.lr
        alone = server_attack.is_one_image(pixels, blur=blur / bias.abs())
        own, error = (pixels[alone], fired[alone], bias[alone]), 4 * blur[alone] + _SMALLEST * bias.abs().max()
        alone = alone.masked_scatter(alone, leaves_such_a_bias(observation, *own, bias=layer.bias, error=error))
        single = pixels[alone]
        repeats = (_apart(single, single) < _SAME).tril(-1).any(1)  # differ from an earlier one by rounding alone
        single = single[~repeats][: observation.upload.num_examples]
        left = observation.upload.num_examples - len(single)
        others = ~alone & (_apart(pixels, single) > _ANOTHER).all(1)
        mixed = pixels[:0]
        if left and others.any():
            rows = weight[others][None], bias[others][None]
            found = distinct_ratios(*rows, count=left, smallest=_SMALLEST, alike=1e-2)[0]
            mixed = layer.pixels(found)[: int(others.sum())]
        proven = torch.arange(len(single) + len(mixed)) < len(single)
        return server_attack.reconstruction_of(observation, torch.cat([single, mixed]), proven)


def _apart(images: Tensor, others: Tensor) -> Tensor:
    distances: Tensor = torch.cdist(
        server_attack.LEVELS * images, server_attack.LEVELS * others, compute_mode="use_mm_for_euclid_dist"
    )
    width: float = images.shape[1] ** 0.5
    return distances / width
