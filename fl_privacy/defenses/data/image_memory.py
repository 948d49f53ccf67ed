"""A client's own memory of what it made of its images, found again by their content."""

import torch
from torch import Tensor

from fl_privacy.defenses.defense import ClientState
from fl_privacy.rng import derive_generator


def fingerprints(images: Tensor) -> Tensor:
    """(B,) int64, different for different images (B, ...): their bits times odd numbers, modulo 2^64.

    Of texts (B, L) those are tokens from 1, none being 0, so that it makes no difference how wide their batch is.
    """
    values = images.detach() if images.is_floating_point() else images.detach() + 1
    bits = values.float().contiguous().flatten(1).view(torch.int32).long()
    odd = torch.randint(2**62, (bits.shape[1],), generator=derive_generator(0, "fingerprints")) * 2 + 1
    return (bits * odd.to(bits.device)).sum(1)


class ImageMemory:
    """Images by fingerprint in a ``ClientState``, as bytes; those written since ``end_round`` are fresh.

    Args:
        state: where they are.
        owner: prefix of their names there.
    """

    def __init__(self, state: ClientState, owner: str) -> None:
        self._state = state
        self._keys, self._images, self._fresh = (f"{owner}/{part}" for part in ("keys", "images", "fresh"))

    def recall(self, keys: Tensor, default: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is kept for ``keys``, ``default`` where nothing is; where something is; where that is fresh.

        The first are images (B, C, H, W) or texts (B, L, d) in [0, 1], the latter two (B,) booleans.
        """
        if self._keys not in self._state.tensors:
            nothing = torch.zeros(len(keys), dtype=torch.bool)
            return default, nothing, nothing
        match = keys.cpu().unsqueeze(1) == self._state.tensors[self._keys].cpu()
        found, at = match.any(1), match.int().argmax(1)
        kept = _as_wide(self._state.tensors[self._images], default.shape[1])[at].to(default) / 255
        fresh = found & self._state.tensors[self._fresh].cpu()[at]
        return torch.where(found.to(default.device).view(-1, *[1] * (default.dim() - 1)), kept, default), found, fresh

    def remember(self, keys: Tensor, images: Tensor) -> None:
        """Keep ``images`` (B, C, H, W), or texts (B, L, d), in [0, 1], in place of older ones with the same keys."""
        tensors = self._state.tensors
        new = keys.cpu(), (images * 255).round().byte().cpu(), torch.ones(len(keys), dtype=torch.bool)
        if self._keys in tensors:
            stay = ~torch.isin(tensors[self._keys].cpu(), new[0])
            widest = max(images.shape[1], tensors[self._images].shape[1])
            kept = _as_wide(tensors[self._images].cpu(), widest)[stay]
            new = new[0], _as_wide(new[1], widest), new[2]
            old = tensors[self._keys].cpu()[stay], kept, tensors[self._fresh].cpu()[stay]
            new = tuple(torch.cat(pair) for pair in zip(old, new, strict=True))  # type: ignore[assignment]
        tensors.update(zip((self._keys, self._images, self._fresh), new, strict=True))

    def end_round(self, *, forget: bool) -> None:
        """Nothing is fresh any more; ``forget`` drops the images as well."""
        if self._keys not in self._state.tensors:
            return
        if forget:
            for name in (self._keys, self._images, self._fresh):
                del self._state.tensors[name]
        else:
            self._state.tensors[self._fresh] = torch.zeros_like(self._state.tensors[self._fresh])


def _as_wide(images: Tensor, width: int) -> Tensor:
    """Texts (n, L, d) of ``width`` words, zero beyond their own; images, which are all of one shape, as they are."""
    return torch.nn.functional.pad(images, (0, 0, 0, width - images.shape[1])) if images.dim() == 3 else images
