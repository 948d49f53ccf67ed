"""Words are read from rows: all of them where rows are exact, and hardly any false one above noise."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fl_privacy.attacks.text import BagOfWords
from fl_privacy.attacks.text.explanation import head_of
from fl_privacy.attacks.text.token_candidates import readable_model
from fl_privacy.attacks.text.token_evidence import FALSE_PER_TEXT, FALSE_SHARE
from fl_privacy.attacks.text.word_evidence import (
    Expected,
    WordModel,
    WordRows,
    found_words,
    noise_rows,
    repeated,
    significant,
    words_of_head,
)
from fl_privacy.types import LocalPlan, Observation, Upload, VictimId
from tests.attacks.text.test_dager import encoder, language_model, observed, texts
from tests.attacks.text.test_last_tokens import untied

SIZE, WIDTH = 600, 16


def changed(seen: Observation, change: Callable[[Tensor], Tensor]) -> Observation:
    return replace(seen, upload=replace(seen.upload, tensors={n: change(g) for n, g in seen.upload.tensors.items()}))


def pruned(rate: float) -> Callable[[Tensor], Tensor]:
    return lambda g: g * (g.abs() >= g.abs().flatten().quantile(rate))


def rounded(bits: int) -> Callable[[Tensor], Tensor]:
    def change(g: Tensor) -> Tensor:
        step = g.abs().max().clamp_min(1e-12) / (2 ** (bits - 1) - 1)
        return (g / step).round() * step

    return change


@pytest.mark.parametrize("change", [lambda g: g, lambda g: 0.01 * g, pruned(0.9), rounded(16)])
@pytest.mark.parametrize("lengths", [[7], [5, 6, 4]])
def test_all_words_are_read_where_rows_are_exact(lengths: list[int], change: Callable[[Tensor], Tensor]) -> None:
    tokens = texts(lengths)
    (found,) = BagOfWords()([changed(observed(encoder, tokens), change)], seed=0)
    assert found.words is not None and found.words_exact
    assert set(found.words.tolist()) == set(tokens[tokens >= 0].tolist())


@pytest.mark.parametrize("change", [pruned(0.99), pruned(0.999), rounded(4), rounded(2)])
def test_none_of_them_is_false_where_rows_were_lost(change: Callable[[Tensor], Tensor]) -> None:
    tokens = texts([7])
    (found,) = BagOfWords()([changed(observed(encoder, tokens), change)], seed=0)
    assert found.words is not None and found.words_exact and set(found.words.tolist()) <= set(tokens[0].tolist())


def test_words_are_read_where_rows_of_positions_were_dropped() -> None:
    """A text then seems shorter than it is."""
    tokens = texts([7])
    seen = observed(encoder, tokens)
    name = readable_model(seen.model).position_weight
    positions = seen.upload.tensors[name].clone()
    positions[-(len(positions) - 3) :] = 0
    upload = replace(seen.upload, tensors={**seen.upload.tensors, name: positions})
    (found,) = BagOfWords()([replace(seen, upload=upload).given(lengths=None)], seed=0)
    assert found.words is not None and found.words_exact
    assert set(found.words.tolist()) == set(tokens[0].tolist())


def test_a_single_text_is_put_in_order_with_its_repeated_words() -> None:
    tokens = torch.tensor([[1, 9, 30, 9, 44, 61]])
    (found,) = BagOfWords()([observed(encoder, tokens)], seed=0)
    assert found.batch is not None and found.batch.inputs.tolist() == tokens.tolist()
    assert found.words is not None and sorted(found.words.tolist()) == [1, 9, 9, 30, 44, 61]


def test_how_often_words_are_there_follows_from_the_lengths_of_their_rows() -> None:
    energy = torch.tensor([1.0, 4.1, 0.9, 8.8])
    assert repeated(energy, common=1.0, total=7).tolist() == [1, 2, 1, 3]
    assert repeated(energy, common=1.0, total=None)[2] == 1
    assert repeated(energy, common=1.0, total=4).tolist() == [1, 1, 1, 1]


def test_weight_decay_is_no_word() -> None:
    clean = observed(encoder, texts([6]))
    plan = LocalPlan(shares="weights", lr=0.1, optimizer="adamw", weight_decay=0.1)
    sent = clean.sent.parameters
    moved = {n: w * (1 - 0.01) - 0.1 * clean.upload.tensors[n].sign() for n, w in sent.items()}
    seen = replace(clean, plan=plan, upload=Upload(tensors=moved, num_examples=1))
    (found,) = BagOfWords()([seen], seed=0)
    assert found.words is not None and set(found.words.tolist()) == set(texts([6])[0].tolist())


def head_alone(tokens: Tensor) -> Observation:
    """Take the head's tensor alone from what a language model uploads."""
    seen = observed(untied, tokens)
    name = head_of(seen.model)[0]
    return replace(seen, upload=replace(seen.upload, tensors={name: seen.upload.tensors[name]}))


