"""Batches of which nobody says how long their texts are, or that hold a text twice: exact, and proven only if so."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from fl_privacy.attacks import Dager
from fl_privacy.attacks.exact.certificate import Reproduction, least_squares, model_as_sent
from fl_privacy.attacks.gradient_inversion.embeddings import known_lengths
from fl_privacy.attacks.text.encoder_assembly import parts_of
from fl_privacy.attacks.text.explanation import Explanation
from fl_privacy.attacks.text.token_candidates import Candidates, Lengths, Span, find_candidates
from fl_privacy.models import TextModel
from fl_privacy.models.text_model import Positions
from fl_privacy.models.transformers import Bert
from fl_privacy.types import Batch, Certainty, Observation, VictimId
from tests.attacks.text import test_disaggregation as wide
from tests.attacks.text.test_dager import (
    LONGEST,
    VOCABULARY,
    decoder,
    encoder,
    language_model,
    observed,
    texts,
    two_layers,
    without_rows,
)
from tests.selection import few


def sorted_rows(tokens: Tensor) -> list[list[int]]:
    return sorted([token for token in row if token >= 0] for row in tokens.tolist())


@pytest.mark.parametrize("withheld", [False, True])
@pytest.mark.parametrize(
    ("make", "lengths"),
    [(encoder, [7, 5, 8]), (decoder, [7, 5, 8]), (two_layers, [9, 8]), (wide.encoder, [9, 9, 7, 4])],
)
def test_lengths_need_not_be_told(make: Callable[[], TextModel], lengths: list[int], withheld: bool) -> None:
    tokens = wide.texts(lengths) if make is wide.encoder else texts(lengths)
    observation = observed(make, tokens, told=False)
    (found,) = Dager()([without_rows(observation) if withheld else observation], seed=0)
    assert found.batch is not None and sorted_rows(found.batch.inputs) == sorted_rows(tokens)
    assert found.certainty is Certainty.PROVEN


def test_the_longest_text_shows_in_the_gradient_of_positions() -> None:
    seen = observed(encoder, texts([7, 5]), told=False)
    assert Lengths.of(seen, encoder()).longest == 7
    assert Lengths.of(without_rows(seen), encoder()).longest == LONGEST
    assert Lengths.of(observed(language_model, texts([7, 5])), language_model()).known == (4, 6)


def test_a_stray_candidate_behind_the_longest_text_leaves_the_others() -> None:
    near, far = 1e-6, 0.8
    table = torch.tensor([[near, near, far, near], [near, far, far, far]])
    span = cast(Span, SimpleNamespace(width=1, distance=lambda states: table))

    def found(told: tuple[int, ...] | None) -> Candidates:
        lengths = Lengths(number=2, longest=4, known=told)
        return find_candidates(encoder(), span, tokens=torch.tensor([7, 8]), lengths=lengths, tolerance=0.05)

    assert found(None).whole and found(None).length == 2
    assert [at.tolist() for at in found(None).tokens] == [[7, 8], [7]]
    assert not found(None).clear and found(None).left_out == pytest.approx(near)
    assert found((2, 4)).length == 4


def test_what_is_not_a_number_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = with_a_copy(texts([6, 5]))
    seen = observed(encoder, tokens)
    explanation = Explanation(seen, model_as_sent(seen), dict(seen.update()))
    assert explanation.repeated([row[row >= 0] for row in tokens[:2]], 0) is not None
    monkeypatch.setattr(Reproduction, "distance", lambda *_, **__: float("nan"))
    assert explanation.repeated([row[row >= 0] for row in tokens[:2]], 0) is None


def test_one_tensor_that_is_not_a_number_is_no_small_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observed(encoder, texts([6, 5]))
    *_, last = seen.update()
    wrong = {**seen.update(), last: seen.update()[last] * torch.nan}
    monkeypatch.setattr(Reproduction, "_gradients", lambda *_: wrong)
    batch = Batch(texts([6, 5]), torch.zeros(2, dtype=torch.long))
    assert math.isnan(Reproduction(seen, model_as_sent(seen)).distance(batch, any_scale=False))


def with_a_copy(tokens: Tensor) -> Tensor:
    """Of the first text: ``observed`` gives the two different labels."""
    return torch.cat([tokens, tokens[:1]])


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("make", few([encoder, decoder, language_model, two_layers, wide.encoder], 2))
def test_a_text_that_is_there_twice_is_read_twice(make: Callable[[], TextModel], told: bool) -> None:
    tokens = with_a_copy(wide.texts([8, 6]) if make is wide.encoder else texts([6, 5]))
    seen = observed(make, tokens, told=told)
    (found,) = Dager()([seen], seed=0)
    assert found.batch is not None and sorted_rows(found.batch.inputs) == sorted_rows(tokens)
    assert found.certainty is Certainty.PROVEN
    if make is not language_model:
        both = found.batch.labels[(found.batch.inputs[:, : tokens.shape[1]] == tokens[0]).all(1)]
        assert sorted(both.tolist()) == [0, 2]


@pytest.mark.long
@pytest.mark.parametrize(("make", "lengths"), [(wide.encoder, [4, 3]), (encoder, [5, 3])])
def test_texts_that_are_there_three_times_end_no_call(make: Callable[[], TextModel], lengths: list[int]) -> None:
    """At some positions no word is likely then; the victims beside it are read all the same."""
    few = wide.texts(lengths) if make is wide.encoder else texts(lengths, seed=80)
    seen = observed(make, torch.cat([few, few[[1, 1]]]))
    other = replace(observed(make, few), id=VictimId(0, 1, 0))
    found = Dager()([seen, other], seed=0)
    for one, tokens in zip(found, (torch.cat([few, few[[1, 1]]]), few), strict=True):
        assert one.batch is not None and sorted_rows(one.batch.inputs) == sorted_rows(tokens)
        assert one.certainty is Certainty.PROVEN


def scaled(observation: Observation, factor: float, number: int) -> Observation:
    tensors = {name: factor * value for name, value in observation.upload.tensors.items()}
    return replace(observation, upload=replace(observation.upload, tensors=tensors, num_examples=number))


@pytest.mark.long
@pytest.mark.parametrize("make", [encoder, decoder, language_model, two_layers])
def test_a_text_that_adds_nothing_is_not_taken_for_a_copy_of_another(make: Callable[[], TextModel]) -> None:
    """Of two texts one is predicted so well that its gradient is zero: nobody can know it."""
    for factor, number in ((0.5, 2), (2 / 3, 3), (0.2, 2)):
        tokens = texts([6]) if number == 2 else texts([6, 5])
        (found,) = Dager(rounds=1)([scaled(observed(make, tokens, told=False), factor, number)], seed=0)
        assert found.certainty is not Certainty.PROVEN


class _Shifted(Positions):
    def forward(self, embeddings: Tensor) -> Tensor:
        return embeddings + self.weight[2 : 2 + embeddings.shape[-2]]


class Shifted(Bert):
    """Whose positions begin at row 2, as RoBERTa's."""

    first_position = 2

    def __init__(self) -> None:
        super().__init__(
            vocabulary_size=VOCABULARY,
            max_length=LONGEST,
            num_classes=3,
            width=64,
            layers=3,
            heads=2,
            hidden=64,
            std=0.2,
        )
        self.positions = _Shifted(LONGEST + 2, 64, 0.2)


