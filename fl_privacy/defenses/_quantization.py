"""Quantization of the update to few bits per element."""

from typing import Literal

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses._pruning import compress_with_feedback
from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.effects import Part, Quantized
from fl_privacy.errors import UserError
from fl_privacy.types import Tensors


def quantization(
    *, bits: int = 8, rounding: Literal["nearest", "stochastic"] = "stochastic", error_feedback: bool = False
) -> Defense:
    """Round each tensor to at most 2^bits evenly spaced values (QSGD, Alistarh et al. 2017; Refiner's GQ).

    These reach to the tensor's largest magnitude (QSGD, section 4), so that ``encoding.encode`` needs ``bits`` bits per
    element and one number per tensor. One bit and ``nearest`` give the sign times the mean magnitude.

    Args:
        bits: bits per element, 1 to 28; zero stays zero from 2 bits on.
        rounding: ``nearest`` or ``stochastic``, which is unbiased.
        error_feedback: ``True`` adds the rounding error to the next update; only with ``nearest``.
    """
    checks.whole("defense.bits", bits, at_least=1, at_most=28, example=8)
    checks.one_of("defense.rounding", rounding, ("nearest", "stochastic"))
    checks.one_of("defense.error_feedback", error_feedback, (True, False))
    if error_feedback and rounding == "stochastic":
        raise UserError(
            "defense.error_feedback is expected with defense.rounding=nearest, but got stochastic,"
            " which has no bias; set defense.rounding=nearest."
        )

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        def compress(update: Tensors) -> Tensors:
            return {n: quantize(t, bits, rng if rounding == "stochastic" else None) for n, t in update.items()}

        return compress_with_feedback(compress, tensors, state, owner="quantization", feedback=error_feedback)

    settings = {"bits": bits, "rounding": rounding, "error_feedback": error_feedback}
    effect = Quantized(bits=bits, rounding=rounding)
    return Defense(parts=(Part("quantization", settings, effect, strength="bits"),), upload=(on_upload,))


def quantize(tensor: Tensor, bits: int, rng: torch.Generator | None = None) -> Tensor:
    """Return ``tensor`` rounded to ``bits`` bits: at random with ``rng``, else to the nearest value."""
    magnitudes = tensor.abs()
    if not magnitudes.any():
        return tensor.clone()
    if rng is None:
        scale = magnitudes.mean() if bits == 1 else magnitudes.max()
        codes = round_to_codes(to_grid(tensor, scale, bits), bits)
    else:
        scale = magnitudes.max()
        threshold = torch.rand(tensor.shape, generator=rng, device=rng.device).to(tensor.device)
        step, lowest = 2 if bits == 1 else 1, -largest_code(bits)  # between neighboring codes
        codes = ((to_grid(tensor, scale, bits) - lowest) / step + threshold).floor() * step + lowest
    return from_grid(codes, scale, bits)


def largest_code(bits: int) -> int:
    """Return the largest integer c that codes a value in ``bits`` bits; codes are -c to c, or -1 and 1 for one bit."""
    return 1 if bits == 1 else 2 ** (bits - 1) - 1


def to_grid(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Scale ``values`` in [-scale, scale] to [-c, c], float64, without rounding; c is ``largest_code(bits)``."""
    return values.double() / scale.double() * largest_code(bits)


def round_to_codes(positions: Tensor, bits: int) -> Tensor:
    """Round ``positions`` in units of the quantization step to integers; for one bit, to -1 if negative, else to 1."""
    if bits == 1:
        return torch.where(positions < 0, -1.0, 1.0).double()
    return positions.round()


def from_grid(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Convert integer ``codes`` to values in [-scale, scale], in the dtype of ``scale``; inverts :func:`to_grid`."""
    return (scale.double() * (codes.double() + 0.0) / largest_code(bits)).to(scale.dtype)  # + 0.0 makes -0.0 positive
