"""DAGER reads texts exactly, and says so only where they are."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import Dager
from fl_privacy.attacks.text.token_candidates import entering_block
from fl_privacy.models import ADAPTED, Adapted, TextModel, bert_tiny, gpt_tiny, with_adapters
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.transformers import Bert, Gpt
from fl_privacy.types import Batch, Certainty, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

VOCABULARY, LONGEST = 120, 12


def encoder() -> TextModel:
    return Bert(
        vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=3, width=64, layers=3, heads=2, hidden=64, std=0.2
    )


def decoder() -> TextModel:
    return Gpt(vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=3, width=64, layers=3, heads=2, hidden=64)


def language_model() -> TextModel:
    return gpt_tiny(vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=VOCABULARY, next_token=True)


def texts(lengths: list[int], seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=rng)
    tokens[:, 0] = 1
    return tokens.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], -1)


def observed(make: Callable[[], TextModel], tokens: torch.Tensor, *, told: bool = True) -> Observation:
    torch.manual_seed(1)
    model = make()
    labels = torch.arange(len(tokens)) % 3
    if model.next_token:
        follows = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), -1)], 1)
        labels = follows.masked_fill(follows < 0, -100)
    state = ModelState.of(model)
    gradients = loss_gradients(model, state, Batch(tokens, labels)).gradients
    return Observation(
        id=VictimId(0, 0, 0),
        model=model,
        sent=state,
        upload=Upload(tensors=dict(gradients), num_examples=len(tokens)),
        plan=LocalPlan(),
        input_shape=(LONGEST,),
        num_classes=VOCABULARY if model.next_token else 3,
        knowledge=Knowledge(lengths=(tokens >= 0).sum(1) if told else None),
    )


def without_rows(observation: Observation) -> Observation:
    """Where the gradient of the embeddings is not uploaded."""
    tensors = {n: t for n, t in observation.upload.tensors.items() if n not in ("words.weight", "positions.weight")}
    return replace(observation, upload=replace(observation.upload, tensors=tensors))


def rows(tokens: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row[row >= 0].tolist()) for row in tokens}


def test_of_every_token_is_seen_what_enters_a_last_block() -> None:
    model, tokens = two_layers().double(), texts([5, 5])
    before = model.embedding_norm(model.positions(model.embedded(tokens)[0]))
    entering = [before, model.blocks[0](before, tokens >= 0)]
    for block, expected in enumerate(entering):
        assert torch.allclose(entering_block(model, tokens, block), expected)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("make", [encoder, decoder, language_model])
def test_a_single_text_is_read_exactly_and_proven(make: Callable[[], TextModel], told: bool) -> None:
    tokens = texts([9])
    observation = observed(make, tokens, told=told)
    for seen in (observation, without_rows(observation)) if make is not language_model else (observation,):
        (found,) = Dager()([seen], seed=0)
        assert found.batch is not None and rows(found.batch.inputs) == rows(tokens)
        assert found.certainty is Certainty.PROVEN
        if make is not language_model:
            assert found.batch.labels.tolist() == [0]


def two_layers() -> Bert:
    """Of whose second block the gradient tells no more than what became of each text's first token."""
    return bert_tiny(vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=3)


@pytest.mark.parametrize(
    ("make", "lengths"),
    [(encoder, [7, 5, 8]), (decoder, [7, 5, 8]), (language_model, [7, 5, 8]), (two_layers, [9, 8])],
)
def test_a_batch_is_read_exactly_and_proven(make: Callable[[], TextModel], lengths: list[int]) -> None:
    tokens = texts(lengths)
    (found,) = Dager()([observed(make, tokens)], seed=0)
    assert found.batch is not None and rows(found.batch.inputs) == rows(tokens)
    assert found.certainty is Certainty.PROVEN


def adapted(*, begun: bool) -> TextModel:
    """With adapters whose B is zero, as in the first round, or no longer."""
    model = with_adapters(encoder(), rank=16)
    for module in model.modules():
        if begun and isinstance(module, Adapted):
            torch.nn.init.normal_(module.lora_b.weight, std=0.1)
    return model


