"""GPT-2 style decoders (Radford et al. 2019)."""

from torch import Tensor, nn

from fl_privacy.models.layers import require_positive
from fl_privacy.models.text.base import Block, Positions, TextModel, initialize_as_bert, weights_of_blocks
from fl_privacy.models.text.bert import expect_divides


class Gpt(TextModel):
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

    @property
    def attention_weights(self) -> list[tuple[str, ...]]:
        return weights_of_blocks("blocks", len(self.blocks))

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        states = self.positions(embeddings)
        for block in self.blocks:
            states = block(states, there)
        states = self.norm(states)
        if self.next_token:
            predicted: Tensor = self.head(states).mT
            return predicted
        last = (there & ~nn.functional.pad(there, (0, 1))[..., 1:]).to(states.dtype)
        classes: Tensor = self.head((states * last.unsqueeze(-1)).sum(1))
        return classes


def gpt_tiny(*, vocabulary_size: int, max_length: int, num_classes: int, next_token: bool = False) -> Gpt:
    """2 layers, 128 wide, 4 heads."""
    return Gpt(vocabulary_size=vocabulary_size, max_length=max_length, num_classes=num_classes, next_token=next_token)
