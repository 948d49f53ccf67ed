"""Find the subspace that the inputs of a block span, from the gradient of its first layers."""

import math
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.models import TextModel, adapter_of, down_projection
from fl_privacy.models.gradients.hooks import entering, replaced_input
from fl_privacy.types import Tensors

_ABOVE_NOISE = 8.0
"""Multiple of the smallest singular values above which others are not noise."""

_ROUNDING = 1e-7
"""Share of the largest singular value below which others are rounding in single precision."""


@dataclass(frozen=True, eq=False)
class Span:
    """Row space of the gradient of linear layers, which holds their inputs (DAGER, theorem 3.1).

    Attributes:
        basis: (r, d) orthonormal rows, float64.
        width: d.
        through: (d, n) projection of the inputs in front of the layers, an adapter's A, if any.
    """

    basis: Tensor
    width: int
    through: Tensor | None = None

    @property
    def rank(self) -> int:
        return len(self.basis)

    @property
    def scale(self) -> float:
        """Return the root mean square distance of a random vector of length 1."""
        return math.sqrt(max(0.0, 1 - self.rank / self.width))

    def distance(self, vectors: Tensor) -> Tensor:
        """Return the distance of ``vectors`` (..., d), relative to length and :attr:`scale`: about 1 if random."""
        if self.through is not None:
            vectors = vectors @ self.through.to(vectors).T
        basis = self.basis.to(vectors)
        rest = vectors - (vectors @ basis.T) @ basis
        apart: Tensor = rest.norm(dim=-1) / vectors.norm(dim=-1).clamp_min(1e-12) / max(self.scale, 1e-12)
        return apart


def span_of(model: TextModel, gradient: Tensors, block: int, *, queries: bool = False, least: float = 0.0) -> Span:
    """Find the span of the inputs of the attention of ``block``, from the stacked gradients of its layers.

    Singular values near the smallest are noise. With an adapter B A x, the gradient of A counts, or while B is zero
    that of B.

    Args:
        queries: ``True`` for the first layer alone.
        least: singular values below are rounding.

    Raises:
        NotAttackableError: no such gradient was uploaded.
    """
    names = model.attention_weights[block][: 1 if queries else None]
    adapters = [found for name in names if (found := adapter_of(model, name)) is not None]
    there = [gradient[a].double() for a, _ in adapters if a in gradient and bool(gradient[a].any())]
    there += [(gradient[name].T if model.transposed else gradient[name]).double() for name in names if name in gradient]
    if there:
        return Span(*_row_space(torch.cat(there), least))
    beside = [(_row_space(gradient[b].double()), down_projection(model, b)) for _, b in adapters if b in gradient]
    if not beside:
        raise NotAttackableError(f"A gradient of {names[0]} is expected, but was withheld.")
    (basis, width), through = max(beside, key=lambda pair: len(pair[0][0]))
    return Span(basis, width, through)


def _row_space(rows: Tensor, least: float = 0.0) -> tuple[Tensor, int]:
    """Return orthonormal rows (r, d) of a gradient (O, d) without its noise, and d."""
    values, directions = torch.linalg.svd(rows, full_matrices=False)[1:]
    width = rows.shape[1]
    noise = float(values[-max(1, width // 8) :].median()) if len(values) == width else 0.0
    kept = values > max(_ABOVE_NOISE * noise, _ROUNDING * float(values[0]), least)
    return directions[kept], width


class _EnteredError(Exception):
    """Ends a forward pass early."""


@torch.no_grad()
def entering_block(model: TextModel, inputs: Tensor, block: int) -> Tensor:
    """Return the inputs (B, L, d) of the attention of ``block`` for ``inputs``."""
    names, length = [name.rpartition(".")[0] for name in model.attention_weights[block]], inputs.shape[1]

    def stop(states: Tensor) -> Tensor:
        if states.shape[1] == length:  # in a last block the first token alone may have a query
            raise _EnteredError
        return states

    with ExitStack() as stack:
        calls = stack.enter_context(entering({name: model.get_submodule(name) for name in names}))
        for name in names:
            stack.enter_context(replaced_input(model.get_submodule(name), stop))
        with suppress(_EnteredError):
            model(inputs)
    return calls[-1].inputs


def readable_model(model: nn.Module) -> TextModel:
    """Return ``model`` if it is one of text.

    Raises:
        NotAttackableError: it is another.
    """
    if not isinstance(model, TextModel):
        raise NotAttackableError(f"A model of text is expected, but {type(model).__name__} is none.")
    return model
