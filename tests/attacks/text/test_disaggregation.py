"""What the first block's gradient says of where words stood, and of which stood together."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import Dager
from fl_privacy.attacks.text.dager import Peeled, Peeling
from fl_privacy.attacks.text.encoder_assembly import disaggregated, grouped, parts_of, shares_of
from fl_privacy.attacks.text.token_candidates import Candidates, Lengths
from fl_privacy.models import TextModel
from fl_privacy.models.transformers import Bert
from fl_privacy.types import Certainty, Observation
from tests.attacks.text.test_dager import observed, rows, without_rows

LONGEST, VOCABULARY = 12, 120


def encoder() -> TextModel:
    return Bert(
        vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=3, width=128, layers=3, heads=8, hidden=64, std=0.2
    )


def texts(lengths: list[int], *, repeated: int = 0) -> torch.Tensor:
    """Of words that occur once but for the first of each text and ``repeated`` ones that another has as well."""
    words = torch.randperm(VOCABULARY - 3, generator=torch.Generator().manual_seed(2)) + 3
    tokens = words[: len(lengths) * max(lengths)].reshape(len(lengths), -1).clone()
    tokens[:, 0] = 1
    for number in range(repeated):
        tokens[number + 1, 2 + number] = tokens[number, 1 + number]
    return tokens.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], -1)


def told(lengths: list[int]) -> Lengths:
    return Lengths(number=len(lengths), longest=max(lengths), known=tuple(sorted(lengths)))


def gradient_of(observation: Observation) -> dict[str, torch.Tensor]:
    return dict(observation.upload.tensors)


@pytest.mark.parametrize("withheld", [False, True])
def test_parts_of_positions_are_the_sums_of_those_of_the_words_there(withheld: bool) -> None:
    tokens = texts([9, 7, 8])
    observation = observed(encoder, tokens)
    seen, words = without_rows(observation) if withheld else observation, torch.unique(tokens[tokens >= 0])
    parts = parts_of(seen.model, gradient_of(seen), words, 9)
    assert parts is not None
    for position in range(9):
        there = torch.isin(words, tokens[:, position])
        expected = parts.words[there].sum(0)
        assert (parts.positions[position] - expected).norm() < 1e-4 * expected.norm()
    shares = shares_of(parts)
    assert torch.allclose(shares.sum(1), torch.ones(len(words), dtype=shares.dtype))
    where = [(tokens == word).nonzero()[0, 1] for word in words]
    assert torch.equal(shares.argmax(1), torch.stack(where))
    assert shares.amax(1).min() > 0.9


def test_groups_are_the_texts() -> None:
    tokens = texts([9, 9, 8, 7])
    observation = observed(encoder, tokens)
    words = torch.unique(tokens[tokens >= 0])
    guess = disaggregated(observation.model, gradient_of(observation), words, told([9, 9, 8, 7]))
    assert guess is not None
    for text, held in zip(guess.texts, guess.held, strict=True):
        best = max(int(((row[: len(text)] == text) & held).sum()) for row in tokens)
        assert best >= 0.9 * int(held.sum()) >= 5


def test_no_two_of_a_group_have_the_same_position() -> None:
    support = torch.full((4, 4), 1e-3, dtype=torch.float64)
    support[:2, :2] = support[2:, 2:] = 1.0
    groups = grouped(support, torch.tensor([1, 2, 1, 2]), 2)
    assert groups[0] == groups[1] != groups[2] == groups[3]
    support[0, 2] = support[2, 0] = 50.0  # two words at position 1
    assert torch.equal(grouped(support, torch.tensor([1, 2, 1, 2]), 2), groups)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_an_encoders_batch_is_taken_apart_text_by_text(scale: float) -> None:
    tokens = texts([9, 9, 8, 7, 6], repeated=3)
    observation = observed(encoder, tokens)
    clipped = {name: scale * value for name, value in observation.upload.tensors.items()}
    observation = replace(observation, upload=replace(observation.upload, tensors=clipped))
    (found,) = Dager(rounds=1)([observation], seed=0)
    assert found.batch is not None and rows(found.batch.inputs) == rows(tokens)
    assert found.certainty is Certainty.PROVEN


class Told(Peeling):
    """Is told one text of the batch."""

    text: torch.Tensor

    def _known(self, left: Peeled, candidates: Candidates) -> list[torch.Tensor]:
        return [self.text]


def test_only_a_text_of_the_batch_is_taken_off() -> None:
    tokens = texts([8, 7, 6])
    observation = observed(encoder, tokens)
    model = observation.model.double()
    assert isinstance(model, TextModel)
    rng = torch.Generator().manual_seed(0)
    peeling = Told(
        model=model, searched=model, loss_scale=1.0, tolerance=0.05, rng=rng, rounds=1, enough=lambda _: False
    )
    wrong = tokens[0].clone()
    wrong[3] = tokens[1, 3]
    for Told.text, taken in ((wrong, []), (tokens[0], [tokens[0].tolist()])):
        left = peeling.peel(gradient_of(observation), told([8, 7, 6]))
        assert [text.tolist() for text in left.texts] == taken
        assert left.lengths.known == (6, 7, 8)[: 3 - len(taken)]


class ToldTooMany(Peeling):
    """Is told more texts than there are."""

    def _known(self, left: Peeled, candidates: Candidates) -> list[torch.Tensor]:
        return [torch.cat(list(candidates.tokens)), torch.cat(list(candidates.tokens))]


def test_no_more_texts_are_taken_off_than_there_are() -> None:
    tokens = texts([8])
    observation = observed(encoder, tokens)
    model = observation.model.double()
    assert isinstance(model, TextModel)
    rng = torch.Generator().manual_seed(0)
    peeling = ToldTooMany(
        model=model, searched=model, loss_scale=1.0, tolerance=0.05, rng=rng, rounds=1, enough=lambda _: False
    )
    left = peeling.peel(gradient_of(observation), told([8]))
    assert [text.tolist() for text in left.texts] == tokens.tolist() and not left.lengths.number
