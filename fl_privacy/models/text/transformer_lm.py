"""The language model that SAPAG attacks (Wang et al. 2020, section VII)."""

import math

import torch
from torch import Tensor, nn

from fl_privacy.models.layers import require_positive
from fl_privacy.models.text.base import Block, TextModel, weights_of_blocks
from fl_privacy.models.text.bert import expect_divides


class TransformerLM(TextModel):
    """A position encoder, two transformer encoder layers and a linear decoder, as the paper describes it.

    The embeddings are drawn uniformly and 5,000 wide, so that with a smaller vocabulary tokens follow from embeddings
    by the pseudo-inverse; ``width=200`` makes it a model of everyday size. A token sees those before it alone.

    Args:
        vocabulary_size: tokens.
        max_length: of a text.
        num_classes: K.
        next_token: whether each next token is predicted; otherwise the mean over the tokens is classified.
        width: d, even.
        layers: blocks.
        heads: of each, that divide ``width``.
        hidden: width of the feed-forward networks.
        bound: the embeddings are drawn from U(-bound, bound).
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        max_length: int,
        num_classes: int,
        next_token: bool = False,
        width: int = 5000,
        layers: int = 2,
        heads: int = 4,
        hidden: int = 200,
        bound: float = 0.1,
    ) -> None:
        super().__init__()
        require_positive(width=width, layers=layers, heads=heads, hidden=hidden)
        expect_divides(2 * heads, width)
        self.causal, self.next_token = next_token, next_token
        self.words = nn.Embedding(vocabulary_size, width)
        nn.init.uniform_(self.words.weight, -bound, bound)
        self.blocks = nn.ModuleList(
            Block(width, heads, hidden, causal=next_token, norm_first=False) for _ in range(layers)
        )
        self.decoder = nn.Linear(width, num_classes)
        self._scale, self._waves = math.sqrt(width), _waves(max_length, width)

    @property
    def attention_weights(self) -> list[tuple[str, ...]]:
        return weights_of_blocks("blocks", len(self.blocks))

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        states = embeddings * self._scale + self._waves[: embeddings.shape[-2]].to(embeddings)
        for block in self.blocks:
            states = block(states, there)
        if self.next_token:
            predicted: Tensor = self.decoder(states).mT
            return predicted
        weights = there.to(states.dtype).unsqueeze(-1)
        classes: Tensor = self.decoder((states * weights).sum(1) / weights.sum(1).clamp_min(1))
        return classes


def _waves(length: int, width: int) -> Tensor:
    """(L, d) sines and cosines of positions (Vaswani et al. 2017)."""
    at = torch.arange(length).unsqueeze(1)
    speed = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    return torch.stack([(at * speed).sin(), (at * speed).cos()], 2).flatten(1)
