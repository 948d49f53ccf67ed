"""InstaHide: training on mixtures of images whose pixels are inverted at random."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses.defense import ClientState, Defense, LocalData
from fl_privacy.effects import Mixed, Part
from fl_privacy.errors import UserError
from fl_privacy.files.foreign import expanded
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch

_IMAGES, _LABELS, _MARKS = "instahide/images", "instahide/labels", "instahide/marks"
_PRIVATE_IN_PUBLIC = 2  # number of a client's own images per mixture if the others are public
_MARKED_AT_ONCE, _COMPARED = 512, 64
_TRIED, _WITHIN = 10_000, 10  # number of trial draws of coefficients, and least number of them within the bound


def instahide(*, k: int = 4, largest: float = 0.65, public: str | None = None) -> Defense:
    """Mix each image with k - 1 others and invert random pixels, x to 1 - x (InstaHide, Huang et al. 2020).

    Partners (other images of the client), coefficients and pixels are drawn anew in every step. Labels are mixed with
    the same coefficients. Compose this before other defenses that change images.

    Args:
        k: images in a mixture, at least 1; 1 only inverts pixels.
        largest: largest coefficient, at most 1 and well above 1 / k; ignored for k = 1.
        public: folder of public pictures; all but two images of a mixture come from it, without labels ("cross").
    """
    checks.whole("defense.k", k, at_least=1, example=4)
    if k > 1:
        checks.number("defense.largest", largest, above=1 / k, at_most=1, example=0.65)
        _expect_within_reach(k, largest)
    private = min(k, _PRIVATE_IN_PUBLIC) if public else k

    def on_prepare(input_shape: Sequence[int]) -> None:
        if public and len(read_pictures(public, tuple(input_shape))) < k - private:
            raise UserError(
                f"defense.public is expected to hold at least {k - private} pictures for defense.k={k}, but {public}"
                " holds fewer; lower defense.k."
            )

    def on_examples(batch: Batch, data: LocalData) -> Batch:
        if len(batch) < private:
            raise UserError(
                f"A client is expected to have at least {private} examples to mix, but has {len(batch)}; lower"
                " defense.k or federation.clients."
            )
        _keep(batch.inputs, one_hot(batch.labels, data.num_classes), data.state.tensors)
        return batch

    def on_batch(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
        if _IMAGES not in state.tensors:
            raise UserError(
                "instahide is expected to get the client's examples first, but did not; call defense.examples before."
            )
        own, labels = state.tensors[_IMAGES].to(batch.inputs.device), state.tensors[_LABELS].to(batch.inputs.device)
        shares = coefficients(len(batch), k, largest, rng).to(batch.inputs)
        # places (B,) of the images among the client's examples; random ones for unknown images
        (known, order), wanted = state.tensors[_MARKS].cpu().sort(), _marks(levels(batch.inputs)).cpu()
        at = torch.searchsorted(known, wanted).clamp_max(len(known) - 1)
        places = torch.where(known[at] == wanted, order[at], torch.randint(len(known), (len(batch),), generator=rng))
        partners = distinct(places.unsqueeze(1), private - 1, len(own), rng).to(own.device)
        others = [own[partners].to(batch.inputs) / 255]
        if public and k > private:
            pictures = read_pictures(public, tuple(batch.inputs.shape[1:])).to(own.device)
            drawn = distinct(places.new_empty(len(batch), 0), k - private, len(pictures), rng).to(own.device)
            others.append(pictures[drawn].to(batch.inputs) / 255)
        mixed = torch.einsum("bk,bk...->b...", shares, torch.cat([batch.inputs.unsqueeze(1), *others], 1))
        flips = torch.rand(mixed.shape, generator=rng).to(mixed.device) < 0.5
        targets = torch.cat([one_hot(batch.labels, labels.shape[1]).unsqueeze(1), labels[partners]], 1)
        weights = shares[:, :private] / shares[:, :private].sum(1, keepdim=True)
        return Batch(torch.where(flips, 1 - mixed, mixed), torch.einsum("bk,bkc->bc", weights, targets))

    settings = {"k": k, "largest": largest, "public": public}
    part = Part("instahide", settings, Mixed(images=k, labeled=private), strength="k")
    return Defense(parts=(part,), examples=(on_examples,), data=(on_batch,), prepare=(on_prepare,))


def _keep(images: Tensor, labels: Tensor, kept: dict[str, Tensor]) -> None:
    some = torch.linspace(0, len(images) - 1, min(_COMPARED, len(images))).long()
    if (
        _IMAGES not in kept
        or not torch.equal(kept[_LABELS].to(labels.device), labels)
        or not torch.equal(kept[_IMAGES][some].to(images.device), levels(images[some]))
    ):
        kept[_IMAGES], kept[_LABELS] = levels(images), labels
        kept[_MARKS] = _marks(kept[_IMAGES])


def coefficients(size: int, k: int, largest: float, rng: torch.Generator) -> Tensor:
    """Draw mixing coefficients |z| / sum |z| (size, k) with normal z; rows with one above ``largest`` are drawn again.

    This follows the authors' code; the paper does not specify it.
    """
    shares = _shares(size, k, rng)
    while k > 1 and bool((over := shares.amax(1) > largest).any()):
        shares[over] = _shares(int(over.sum()), k, rng)
    return shares


def _shares(size: int, k: int, rng: torch.Generator) -> Tensor:
    drawn = torch.randn(size, k, generator=rng, device=rng.device).abs()
    return drawn / drawn.sum(1, keepdim=True)


def distinct(taken: Tensor, number: int, population: int, rng: torch.Generator) -> Tensor:
    """Draw ``number`` distinct indices below ``population`` for each of B rows, except those in ``taken``'s row."""
    before = taken.shape[1]
    for _ in range(number):
        drawn = torch.randint(population - taken.shape[1], (len(taken),), generator=rng)
        for used in taken.sort(1).values.unbind(1):
            drawn = drawn + (drawn >= used)
        taken = torch.cat([taken, drawn.unsqueeze(1)], 1)
    return taken[:, before:]


