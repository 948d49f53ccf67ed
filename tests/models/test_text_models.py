"""Models of text: padding changes nothing, embeddings stand for tokens, decoders do not look ahead."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.models import (
    ADAPTED,
    TextModel,
    TransformerLM,
    bert_mini,
    bert_tiny,
    build_fitting,
    check_text_model,
    gpt_tiny,
    with_adapters,
)
from fl_privacy.models.transformers import minilm
from fl_privacy.types import LocalPlan

BERT_FACTS = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 4,
    "max_position_embeddings": 8,
}
"""Of a small BERT, as Hugging Face's ``config.json`` has them."""

FACTS = {"vocabulary_size": 50, "max_length": 10, "num_classes": 3}
LM = {**FACTS, "num_classes": 50, "next_token": True}

MODELS: dict[str, Callable[[], TextModel]] = {
    "bert_tiny": lambda: bert_tiny(**FACTS),
    "bert_tiny mean": lambda: bert_tiny(**FACTS, pooling="mean"),
    "bert_mini": lambda: bert_mini(**FACTS),
    "gpt_tiny": lambda: gpt_tiny(**FACTS),
    "gpt_tiny lm": lambda: gpt_tiny(**LM),  # type: ignore[arg-type]
    "transformer_lm": lambda: TransformerLM(**LM, width=16),  # type: ignore[arg-type]
    "transformer_lm class": lambda: TransformerLM(**FACTS, width=16),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> TextModel:
    torch.manual_seed(0)
    return MODELS[request.param]().double()


@pytest.fixture
def tokens() -> Tensor:
    return torch.tensor([[1, 7, 9, 4, 2, -1, -1], [1, 8, 2, -1, -1, -1, -1], [3, 3, 5, 6, 7, 8, 9]])


def test_padding_changes_nothing(model: TextModel, tokens: Tensor) -> None:
    together = model(tokens)
    for row, text in enumerate(tokens):
        length = int((text >= 0).sum())
        alone = model(text[None, :length])[0]
        assert torch.allclose(together[row][..., : alone.shape[-1]], alone)


@pytest.mark.parametrize("make", [bert_tiny, gpt_tiny])
def test_the_last_block_computes_no_more_of_the_first_token_than_is_asked_for(make, tokens: Tensor) -> None:
    model = make(**FACTS).double()
    embeddings, there = model.embedded(tokens)
    whole, first = (model.through_blocks(embeddings, there, first=one) for one in (False, True))
    assert first.shape == (3, 1, 128)
    assert torch.allclose(first, whole[:, :1])


def test_a_bert_passes_the_first_token_alone_through_the_end_of_its_last_block(tokens: Tensor) -> None:
    seen, model = [], bert_tiny(**FACTS)
    for block in model.blocks:
        block.feed_forward.register_forward_hook(lambda _, given, found: seen.append(found.shape[1]))
    model(tokens)
    assert seen == [7, 1]


def test_embeddings_stand_for_tokens(model: TextModel, tokens: Tensor) -> None:
    embeddings, there = model.embedded(tokens)
    assert torch.allclose(model(torch.cat([embeddings, there[..., None].double()], -1)), model(tokens))


def test_adapters_change_nothing_at_first_and_are_what_is_trained(model: TextModel, tokens: Tensor) -> None:
    beside = with_adapters(model, rank=2).double()
    assert torch.equal(beside(tokens), model(tokens))
    trained = set(dict(beside.named_parameters())) - LocalPlan(trained=ADAPTED).held(dict(beside.named_parameters()))
    assert sum("lora" in name for name in trained) == 2 * 2 * len(model.attention_weights)
    assert not any("attention" in name and "lora" not in name for name in trained)
    with pytest.raises(UserError, match=r"model\.lora_rank"):
        with_adapters(model, rank=10**6)


def test_what_it_says_of_itself_is_so(model: TextModel, tokens: Tensor) -> None:
    named = dict(model.named_parameters())
    assert named[model.word_weight] is model.words.weight
    assert all(named[name].shape[1] == model.words.embedding_dim for block in model.attention_weights for name in block)
    assert model.position_weight is None or model.position_weight in named
    if model.next_token:
        changed = tokens.clone()
        changed[2, -1] = 11
        assert torch.allclose(model(changed)[2, :, :-1], model(tokens)[2, :, :-1]) and model.causal


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="is of text, but the data are images"):
        build_fitting(bert_tiny, {"in_channels": 1, "image_size": 8, "num_classes": 2}, seed=0)
    with pytest.raises(UserError, match="TextModel"):
        check_text_model(torch.nn.Linear(2, 2), 4, 2)
    with pytest.raises(UserError, match=r"model\.heads"):
        TransformerLM(**FACTS, width=10, heads=4)
    check_text_model(bert_tiny(**FACTS), 10, 3)


@pytest.mark.parametrize(
    "facts",
    [
        "[]",
        "{}",
        json.dumps({**BERT_FACTS, "hidden_size": 20_000, "num_hidden_layers": 1_000, "intermediate_size": 80_000}),
        json.dumps({**BERT_FACTS, "vocab_size": 10**400}),
        json.dumps({**BERT_FACTS, "num_hidden_layers": "x"}),
    ],
)
def test_a_folder_that_claims_another_bert_is_refused_before_one_is_made(facts: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(facts)
    save_file({"embeddings.word_embeddings.weight": torch.zeros(10, 8)}, tmp_path / "model.safetensors")
    started = time.process_time()
    with pytest.raises(UserError, match="expected to hold a BERT"):
        minilm(vocabulary_size=10, max_length=8, num_classes=2, folder=str(tmp_path))
    assert time.process_time() - started < 2


def test_a_damaged_bert_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT_FACTS))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="expected to hold a BERT"):
        minilm(vocabulary_size=10, max_length=8, num_classes=2, folder=str(tmp_path))


def test_a_bert_of_a_folder_has_its_values(tmp_path: Path) -> None:
    linear = {
        **{f"attention.self.{name}": (8, 8) for name in ("query", "key", "value")},
        "attention.output.dense": (8, 8),
        "intermediate.dense": (4, 8),
        "output.dense": (8, 4),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (10, 8),
        "embeddings.position_embeddings.weight": (8, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
        "pooler.dense.weight": (8, 8),
        "pooler.dense.bias": (8,),
    }
    for name, shape in linear.items():
        shapes |= {f"encoder.layer.0.{name}.weight": shape, f"encoder.layer.0.{name}.bias": shape[:1]}
    for name in ("embeddings", "encoder.layer.0.attention.output", "encoder.layer.0.output"):
        shapes |= {f"{name}.LayerNorm.weight": (8,), f"{name}.LayerNorm.bias": (8,)}
    values = {f"bert.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(BERT_FACTS))
    made = minilm(vocabulary_size=10, max_length=6, num_classes=2, folder=str(tmp_path))
    assert torch.equal(made.words.weight, values["bert.embeddings.word_embeddings.weight"])
    assert made.logits(made.words(torch.tensor([[1, 2, 3]])), torch.ones(1, 3, dtype=torch.bool)).shape == (1, 2)
    (tmp_path / "config.json").write_text(json.dumps({**BERT_FACTS, "intermediate_size": 1 << 40}))
    with pytest.raises(UserError, match="is of shape"):
        minilm(vocabulary_size=10, max_length=6, num_classes=2, folder=str(tmp_path))