def test_positions_may_begin_at_another_row() -> None:
    assert known_lengths(observed(Shifted, texts([7]), told=False)) == torch.tensor([7])
    tokens = texts([7, 5, 8])
    seen, words = observed(Shifted, tokens, told=False), torch.unique(tokens[tokens >= 0])
    parts = parts_of(seen.model, dict(seen.upload.tensors), words, 8)  # type: ignore[arg-type]
    assert parts is not None
    for position in range(8):
        alone = [word for word in words.tolist() if (tokens == word).sum() == 1 and (tokens == word)[:, position].any()]
        if len(alone) == int((tokens[:, position] >= 0).sum()):
            expected = parts.words[torch.isin(words, torch.tensor(alone))].sum(0)
            assert (parts.positions[position] - expected).norm() < 1e-4 * expected.norm()
    (found,) = Dager()([seen], seed=0)
    assert found.batch is not None and sorted_rows(found.batch.inputs) == sorted_rows(tokens)
    assert found.certainty is Certainty.PROVEN


def test_least_squares_of_any_rank_are_the_shortest() -> None:
    rng = torch.Generator().manual_seed(0)
    known = torch.randn(9, 4, generator=rng, dtype=torch.float64)[:, [0, 1, 2, 3, 1]]
    sums = torch.randn(9, 3, generator=rng, dtype=torch.float64)
    assert torch.allclose(least_squares(known, sums), torch.linalg.pinv(known) @ sums)