def levels(images: Tensor) -> Tensor:
    """Convert images in [0, 1] to uint8 in [0, 255]."""
    return (images * 255).round().to(torch.uint8)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Convert classes (B,) to one-hot float (B, K); probabilities (B, K) are unchanged."""
    return labels.float() if labels.dim() == 2 else torch.nn.functional.one_hot(labels, num_classes).float()


def _expect_within_reach(k: int, largest: float) -> None:
    """Raise ``UserError`` if ``k`` random shares that sum to 1 are almost never all below ``largest``."""
    if (_shares(_TRIED, k, derive_generator(0, "instahide", "trial")).amax(1) <= largest).sum() < _WITHIN:
        raise UserError(
            f"defense.largest is expected well above 1 / k = {1 / k:.3g}, but {k} coefficients are hardly ever all"
            f" below {largest}; try 0.65."
        )


def _marks(images: Tensor) -> Tensor:
    flat = images.flatten(1)
    largest = 2**53 // (255 * flat.shape[1])
    weights = torch.randint(largest, flat.shape[1:], generator=derive_generator(0, "instahide", "marks"))
    weights = weights.to(flat.device, torch.float64)
    return torch.cat([part.double() @ weights for part in torch.split(flat, _MARKED_AT_ONCE)]).long()


_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")


@cache
def read_pictures(folder: str, input_shape: tuple[int, ...]) -> Tensor:
    """Load all pictures below ``folder`` as uint8 (N, C, H, W), sorted; ``UserError`` if one is unreadable."""
    channels, height, width = input_shape
    files = sorted(f for f in expanded(folder).rglob("*") if f.suffix.lower() in _ENDINGS)
    if not files:
        raise UserError(
            f"defense.public is expected to be a folder of pictures ({', '.join(_ENDINGS)}), but got none below"
            f" {folder}; name another folder."
        )
    return torch.stack([_read(file, "L" if channels == 1 else "RGB", (width, height)) for file in files])


def _read(file: Path, mode: str, size: tuple[int, int]) -> Tensor:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415
    from PIL.Image import fromarray  # noqa: PLC0415

    from fl_privacy.data.deep import Deep, gray_values  # noqa: PLC0415

    try:
        with Image.open(file) as picture:
            from torchvision.transforms.v2.functional import pil_to_tensor  # noqa: PLC0415  (slow to import)

            shown: Image.Image = picture
            if (values := gray_values(picture)) is not None:
                deep = Deep()
                deep.note(0, values, str(file))
                shown = fromarray(deep.in_bytes(values[None, None], file.name)[0, 0].numpy())
            pixels: Tensor = pil_to_tensor(shown.convert(mode).resize(size))
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{file} is expected to be a picture, but can't be read; remove it.") from error
    return pixels
