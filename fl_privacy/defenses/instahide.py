"""InstaHide: train on mixtures of images with random signs."""

import torch
from torch import Tensor

from fl_privacy.defenses.base import ClientState, Defense, LocalData
from fl_privacy.defenses.checks import expect_number
from fl_privacy.defenses.public_pictures import read_pictures, shape_of
from fl_privacy.errors import UserError
from fl_privacy.types import Batch

_IMAGES, _LABELS = "instahide/images", "instahide/labels"
_PRIVATE_IN_PUBLIC = 2
"""Images of its own that a client mixes where the others are public."""


def instahide(*, k: int = 4, largest: float = 0.65, public: str | None = None) -> Defense:
    """Mix each image with k - 1 others and flip the sign of random pixels (Huang et al. 2020).

    The others are the client's own, drawn anew for every step, as are coefficients and signs; labels are mixed alike.
    Pixels are signed around the middle of their range: a flipped x is 1 - x.

    Args:
        k: images in a mixture, at least 1; 1 only flips.
        largest: bound on a coefficient, above 1 / k and at most 1; of no effect for k = 1.
        public: folder of pictures from which all but two of each mixture are drawn, without a label ("cross").
    """
    expect_number("defense.k", k, at_least=1, example=4)
    if k > 1:
        expect_number("defense.largest", largest, above=1 / k, at_most=1, example=0.65)

    def on_examples(batch: Batch, data: LocalData) -> Batch:
        data.state.tensors[_IMAGES] = (batch.inputs * 255).round().to(torch.uint8)
        data.state.tensors[_LABELS] = one_hot(batch.labels, data.num_classes)
        return batch

    def on_batch(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
        if _IMAGES not in state.tensors:
            raise UserError(
                "instahide expects to have seen the client's examples, but has not; run its examples hook first."
            )
        own, labels = state.tensors[_IMAGES].to(batch.inputs.device), state.tensors[_LABELS].to(batch.inputs.device)
        size, private = len(batch), min(k, _PRIVATE_IN_PUBLIC) if public else k
        shares = coefficients(size, k, largest, rng).to(batch.inputs)
        partners = torch.randint(len(own), (size, private - 1), generator=rng).to(own.device)
        others = [own[partners].to(batch.inputs) / 255]
        if public and k > private:
            pictures = read_pictures(public, shape_of(batch.inputs)).to(own.device)
            drawn = torch.randint(len(pictures), (size, k - private), generator=rng).to(own.device)
            others.append(pictures[drawn].to(batch.inputs) / 255)
        images = torch.cat([batch.inputs.unsqueeze(1), *others], 1)
        mixed = torch.einsum("bk,bk...->b...", shares, images)
        flips = torch.rand(mixed.shape, generator=rng).to(mixed.device) < 0.5
        targets = torch.cat([one_hot(batch.labels, labels.shape[1]).unsqueeze(1), labels[partners]], 1)
        weights = shares[:, :private] / shares[:, :private].sum(1, keepdim=True)
        return Batch(torch.where(flips, 1 - mixed, mixed), torch.einsum("bk,bkc->bc", weights, targets))

    return Defense(
        name="instahide",
        examples=(on_examples,),
        data=(on_batch,),
        public={"k": k, "largest": largest, "public": public},
    )


def coefficients(size: int, k: int, largest: float, rng: torch.Generator) -> Tensor:
    """(size, k) shares that add up to 1: softmax of normal draws, drawn again while one is above ``largest``."""
    shares = torch.randn(size, k, generator=rng, device=rng.device).softmax(1)
    while k > 1 and bool((over := shares.amax(1) > largest).any()):
        shares[over] = torch.randn(int(over.sum()), k, generator=rng, device=rng.device).softmax(1)
    return shares


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """(B, K) float of labels (B,) or (B, K)."""
    return labels.float() if labels.dim() == 2 else torch.nn.functional.one_hot(labels, num_classes).float()
