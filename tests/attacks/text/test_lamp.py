"""LAMP: words change places, and a language model of public texts has a say in it."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import lamp
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.attacks.gradient_inversion.preparation import prepare
from fl_privacy.attacks.gradient_inversion.settings import Rearranging
from fl_privacy.attacks.gradient_inversion.word_order import LanguageModel, moved_orders
from fl_privacy.attacks.optimizers import Adam
from fl_privacy.errors import UserError
from fl_privacy.types import Observation
from tests.attacks.text.test_dager import LONGEST, texts
from tests.attacks.text.test_descents import share_right, victims

SMALL = {"iterations": 60, "compile": "off", "every": 10, "tries": 24, "starts": 12}


def generators(number: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + k) for k in range(number)]


def test_moves_are_orders_of_a_texts_own_words() -> None:
    lengths, tries = torch.tensor([1, 2, 7]), 400
    orders = moved_orders(lengths, tries, 9, generators(3))
    assert torch.equal(orders.sort(-1).values, torch.arange(9).expand(3, tries, 9))
    assert torch.equal(orders[:, 0], torch.arange(9).expand(3, 9))
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(orders[row, :, length:], torch.arange(length, 9).expand(tries, -1))
    changed = (orders[2, :, :7] != torch.arange(7)).sum(-1)
    assert (changed[torch.arange(tries) % 4 == 0] <= 2).all()  # two words exchanged
    ends = orders[2, 3::4, :7]
    assert (ends.diff(dim=-1).remainder(7) == 1).all()  # the beginning put to the end
    sequences = orders[2, 2::4, :7].diff(dim=-1) != 1
    assert (sequences.sum(-1) <= 3).all() and (sequences.sum(-1) >= 2).any()


def test_likely_texts_surprise_less() -> None:
    rng = torch.Generator().manual_seed(0)
    chain = (torch.arange(8) + torch.randint(20, (300, 1), generator=rng)) % 20  # each word follows the one below
    language = LanguageModel(chain, 20)
    likely = torch.tensor([[3, 4, 5, 6, -1], [3, 4, 5, 6, 7]])
    shuffled = torch.tensor([[5, 3, 6, 4, -1], [7, 3, 6, 4, 5]])
    assert (language.surprise(likely) + 1 < language.surprise(shuffled)).all()
    everything = torch.cartesian_prod(torch.tensor([3]), torch.tensor([4]), torch.arange(20))
    rest = language.surprise(everything) * 3 - language.surprise(everything[:1, :2]) * 2
    assert float((-rest).exp().sum()) == pytest.approx(1)  # a distribution


def told(observations: list[Observation], seed: int = 5) -> list[Observation]:
    return [one.given(public_images=texts([LONGEST] * 20, seed=seed)) for one in observations]


@pytest.mark.long
def test_texts_of_different_lengths_are_read_each_to_itself() -> None:
    lengths = [4, 6]
    found = lamp(**SMALL)(told(victims(lengths)), seed=0)
    (alone,) = lamp(**SMALL)(told(victims(lengths))[:1], seed=0)
    right = []
    for number, (one, length) in enumerate(zip(found, lengths, strict=True)):
        assert one.batch is not None, one.failure
        right.append(share_right(one.batch.inputs, texts([length], seed=number)))
    assert sum(right) / 2 >= 0.3  # by chance a token in 120
    assert alone.batch is not None and found[0].batch is not None
    assert torch.equal(alone.batch.inputs, found[0].batch.inputs[:, : alone.batch.inputs.shape[1]])


def test_moves_bring_shuffled_words_into_order() -> None:
    """The true words in a wrong order: no descent, moves alone, judged by the mismatch."""
    (victim,), tokens = victims([5]), texts([5])
    attack = replace(lamp(**SMALL, prior=0.0), moves=Rearranging(tries=200, prior=0.0, burn_in=0.0))
    prepared = prepare(attack, Group(observations={0: victim}), 0)
    problem, moves = prepared.problem(prepared.victims, [0]), prepared.moves
    assert moves is not None and problem.settings.source is not None
    table = victim.sent.parameters["words.weight"]
    words = (table[tokens[:, [0, 3, 2, 1, 4]]] / table.square().mean().sqrt()).reshape(1, -1)
    read, loss = moves.end(problem, words, generators(1))
    assert torch.equal(prepared.read(problem.images(read))[0], tokens) and float(loss) < 0.2
    for _ in range(3):
        words = moves(1, problem, words, generators(1))
    assert torch.equal(prepared.read(problem.images(words))[0], tokens)


def test_steps_stay_as_long_as_the_rate_where_the_slope_has_fallen() -> None:
    """Adam remembers how steep it was; the slope of the angle falls to a thousandth within dozens of iterations."""
    optimizer, before, now = lamp().optimizer, torch.zeros(1, 300), torch.zeros(1, 300)
    assert isinstance(optimizer, Adam)
    run, direction = optimizer.start(now, iterations=2000, images=300), torch.full((1, 300), 300**-0.5)
    for length in [2e-2] * 20 + [1e-5] * 20:
        before, (now, _, _) = now, run.step(now, torch.ones(1), length * direction)
    assert float((now - before).abs().mean()) > 0.5 * optimizer.lr


def test_without_public_texts_the_setting_is_named() -> None:
    with pytest.raises(UserError, match=r"threat_model\.public_images"):
        lamp(**SMALL)(victims([4]), seed=0)
    assert lamp(**{**SMALL, "iterations": 2}, prior=0.0)(victims([4]), seed=0)[0].batch is not None
