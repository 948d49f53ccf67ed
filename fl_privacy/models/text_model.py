"""Interface of text models with the properties that attacks on tokens need, and layers of transformers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.types.modality import TEXTS, Modality


class TextModel(nn.Module, ABC):
    """Base class of transformers for texts.

    Inputs are token numbers (B, L) int64, padded with -1 on the right, or word embeddings (B, L, d + 1) float, whose
    last column is 1 for a token and 0 for padding. Logits are (B, K) for texts, or (B, K, L) for each next token.
    """

    modality: ClassVar[Modality] = TEXTS

    words: nn.Embedding  # token embeddings
    causal: bool  # ``True`` if a token's state does not depend on later tokens
    next_token: bool = False  # ``True`` if each next token is predicted, instead of the text's class
    position_weight: str | None = None  # name of the position embeddings (P, d); ``None`` if none are learned
    first_position: int = 0  # row of the position embeddings for a text's first token; 2 in RoBERTa and OPT
    heads: int = 1  # number of attention heads of each block
    transposed: bool = False  # ``True`` if the attention's weights are (inputs, outputs)

    @property
    @abstractmethod
    def attention_weights(self) -> Sequence[tuple[str, ...]]:
        """Return each block's names of query, key and value weights, (out, d), or (d, out) if :attr:`transposed`."""

    @property
    def entry_norm(self) -> nn.LayerNorm | None:
        return None

    @property
    def word_weight(self) -> str:
        return next(name for name, parameter in self.named_parameters() if parameter is self.words.weight)

    @abstractmethod
    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        """Return the logits of word embeddings (B, L, d); ``there`` (B, L) is false for padding."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits(*self.embedded(inputs))

    def embedded(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings (B, L, d) of ``inputs``, tokens or embeddings, and booleans (B, L), false for padding."""
        if inputs.is_floating_point():
            return inputs[..., :-1], inputs[..., -1] > 0.5
        there = inputs >= 0
        return self.words(inputs.clamp_min(0)) * there.unsqueeze(-1), there


class BlockModel(TextModel):
    """Base class of text models that apply one of their :attr:`blocks` after another."""

    blocks: nn.ModuleList

    @property
    def attention_weights(self) -> list[tuple[str, ...]]:
        names = ("query", "key", "value")
        return [tuple(f"blocks.{k}.attention.{name}.weight" for name in names) for k in range(len(self.blocks))]

    def through_blocks(self, states: Tensor, there: Tensor, *, first: bool = False) -> Tensor:
        """Return states (B, L, d) after all blocks, or the ``first`` token's (B, 1, d); ``there`` (B, L): tokens."""
        last = len(self.blocks) - 1
        for number, block in enumerate(self.blocks):
            states = block(states, there, first=first and number == last)
        return states


def mean_state(states: Tensor, there: Tensor) -> Tensor:
    """Return the mean (B, d) of the states (B, L, d) of the tokens that are ``there`` (B, L)."""
    weights = there.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


def last_state(states: Tensor, there: Tensor) -> Tensor:
    """Return the state (B, d) of each text's last token; ``there`` (B, L) is false for padding."""
    last = (there & ~nn.functional.pad(there, (0, 1))[..., 1:]).to(states.dtype)
    return (states * last.unsqueeze(-1)).sum(1)


class Attention(nn.Module):
    """Multi-head self-attention that supports ``vmap`` and double differentiation.

    ``heads`` divides the ``width`` d. If ``causal``, a token attends only to itself and to earlier tokens.
    """

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, inputs: Tensor, there: Tensor, *, first: bool = False) -> Tensor:
        """Return the attention's outputs (B, L, d), or the ``first`` token's (B, 1, d); ``there`` (B, L): tokens."""
        (batch, length, width), asking = inputs.shape, inputs[:, :1] if first else inputs
        query, key, value = (
            layer(states).reshape(batch, -1, self.heads, width // self.heads).transpose(1, 2)
            for layer, states in ((self.query, asking), (self.key, inputs), (self.value, inputs))
        )
        scores = query @ key.mT * (self.heads / width) ** 0.5
        seen = there[:, None, None, :]
        if self.causal:
            seen = seen & torch.ones(asking.shape[1], length, dtype=torch.bool, device=inputs.device).tril()
        mixed = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) @ value
        return cast(Tensor, self.output(mixed.transpose(1, 2).reshape(asking.shape)))


class Positions(nn.Module):
    """Learned position embeddings, added to each token."""

    def __init__(self, length: int, width: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(std * torch.randn(length, width))

    def forward(self, embeddings: Tensor) -> Tensor:
        return embeddings + self.weight[: embeddings.shape[-2]]


class Block(nn.Module):
    """Transformer block: attention and a feed-forward network, each with a residual path and a layer norm.

    ``norm_first`` normalizes the inputs, like GPT-2, instead of the sums, like BERT.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, causal: bool, norm_first: bool, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.norm = nn.LayerNorm(width, eps=eps)
        self.norm_first = norm_first

    def forward(self, inputs: Tensor, there: Tensor, *, first: bool = False) -> Tensor:
        kept = inputs[:, :1] if first else inputs
        if self.norm_first:
            between = kept + self.attention(self.attention_norm(inputs), there, first=first)
            return cast(Tensor, between + self.feed_forward(self.norm(between)))
        between = self.attention_norm(kept + self.attention(inputs, there, first=first))
        return cast(Tensor, self.norm(between + self.feed_forward(between)))


def expect_divides(heads: int, width: int) -> None:
    """Raise ``UserError`` unless ``heads`` divides ``width``."""
    if width % heads:
        multiple = f"a multiple of model.heads={heads}"
        raise UserError(f"model.width is expected to be {multiple}, but got {width}; try {8 * heads}.")


def initialize_as_bert(model: nn.Module, std: float) -> None:
    """Sample weights of linear layers and embeddings from N(0, std^2), and set biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