@pytest.mark.parametrize("change", [lambda g: g, pruned(0.9), rounded(8)])
@pytest.mark.parametrize("lengths", [[9], [5, 6]])
def test_a_head_that_is_tied_to_the_embeddings_tells_the_words_and_no_others(
    lengths: list[int], change: Callable[[Tensor], Tensor]
) -> None:
    tokens = texts(lengths)
    (found,) = BagOfWords()([changed(observed(language_model, tokens), change)], seed=0)
    assert found.words is not None and not found.words_exact
    assert set(found.words.tolist()) == set(tokens[tokens >= 0].tolist())


@pytest.mark.parametrize("lengths", [[9], [5, 6]])
def test_a_head_alone_tells_all_words_but_the_first(lengths: list[int]) -> None:
    tokens = texts(lengths)
    (found,) = BagOfWords()([head_alone(tokens)], seed=0)
    later = tokens[:, 1:]
    assert found.words is not None and set(found.words.tolist()) == set(later[later >= 0].tolist())


@pytest.mark.parametrize("make", [lambda tokens: observed(language_model, tokens), head_alone])
def test_a_head_under_noise_tells_no_word(make: Callable[[Tensor], Observation]) -> None:
    rng = torch.Generator().manual_seed(0)
    seen = changed(make(texts([9])), lambda g: g + torch.randn(g.shape, generator=rng))
    (found,) = BagOfWords()([seen], seed=0)
    assert found.words is None and "Rows that stand out" in found.failure


def test_a_token_that_the_model_expects_and_that_is_not_there_is_no_word() -> None:
    common = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    values = 1e-3 * torch.rand(SIZE, 1, generator=torch.Generator().manual_seed(1)) * common
    values[7], values[11] = common, -common
    rows = WordRows(values[None], torch.zeros(1, SIZE, dtype=torch.bool), "head")
    assert words_of_head(rows, 20).tokens.tolist() == [11]


def test_where_no_layer_sees_single_tokens_it_says_so() -> None:
    observation = observed(encoder, texts([6]))
    tensors = {name: g for name, g in observation.upload.tensors.items() if name.startswith("classifier")}
    (found,) = BagOfWords()([replace(observation, upload=replace(observation.upload, tensors=tensors))], seed=0)
    assert found.batch is None and "before any attention" in str(found.failure)


def test_what_is_read_above_noise_depends_on_the_upload_alone() -> None:
    rng = torch.Generator().manual_seed(0)
    one, other = (
        changed(observed(encoder, texts([length], length)), lambda g: g + 1e-4 * torch.randn(g.shape, generator=rng))
        for length in (5, 9)
    )
    other = replace(other, id=VictimId(0, 1, 0), model=one.model, sent=one.sent)
    (alone,) = BagOfWords()([other], seed=3)
    _, beside = BagOfWords()([one, other], seed=3)
    assert alone.words is not None and beside.words is not None and torch.equal(alone.words, beside.words)


