"""Optimize texts as word embeddings, and decode these to tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.settings import ImageSource, Shape, Start, TokenReading, VictimContext
from fl_privacy.models import TextModel
from fl_privacy.types import Observation


@dataclass(frozen=True, kw_only=True, eq=False)
class WordEmbeddings(ImageSource):
    """Source of a :class:`TextModel`'s inputs: word embeddings (V, B, L, d) for V victims with B texts of L words.

    The variables are embeddings divided by the root mean square of ``table`` (n, d), the embeddings of all n tokens.
    ``first``: function that draws the start. ``reading``: rule that decodes embeddings to tokens. ``norm``: see
    ``Settings.embedding_norm``.
    """

    table: Tensor
    first: Start
    reading: TokenReading
    norm: float = 0.0

    def start(self, context: VictimContext) -> Tensor:
        drawn, texts = self.first(context), context.observation.knowledge.previous
        if texts is None or texts.is_floating_point():
            return drawn.flatten()
        batch, longest, _ = context.shape
        tokens = torch.full((batch, longest), -1)
        kept = texts[:batch, :longest].cpu()
        tokens[: kept.shape[0], : kept.shape[1]] = kept
        words = self.variables_of(tokens.to(self.table.device)).cpu().to(drawn)
        return torch.where((tokens >= 0)[..., None], words, drawn.reshape(words.shape)).flatten()

    def held(self, context: VictimContext) -> Tensor:
        batch, longest, _ = context.shape
        lengths = known_lengths(context.observation)
        if lengths is None:
            return torch.ones(batch * longest)
        return (torch.arange(longest) < lengths.cpu()[:, None]).float().flatten()

    def images(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        batch, longest, width = shape
        there = held.reshape(-1, batch, longest, 1).to(variables.dtype)
        return torch.cat([self._unit * variables.reshape(-1, batch, longest, width), there], -1)

    def penalty(self, variables: Tensor, shape: Shape) -> Tensor:
        if not self.norm:
            return variables.new_zeros(len(variables))
        lengths = variables.reshape(len(variables), -1, shape[-1]).norm(dim=-1).mean(1)
        return cast(Tensor, self.norm * (lengths / (self.table.norm(dim=1).mean() / self._unit) - 1).square())

    @torch.no_grad()
    def read(self, inputs: Tensor) -> Tensor:
        """Decode embeddings (..., L, d + 1) to tokens (..., L), and to -1 after the end, where the last column is 0."""
        found = inputs[..., :-1]
        if self.reading == "nearest":
            scores = torch.nn.functional.normalize(found, dim=-1) @ torch.nn.functional.normalize(self.table, dim=1).T
        else:
            scores = found @ self._inverse
        return scores.argmax(-1).masked_fill(inputs[..., -1] < 0.5, -1)

    def variables_of(self, tokens: Tensor) -> Tensor:
        return self.table[tokens.clamp_min(0)] / self._unit * (tokens >= 0).unsqueeze(-1)

    @cached_property
    def _inverse(self) -> Tensor:
        return cast(Tensor, torch.linalg.pinv(self.table))

    @cached_property
    def _unit(self) -> float:
        return float(self.table.square().mean().sqrt())


def known_lengths(observation: Observation) -> Tensor | None:
    """Return the lengths (B,) of the texts; ``None`` if they are unknown."""
    given, model = observation.knowledge.lengths, observation.model
    if given is not None or not isinstance(model, TextModel) or model.position_weight is None:
        return given
    rows = observation.update().get(model.position_weight)
    if rows is None or observation.upload.num_examples != 1:
        return None
    seen = (rows[model.first_position :].abs().amax(1) > 0).nonzero().flatten()
    return seen[-1:] + 1 if 0 < len(seen) < len(rows) - model.first_position else None


def longest_text(observations: Sequence[Observation]) -> int:
    """Return the largest length L that a text of ``observations`` can have."""
    found = [(known_lengths(o), o.input_shape[0]) for o in observations]
    return max(longest if lengths is None else int(lengths.max()) for lengths, longest in found)
