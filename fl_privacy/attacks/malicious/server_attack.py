"""Interface of malicious servers, and tools to turn layers' gradients into images."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.first_layer import FirstLayer, NotFullyConnectedError, find_first_layer
from fl_privacy.attacks.gradient_inversion.evident_defense import Usual, evident_defense, grid_bits
from fl_privacy.attacks.gradient_inversion.grouping import failed
from fl_privacy.attacks.gradient_inversion.labels import choose_labels, output_layer
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.types import Batch, Certainty, ModelState, Observation, Reconstruction, Upload

Ask = Callable[[ModelState], Upload]  # a client's reply to given values


class ThreatLevel(StrEnum):
    """Kinds of deviation of a server from the protocol."""

    HONEST = "honest but curious"  # no deviation
    PARAMETERS = "malicious parameters"  # crafted values of the agreed architecture
    ARCHITECTURE = "malicious architecture"  # an agreed architecture with a layer of its own
    INCONSISTENT = "inconsistent models"  # different values for different clients


@dataclass(frozen=True, kw_only=True)
class ServerAttack(ABC):
    """Crafts the models sent to clients and reconstructs examples from the replies.

    ``public``: (N, C, H, W) in [0, 1], the server's images; none of them is attacked.
    """

    level: ClassVar[ThreatLevel]
    description: ClassVar[str]
    reads_sum: ClassVar[bool] = False  # ``True`` if the mean of all replies is enough, also behind secure aggregation
    reads_images: ClassVar[bool] = True  # ``False`` if it returns an update for a further attack
    trains: ClassVar[bool] = False  # ``True`` if the global model learns from the replies
    asks_of_members: ClassVar[bool] = False  # ``True`` if half of the server's images are to be the clients' own
    public: Tensor = field(init=False, repr=False, compare=False, default_factory=lambda: torch.empty(0, 1, 1, 1))

    def informed(self, public: Tensor) -> Self:
        knowing = copy.copy(self)
        object.__setattr__(knowing, "public", public)
        return knowing

    @property
    def only(self) -> int | None:
        """Return the id of the only attackable client; ``None`` for all."""
        return None

    def architecture(self, model: nn.Module, input_shape: tuple[int, ...], clients: int) -> nn.Module:
        """Return the model that all ``clients`` clients have to train; only its architecture counts, not its values."""
        return model

    @abstractmethod
    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        """Return crafted values for ``client`` in a new object; ``UserError`` if the model has no usable layer."""

    def question(self, model: nn.Module, state: ModelState, client: int, ask: Ask) -> tuple[ModelState, Upload]:
        """Send crafted values to ``client`` by ``ask``, which may be called repeatedly; return them and its reply."""
        sent = self.craft(model, state, client)
        return sent, ask(sent)

    @abstractmethod
    def read(self, observation: Observation) -> Reconstruction | Observation:
        """Reconstruct images, with certainties, from a client's reply or the mean of all replies.

        If ``reads_images`` is ``False``, return an observation for the attack that runs next.
        """


def expect_whole(model: nn.Module, state: ModelState, who: str) -> None:
    """Raise ``UserError`` if clients keep layers of ``model`` private; ``who``: beginning of its message."""
    if missing := [name for name, _ in model.named_parameters() if name not in state.parameters]:
        raise UserError(f"{who}: a whole model is expected, but clients keep {missing[0]}; use defense=none.")


BLOCK = "imprint"  # name of the block that a server puts in front of a model, in this model
UNKNOWN = -1  # label of an image of unknown class


def reconstruction_of(
    observation: Observation, images: Tensor, proven: Tensor, *, labels: bool = True
) -> Reconstruction:
    """Return the reconstruction of N images found in ``observation``; it is failed if there are no images.

    ``proven``: (N,) ``True`` for images that are no mixtures; none is proven if the update shows signs of a defense.
    ``labels``: ``True`` if the update is one batch's, so that its output layer gives the labels.
    """
    if not len(images):
        return failed(
            observation, "An update that reveals single images is expected, but got none; attack smaller batches."
        )
    # a defense shows in the layers behind the crafted one
    layer, tensors = output_layer(observation.model, observation.num_classes), observation.upload.tensors
    honest = [name for name, tensor in tensors.items() if tensor.dim() > 1 and not name.startswith(f"{BLOCK}.")]
    ends = {*honest[:1], *(layer[:1] if layer else ())} & tensors.keys()
    seen = replace(observation, upload=replace(observation.upload, tensors={name: tensors[name] for name in ends}))
    usual = Usual(scattered=0.0, columns=1.0, noise=math.inf)
    if not all(bool(tensors[name].any()) for name in ends) or evident_defense(seen, usual):
        proven = torch.zeros_like(proven)
    shaped = images.reshape(len(images), *observation.input_shape)
    each = tuple(Certainty.PROVEN if sure else Certainty.APPROXIMATE for sure in proven.tolist())
    found, source = _labels(observation, len(images)) if labels else (torch.full((len(images),), UNKNOWN), "inferred")
    return Reconstruction(
        id=observation.id,
        batch=Batch(shaped.clamp(0, 1).float().cpu(), found),
        loss=float((~proven).double().mean()),
        label_source=source,
        certainty=min(each, key=list(reversed(Certainty)).index),
        certainties=each,
    )


def first_layer(model: nn.Module, state: ModelState, input_shape: tuple[int, ...], who: str) -> FirstLayer:
    """Find the first layer; raise ``UserError`` (beginning with ``who``) unless it is fully connected on pixels."""
    try:
        return find_first_layer(model, state, input_shape)
    except NotFullyConnectedError as error:
        raise UserError(f"{who}: {str(error).split(';')[0]}; use model=mlp.") from error


def _labels(observation: Observation, number: int) -> tuple[Tensor, str]:
    """Return the batch's labels (number,) in any order, -1 if unknown, and their source."""
    state, labels = observation.assumed(), torch.full((number,), UNKNOWN)
    if any(name not in state.parameters for name, _ in observation.model.named_parameters()):
        return labels, "inferred"
    sent = next(iter(state.parameters.values()))
    model = frozen_copy(observation.model, state, observation.plan, device=sent.device, dtype=sent.dtype)
    try:
        found, source = choose_labels(observation, "auto", model, loss_scale=observation.plan.loss_scale, seed=0)
    except NotAttackableError:
        return labels, "inferred"
    if found is not None:
        classes = (found.argmax(1) if found.dim() == 2 else found).cpu()
        labels[: len(classes)] = classes[:number]
    return labels, source


