"""Encoders and decoders of transformers as models of text, from a folder on this machine."""

from pathlib import Path

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.models import hugging_face
from fl_privacy.models.huggingface import HuggingFaceText

transformers = pytest.importorskip("transformers")

SMALL = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "roberta": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "pad_token_id": 1,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1},
}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "next_token"), [("bert", False), ("roberta", False), ("gpt2", False), ("gpt2", True)])
def test_a_model_from_a_folder_reads_tokens_and_embeddings(tmp_path: Path, kind: str, next_token: bool) -> None:
    transformers.AutoConfig.for_model(kind, vocab_size=60, **SMALL[kind]).save_pretrained(tmp_path)
    settings = {"vocabulary_size": 60, "name": str(tmp_path), "pretrained": False, "next_token": next_token}
    torch.manual_seed(0)
    model = hugging_face(num_classes=60 if next_token else 3, **settings).eval()  # type: ignore[arg-type]
    tokens = torch.tensor([[1, 5, 7, 2, -1], [3, 4, 2, -1, -1]])
    logits = model(tokens)
    assert logits.shape == ((2, 60, 5) if next_token else (2, 3))
    embeddings, there = model.embedded(tokens)
    assert torch.allclose(model(torch.cat([embeddings, there[..., None].float()], -1)), logits, atol=1e-5)
    alone = model(tokens[1:, :3])[0]
    assert torch.allclose(alone, logits[1][..., :3], atol=1e-5), "padding changes nothing"
    named = dict(model.named_parameters())
    assert model.causal == (kind == "gpt2") and len(model.attention_weights) == 2
    assert all(name in named for block in model.attention_weights for name in block)
    assert named[model.word_weight] is model.words.weight
    (rows,) = torch.autograd.grad(model(tokens).square().sum(), named[str(model.position_weight)])
    first = int(rows.abs().amax(1).nonzero()[0])
    assert model.first_position == first == (2 if kind == "roberta" else 0)


def test_positions_that_are_not_trained_are_taken_as_they_are(tmp_path: Path) -> None:
    """Fixed ones, and all parameters frozen by who trains the head alone."""
    small = SMALL["roberta"]
    fixed = transformers.AutoConfig.for_model("roformer", vocab_size=60, embedding_size=32, **small)
    fixed.save_pretrained(tmp_path)
    model = hugging_face(vocabulary_size=60, num_classes=3, name=str(tmp_path), pretrained=False)
    assert model.first_position == 0

    network = transformers.RobertaModel(transformers.RobertaConfig(vocab_size=60, **small)).requires_grad_(False)
    frozen = HuggingFaceText(network, num_classes=3, next_token=False)
    assert frozen.first_position == 2
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_a_name_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.name"):
        hugging_face(vocabulary_size=60, num_classes=2, name=str(tmp_path))