@pytest.mark.parametrize("begun", [False, True])
def test_adapters_give_a_text_away_that_is_shorter_than_their_rank(begun: bool) -> None:
    tokens = texts([9])
    observation = observed(lambda: adapted(begun=begun), tokens)
    plan = LocalPlan(trained=ADAPTED)
    held = plan.held(observation.upload.tensors)
    tensors = {name: value for name, value in observation.upload.tensors.items() if name not in held}
    assert all("lora" in name or "classifier" in name for name in tensors)
    (found,) = Dager()([replace(observation, plan=plan, upload=replace(observation.upload, tensors=tensors))], seed=0)
    assert found.batch is not None and rows(found.batch.inputs) == rows(tokens)
    assert found.certainty is Certainty.PROVEN


@pytest.mark.long
def test_nothing_is_proven_of_more_tokens_than_the_model_is_wide() -> None:
    (found,) = Dager()([observed(encoder, texts([12] * 8))], seed=0)
    assert found.certainty is not Certainty.PROVEN


def with_triplets(make: Callable[[], TextModel]) -> TextModel:
    """Every word has two others with its embedding."""
    model = make()
    with torch.no_grad():
        third = VOCABULARY // 3
        model.words.weight.copy_(model.words.weight[:third].repeat(3, 1))
    return model


@pytest.mark.parametrize("lengths", [[4], [4, 4, 3]])
@pytest.mark.parametrize("make", [encoder, decoder, two_layers])
def test_nothing_is_proven_of_words_that_nobody_can_tell_apart(
    make: Callable[[], TextModel], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = texts(lengths)
    tokens = torch.where(tokens < 0, tokens, tokens % (VOCABULARY // 3))
    observation = without_rows(observed(lambda: with_triplets(make), tokens))
    for most in (4096, len(lengths)):  # where so few prefixes are followed that no other text is met
        monkeypatch.setattr("fl_privacy.attacks.text.dager._MOST_PREFIXES", most)
        (found,) = Dager()([observation], seed=0)
        assert found.certainty is not Certainty.PROVEN


@pytest.mark.long
@pytest.mark.parametrize("lengths", [[6], pytest.param([6, 7], marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("make", [encoder, decoder, two_layers])
def test_nothing_is_proven_of_what_a_defense_has_changed(make: Callable[[], TextModel], lengths: list[int]) -> None:
    """Noise, pruning and rounding: whatever is read is right, or not said to be proven."""
    rng = torch.Generator().manual_seed(3)
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "noise": lambda g: g + 1e-3 * torch.randn(g.shape, generator=rng),
        "faint noise": lambda g: g + 1e-9 * torch.randn(g.shape, generator=rng),
        "pruned": lambda g: g * (g.abs() >= g.abs().flatten().quantile(0.2)),
        "rounded": lambda g: (g / g.abs().max().clamp_min(1e-12) * 127).round() * g.abs().max() / 127,
    }
    tokens = texts(lengths)
    clean = observed(make, tokens)
    for name, change in changes.items():
        upload = replace(clean.upload, tensors={n: change(g) for n, g in clean.upload.tensors.items()})
        (found,) = Dager()([replace(clean, upload=upload)], seed=0)
        if found.certainty is Certainty.PROVEN:
            assert found.batch is not None and rows(found.batch.inputs) == rows(tokens), name
        if name in ("noise", "pruned", "rounded"):
            assert found.certainty is not Certainty.PROVEN, name


def test_an_image_model_and_withheld_layers_are_said() -> None:
    observation = observed(encoder, texts([6]))
    tensors = {n: t for n, t in observation.upload.tensors.items() if not n.startswith("blocks.0.attention")}
    (found,) = Dager()([replace(observation, upload=replace(observation.upload, tensors=tensors))], seed=0)
    assert "was withheld" in str(found.failure)