LEVELS = 255.0
WHOLE = 0.01  # root mean square distance of pixels from levels below which they are one image; mixtures have 0.29
NEARLY = 0.1  # the same distance for pixels blurred by the precision of weights
LEAST_LEVELS = 32
"""Least number of different levels of an image for a decision. A mixture of two images with few levels has few values,
too, which may all be near levels by chance: for black-and-white images, in 15 to 40 of 100 mixtures."""

COARSER = (2, 3, 5, 7)  # steps between an image's levels that suggest an equal mixture

_NEARLY = 0.25  # levels from black or white below which pixels are no evidence: those of a mixture are there too
_STEP, _MOST_STEPS, _SAMPLED = 0.2, 512, 512


def is_one_image(
    pixels: Tensor, error: Tensor | None = None, *, blur: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """Return ``True`` (N,) for rows of ``pixels`` (N, D) whose values are all among the 256 levels of an 8-bit image.

    Levels are multiples of 1/255. A row counts as a mixture if it has noise, an inexact scale, fewer than
    ``LEAST_LEVELS`` levels besides black and white, or only every second, third, fifth or seventh level. Equal mixtures
    of two images with even levels are accepted.

    Args:
        error: (N,) standard deviation of rounding errors of pixels; rows with more than 0.01 levels are refused.
        blur: (N,) standard deviation of pixels due to rounding of trained weights; pixels may then be up to ``NEARLY``
            levels off.
        rows: (N, D) gradient of each image; all are refused if its values are few and evenly spaced, as if quantized.
    """
    levels = LEVELS * pixels.double()
    telling = (levels > _NEARLY) & (levels < LEVELS - _NEARLY)
    apart = (levels - levels.round()).square() * telling
    # the nearest levels (N, 256) of the ``telling`` pixels of each row (N, D)
    nearest = levels.round().clamp(0, LEVELS).long()
    seen = torch.zeros(len(levels), int(LEVELS) + 1, dtype=torch.int64, device=levels.device)
    number, seen = telling.sum(1), seen.scatter_add_(1, nearest, telling.long()) > 0
    inside = ((levels > -1) & (levels < LEVELS + 1)).all(1)
    fine = torch.ones_like(inside) if error is None else LEVELS * error < WHOLE
    most = levels.new_full((len(levels),), WHOLE) if blur is None else (WHOLE + 2 * LEVELS * blur).clamp_max(NEARLY)
    various = seen.sum(1) >= LEAST_LEVELS
    for step in COARSER:
        various &= torch.stack([seen[:, rest::step].any(1) for rest in range(step)]).sum(0) != 1
    if rows is not None and len(rows) > 1 and grid_bits(rows) is not None:
        return torch.zeros_like(inside)
    return fine & various & inside & ((apart.sum(1) / number.clamp_min(1)).sqrt() < most)


def images_of_brightness(
    rows: Tensor, low: Tensor, high: Tensor, *, smallest: float, rounding: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scale rows (bins, D) of an update to images with brightness between ``low`` (bins,) and ``high`` (bins,).

    Return N images (N, D), from the largest rows to smaller ones, and ``True`` (N,) for rows that hold one image only.
    Rows with a norm below ``smallest`` times the largest are dropped. ``rounding``: standard deviation of rounding in
    rows.
    """
    strength = rows.norm(dim=1)
    order = strength.argsort(descending=True)
    order = order[strength[order] > smallest * strength.max()]
    brightness, tiny = rows[order].mean(1, keepdim=True), torch.finfo(torch.float64).tiny
    directions = rows[order] / torch.where(brightness.abs() > tiny, brightness, torch.full_like(brightness, tiny))
    pixels, low, high = directions.double(), low[order], high[order]
    if len(pixels):  # scaled so that most pixels lie on levels, else by the middle of the range
        found = torch.stack([_factor(row, float(a), float(b)) for row, a, b in zip(pixels, low, high, strict=True)])
        whole = is_one_image(pixels * found[:, None])
        pixels = pixels * torch.where(whole, found, (low + high).double() / 2)[:, None]
    error = rounding * pixels.norm(dim=1) / strength[order]
    return pixels, is_one_image(pixels, error, rows=rows[order])


def _factor(direction: Tensor, low: float, high: float) -> Tensor:
    steps = int(min(_MOST_STEPS, max(3.0, (high - low) * LEVELS * float(direction.abs().max()) / _STEP)))
    tried = torch.linspace(low, high, steps, dtype=torch.float64, device=direction.device)
    levels = LEVELS * tried[:, None] * direction[:: max(1, len(direction) // _SAMPLED)]
    best = tried[(levels - levels.round()).square().mean(1).argmin()]
    for _ in range(3):
        nearest = (LEVELS * best * direction).round()
        best = (nearest @ direction) / (LEVELS * (direction @ direction).clamp_min(torch.finfo(torch.float64).tiny))
    return best.clamp(low, high)
