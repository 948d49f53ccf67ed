"""Language models: GPT-2 style decoders (Radford et al. 2019), and the one that SAPAG attacks (Wang et al. 2020)."""

import math

import torch
from torch import Tensor, nn

from fl_privacy.models.layers import require_positive
from fl_privacy.models.text.base import (
    Block,
    BlockModel,
    Positions,
    expect_divides,
    initialize_as_bert,
    last_state,
    mean_state,
)


class Gpt(BlockModel):
    """A decoder, with a classifier of its last token or a head for next tokens on top.

    Args:
        vocabulary_size: tokens.
        max_length: of a text.
        num_classes: K.
        next_token: whether each next token is predicted.
        width: d.
        layers: blocks.
        heads: of each, that divide ``width``.
        hidden: width of the feed-forward networks.
        tied: whether the head for next tokens is the embeddings of tokens again, as GPT-2's.
        std: of the weights at the start.
    """

    causal = True
    position_weight = "positions.weight"

    def __init__(
        self,
        *,
        vocabulary_size: int,
        max_length: int,
        num_classes: int,
        next_token: bool = False,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        hidden: int = 512,
        tied: bool = True,
    ) -> None:
        super().__init__()
        require_positive(width=width, layers=layers, heads=heads, hidden=hidden)
        expect_divides(heads, width)
        self.words = nn.Embedding(vocabulary_size, width)
        self.positions = Positions(max_length, width, 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, causal=True, norm_first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.next_token = next_token
        self.head = nn.Linear(width, num_classes, bias=not next_token)
        initialize_as_bert(self, 0.02)
        if next_token and tied:
            self.head.weight = self.words.weight

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        states = self.norm(self.through_blocks(self.positions(embeddings), there))
        predicted: Tensor = self.head(states).mT if self.next_token else self.head(last_state(states, there))
        return predicted


def gpt_tiny(*, vocabulary_size: int, max_length: int, num_classes: int, next_token: bool = False) -> Gpt:
    """2 layers, 128 wide, 4 heads."""
    return Gpt(vocabulary_size=vocabulary_size, max_length=max_length, num_classes=num_classes, next_token=next_token)


class TransformerLM(BlockModel):
    """The language model that SAPAG attacks (Wang et al. 2020, section VII).

    A position encoder, two transformer encoder layers and a linear decoder, as the paper describes it.

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

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        waves = self._waves[: embeddings.shape[-2]].to(embeddings)
        states = self.through_blocks(embeddings * self._scale + waves, there)
        predicted: Tensor = self.decoder(states).mT if self.next_token else self.decoder(mean_state(states, there))
        return predicted


def _waves(length: int, width: int) -> Tensor:
    """(L, d) sines and cosines of positions (Vaswani et al. 2017)."""
    at = torch.arange(length).unsqueeze(1)
    speed = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    return torch.stack([(at * speed).sin(), (at * speed).cos()], 2).flatten(1)