def _signs(rng: torch.Generator) -> Tensor:
    return torch.randint(2, (SIZE, WIDTH), generator=rng) * 2.0 - 1


NOISES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "gaussian": lambda rng: torch.randn(SIZE, WIDTH, generator=rng),
    "laplace": lambda rng: torch.empty(SIZE, WIDTH).exponential_(generator=rng) * _signs(rng),
    "signs": _signs,
    "few": lambda rng: torch.randn(SIZE, WIDTH, generator=rng) * (torch.rand(SIZE, WIDTH, generator=rng) < 0.3),
}


def expected() -> Expected:
    """Rows of length 1, mostly along the first direction, or in any."""
    eye = torch.eye(WIDTH)
    along = WordModel(torch.tensor([0.9]), torch.tensor([0.1]), eye[:, :1])
    return Expected((along, WordModel(torch.zeros(WIDTH), torch.full((WIDTH,), 1 / WIDTH), eye)), 1.0, 0.5)


def found_in(values: Tensor, odds: Tensor, rng: torch.Generator, texts: int = 1) -> Tensor:
    rows = WordRows(values[None], torch.zeros(1, len(values), dtype=torch.bool), "embeddings")
    return found_words(
        rows, odds=odds, most=40, texts=texts, expected=expected(), stated_noise=None, rng=rng
    ).tokens  # fmt: skip


@pytest.mark.parametrize("noise", NOISES)
def test_noise_of_any_distribution_is_hardly_ever_a_word(noise: str) -> None:
    """One false word a text is the most that is allowed."""
    rng, number = torch.Generator().manual_seed(1), 20
    odds = torch.full((SIZE,), 0.001)
    odds[:30] = 0.999  # nor is a word that nearly every text has
    false = [len(found_in(NOISES[noise](rng), odds, rng)) for _ in range(number)]
    assert sum(false) <= FALSE_PER_TEXT * number


@pytest.mark.parametrize("noise", NOISES)
def test_words_that_stand_out_of_noise_are_read(noise: str) -> None:
    """One false word a text, on average; of single texts it may be several."""
    rng, number = torch.Generator().manual_seed(2), 40
    odds, read, false = torch.full((SIZE,), 0.01), 0, 0
    for _ in range(number):
        values = NOISES[noise](rng)
        values[100:120, 0] += 8.0
        tokens = found_in(values, odds, rng)
        there = (tokens >= 100) & (tokens < 120)
        read, false = read + int(there.sum()), false + int((~there).sum())
    assert read >= 13 * number and false <= number


def test_rows_of_noise_hold_no_word_and_are_as_long_as_the_others() -> None:
    rng = torch.Generator().manual_seed(3)
    values = torch.randn(SIZE, WIDTH, generator=rng)
    values[:20] += 50.0
    energy = values.square().sum(1)
    drawn = noise_rows(values, energy, energy.topk(40).indices, rng)
    assert drawn.shape[1] == WIDTH and float(drawn.abs().max()) < 10
    assert float(drawn.square().sum(1).median() / energy.median()) == pytest.approx(1, abs=0.01)


def test_the_number_of_words_keeps_to_both_bounds() -> None:
    noise = torch.linspace(0, 1, 10_001)
    score, prior = torch.cat([torch.full((50,), 0.9999), torch.rand(950) * 0.5]), torch.zeros(1000)
    found = significant(score, noise, prior, texts=1, most=100)  # one or two in 10,000 reach 0.9999
    assert sorted(found.tolist()) == list(range(50)) and FALSE_SHARE * len(found) > 1
    assert not len(significant(score - 0.01, noise, prior, texts=1, most=100)), "10 in 1,000 reach 0.99"
    assert len(significant(score - 0.002, noise, prior, texts=5, most=100)) == 50, "2 in 1,000 reach 0.998"
    assert not len(significant(score - 0.002, noise, prior, texts=1, most=100))
