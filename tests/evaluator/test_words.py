"""The evaluation network for texts."""

from pathlib import Path

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.evaluator import (
    EvaluatorPlan,
    WordBox,
    mix_with_random_words,
    random_word_curve,
    train_word_evaluator,
)
from fl_privacy.models.pretrained.evaluator_files import find_evaluator, find_word_evaluator, save_evaluator

VOCABULARY, WIDTH = 200, 16
PLAN = EvaluatorPlan(widths=(16,), epochs=6, batch_size=32, lr=1e-2)


def public(number: int, seed: int = 0) -> torch.Tensor:
    """Texts of the first ten tokens alone, of 4 to 9 words."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, (number, 9), generator=rng)
    lengths = torch.randint(4, 10, (number, 1), generator=rng)
    return tokens.masked_fill(torch.arange(9) >= lengths, -1)


def table() -> torch.Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(7))


def test_embeddings_are_in_the_box_of_all_tokens_and_come_back() -> None:
    box = WordBox(table())
    coordinates = box.coordinates(table())
    assert coordinates.amin() == 0 and coordinates.amax() == 1
    assert torch.allclose(box.embeddings(coordinates), table(), atol=1e-5)


def test_words_are_exchanged_or_blended_by_their_share() -> None:
    box, tokens = WordBox(table()), torch.zeros(2, 2000, dtype=torch.long)
    ratios, blended = torch.tensor([0.3, 0.3]), torch.tensor([False, True])
    words, shares = mix_with_random_words(box, tokens, ratios, torch.Generator().manual_seed(0), blended=blended)
    kept = (words[0] == box.words(tokens[0])).all(1)
    assert float(kept.double().mean()) == pytest.approx(0.7, abs=0.05)
    assert (kept | (shares[0] == 1)).all() and (shares[1] == 0.3).all()


def test_predictions_rise_with_the_share_of_random_words_on_unseen_texts() -> None:
    network = train_word_evaluator(public(200), table(), PLAN, seed=0)
    curve = random_word_curve(network, public(50, seed=1), table(), torch.linspace(0, 1, 5)).mean(1)
    assert (curve.diff() > 0.1).all()
    assert (curve - torch.linspace(0, 1, 5)).abs().max() < 0.2


def test_what_is_behind_a_text_does_not_matter() -> None:
    network = train_word_evaluator(public(40), table(), EvaluatorPlan(widths=(8, 8), epochs=1), seed=0)
    words = torch.rand(1, 6, WIDTH)
    there = torch.tensor([[True] * 4 + [False] * 2])
    assert torch.allclose(network(words, there), network(words[:, :4], there[:, :4]), atol=1e-6)


def test_it_is_made_once_of_public_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "fl_privacy.models.pretrained.evaluator_files.SMALL_OF_TEXTS", EvaluatorPlan(widths=(4,), epochs=1)
    )
    first = find_word_evaluator(None, table(), public(20))
    monkeypatch.setattr("fl_privacy.models.pretrained.evaluator.train_word_evaluator", None)
    again = find_word_evaluator(None, table(), public(20))
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "words.safetensors"
    save_evaluator(train_word_evaluator(public(20), table(), EvaluatorPlan(widths=(4,), epochs=1), seed=0), file, {})
    for path, texts in ((None, None), (file, None), (tmp_path / "missing", None)):
        with pytest.raises(UserError, match="fl-privacy train-evaluator"):
            find_word_evaluator(path, table(), texts)
    with pytest.raises(UserError, match="for texts"):
        find_evaluator(file, (1, 28, 28))
