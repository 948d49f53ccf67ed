"""Where robust data live: the pixels of images, or the embeddings of words."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from fl_privacy.defenses.data.robust_data import Privacy
from fl_privacy.defenses.defense import LocalStep
from fl_privacy.evaluator import CachedEvaluator, WordBox, WordEvaluator, uniform_noise
from fl_privacy.models import TextModel

Judge = Literal["evaluator", "mse"]
"""What says how private robust data are: the evaluation network, or their mean squared distance to the true ones."""


class RobustSpace(Protocol):
    """Coordinates in [0, 1] of the inputs of a batch, (B, ...)."""

    @property
    def withheld(self) -> frozenset[str]:
        """Names of parameters whose gradient robust data do not have."""
        ...

    @property
    def true(self) -> Tensor:
        """Those of the true inputs."""
        ...

    def noise(self, rng: torch.Generator) -> Tensor:
        """Those of inputs without any meaning."""
        ...

    def inputs(self, coordinates: Tensor) -> Tensor:
        """What the model takes, differentiable."""
        ...

    def privacy(self, kind: Judge) -> Privacy:
        """PM."""
        ...


@dataclass(frozen=True, eq=False)
class Pixels:
    """Of images, whose noise is uniform.

    Attributes:
        true: (B, C, H, W) in [0, 1].
        judge: of noise.
    """

    true: Tensor
    judge: CachedEvaluator

    @property
    def withheld(self) -> frozenset[str]:
        return frozenset()

    def noise(self, rng: torch.Generator) -> Tensor:
        return uniform_noise(self.true, rng)

    def inputs(self, coordinates: Tensor) -> Tensor:
        return coordinates

    def privacy(self, kind: Judge) -> Privacy:
        if kind == "evaluator":
            return self.judge(self.true.shape[1:], self.true.device)
        return lambda images: (images - self.true).flatten(1).square().mean(1)


@dataclass(frozen=True, eq=False)
class Words:
    """Of texts: coordinates (B, L, d) of the embeddings of their words, whose noise are random words (appendix F).

    What the embeddings are learned by, the first layer, is neither trained nor uploaded.

    Attributes:
        tokens: (B, L), -1 where there is none.
        box: around the embeddings of all tokens.
        word_weight: name of the parameter that holds these.
        judge: of random words; ``None`` where nothing asks for it.
    """

    tokens: Tensor
    box: WordBox
    word_weight: str
    judge: WordEvaluator | None

    @property
    def withheld(self) -> frozenset[str]:
        return frozenset({self.word_weight})

    @cached_property
    def true(self) -> Tensor:
        return self.box.words(self.tokens)

    @cached_property
    def _there(self) -> Tensor:
        return self.tokens >= 0

    def noise(self, rng: torch.Generator) -> Tensor:
        return self.box.random_words(self.tokens.shape, rng)

    def inputs(self, coordinates: Tensor) -> Tensor:
        there = self._there.unsqueeze(-1).to(coordinates.dtype)
        return torch.cat([self.box.embeddings(coordinates) * there, there], -1)

    def privacy(self, kind: Judge) -> Privacy:
        if kind == "evaluator":
            assert self.judge is not None
            judge, there = self.judge, self._there
            return lambda words: judge(words, there)
        share = self._there.to(self.true.dtype) / self._there.sum(1, keepdim=True).clamp_min(1)
        return lambda words: ((words - self.true).square().mean(2) * share).sum(1)


def words_of(step: LocalStep, judge: WordEvaluator | None) -> Words:
    """The robust space of the texts of ``step``."""
    model = step.model
    assert isinstance(model, TextModel)
    table = step.sent.parameters[model.word_weight].detach()
    return Words(step.batch.inputs, WordBox(table), model.word_weight, judge)
