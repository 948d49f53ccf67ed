"""Descents on the embeddings of words: many texts at once, of different lengths, each to itself."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import AutoAttack, ReconstructionAttack, dlg, idlg, inverting_gradients, sapag, tag
from fl_privacy.attacks.gradient_inversion.embeddings import known_lengths
from fl_privacy.models import TextModel
from fl_privacy.models.transformers import Bert
from fl_privacy.types import Certainty, Knowledge, Observation, VictimId
from fl_privacy.types.film import FRAMES, TextFrame
from tests.attacks.text.test_dager import LONGEST, VOCABULARY, language_model, observed, texts

OURS = {"iterations": 80, "compile": "off"}


def gentle() -> TextModel:
    """Build an encoder whose attention is not saturated."""
    return Bert(
        vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=3, width=64, layers=2, heads=2, hidden=64, std=0.1
    )


def victims(lengths: list[int]) -> list[Observation]:
    """Make victims with one text each, all of one model."""
    made = [observed(gentle, texts([length], seed=number)) for number, length in enumerate(lengths)]
    first = made[0]
    return [
        replace(one, id=VictimId(0, 0, number), model=first.model, sent=first.sent) for number, one in enumerate(made)
    ]


def share_right(found: torch.Tensor, tokens: torch.Tensor) -> float:
    return float((found[0][: tokens.shape[1]] == tokens[0]).double().mean())


@pytest.mark.long
@pytest.mark.parametrize(
    ("attack", "least"),
    [
        (tag(**OURS), 0.3),
        pytest.param(inverting_gradients(**OURS), 0.5, marks=pytest.mark.fuzz),
        pytest.param(dlg(iterations=8, compile="off"), 0.3, marks=pytest.mark.fuzz),
        pytest.param(sapag(iterations=8, compile="off"), 0.3, marks=pytest.mark.fuzz),
    ],
    ids=["tag", "inverting_gradients", "dlg", "sapag"],
)
def test_texts_of_different_lengths_are_read_together(attack: ReconstructionAttack, least: float) -> None:
    """By chance a token in 120 is right."""
    lengths = [4, 6]
    found = attack(victims(lengths), seed=0)
    right = []
    for number, (one, length) in enumerate(zip(found, lengths, strict=True)):
        assert one.batch is not None, one.failure
        assert one.batch.inputs.dtype == torch.long
        assert int((one.batch.inputs >= 0).sum()) == length
        right.append(share_right(one.batch.inputs, texts([length], seed=number)))
    assert sum(right) / len(right) >= least


def test_tag_reads_texts_that_the_model_is_sure_of() -> None:
    """Their gradients are much shorter than those of guesses on the way, whose slopes would outweigh all others."""

    def sure() -> TextModel:
        model = gentle()
        with torch.no_grad():
            model.classifier.bias[0] += 4
        return model

    tokens = texts([6], seed=1)
    (found,) = tag(**OURS)([observed(sure, tokens)], seed=0)
    assert found.batch is not None and share_right(found.batch.inputs, tokens) > 0.5


@pytest.mark.long
def test_company_changes_no_text() -> None:
    alone = tag(**OURS)(victims([4, 6])[:1], seed=0)[0]
    together = tag(**OURS)(victims([4, 6]), seed=0)[0]
    assert alone.batch is not None and together.batch is not None
    length = alone.batch.inputs.shape[1]
    assert torch.equal(alone.batch.inputs, together.batch.inputs[:, :length])


@pytest.mark.fuzz
def test_a_filmed_text_is_read_the_same_and_its_last_frame_is_what_was_read() -> None:
    asked = [replace(one, filmed=True) for one in victims([4, 6])]
    for plain, filmed in zip(tag(**OURS)(victims([4, 6]), seed=0), tag(**OURS)(asked, seed=0), strict=True):
        assert plain.batch is not None and filmed.batch is not None and not plain.film
        assert torch.equal(plain.batch.inputs, filmed.batch.inputs) and plain.history == filmed.history
        frames = [frame for frame in filmed.film if isinstance(frame, TextFrame)]
        assert 3 < len(frames) == len(filmed.film) <= FRAMES and frames[-1].at == len(filmed.history) - 1
        assert torch.equal(frames[-1].tokens, filmed.batch.inputs[0])
        assert not torch.equal(frames[0].tokens, frames[-1].tokens)


def test_the_length_of_a_single_text_shows_in_the_positions() -> None:
    (one,) = victims([6])
    untold = replace(one, knowledge=Knowledge())
    lengths = known_lengths(untold)
    assert lengths is not None and lengths.tolist() == [6]
    hidden = {n: t for n, t in untold.upload.tensors.items() if n != "positions.weight"}
    assert known_lengths(replace(untold, upload=replace(untold.upload, tensors=hidden))) is None


def test_labels_of_a_language_model_are_not_inferred() -> None:
    (found,) = idlg(iterations=2)([observed(language_model, texts([6]))], seed=0)
    assert "next tokens" in str(found.failure)
    tokens = texts([6])
    told = observed(language_model, tokens)
    labels = torch.cat([tokens[:, 1:], tokens.new_full((1, 1), -100)], 1)
    (found,) = tag(iterations=3, compile="off")([told.given(labels=labels)], seed=0)
    assert found.batch is not None and found.batch.inputs.shape == (1, 6)


def test_auto_reads_texts_exactly_and_else_by_descent() -> None:
    (one,) = victims([5])
    hidden = {n: t for n, t in one.upload.tensors.items() if "attention" not in n}
    withheld = replace(one, id=VictimId(0, 0, 1), upload=replace(one.upload, tensors=hidden))
    exact, searched = AutoAttack(evaluations=60)([one, withheld], seed=0)
    assert (exact.member, exact.certainty) == ("dager", Certainty.PROVEN)
    assert searched.batch is not None and searched.member in ("bag of words", "tag", "inverting gradients")
    assert searched.batch.inputs[0].sort().values.tolist() == exact.batch.inputs[0].sort().values.tolist()
    assert searched.batch.inputs.shape == (1, 5)
