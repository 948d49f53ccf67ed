"""A budget in seconds bounds all of an attack, which shows how far it is."""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fl_privacy.attacks import AutoAttack, CocktailParty
from fl_privacy.attacks.attack import seconds_left, within
from fl_privacy.attacks.auto.sub_attacks import LEAST, affordable, most_attempts, rungs
from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.attacks.gradient_inversion.grouping import failed
from fl_privacy.progress import Stage, listening
from fl_privacy.types import Certainty, Observation
from tests.attacks.exact.test_cocktail_party import victims as photos_behind, worst as psnr_of_the_worst
from tests.attacks.exact.test_exact import mlp, victims as images_behind
from tests.attacks.text.test_descents import victims as texts_of
from tests.attacks.victims import observations, smooth_net

EVALUATIONS = re.compile(r"attack\.evaluations=(\d+)")


@pytest.fixture
def slow_search(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace searches for sparse directions by one that finds nothing, 20 ms a round; list its rounds."""
    rounds: list[int] = []

    def nothing(*args, **options) -> Iterator[None]:
        while True:
            rounds.append(len(rounds))
            time.sleep(0.02)
            yield None

    monkeypatch.setattr("fl_privacy.attacks.exact.attack.sparse_factors", nothing)
    return rounds


def mixed(number: int) -> list[Observation]:
    """Make updates of eight images that cannot be separated when the search finds nothing."""
    return [seen.given(defense=()) for seen in images_behind(mlp(widths=(32, 32)), 8, number)[0]]


def without(part: str, seen: Observation) -> Observation:
    """With an upload that lacks the tensors with ``part`` in their names."""
    left = {name: t for name, t in seen.upload.tensors.items() if part not in name}
    return replace(seen, upload=replace(seen.upload, tensors=left))


def test_a_budget_in_seconds_comes_to_an_end():
    (found,) = AutoAttack(budget=0.3)(observations(smooth_net(), 1), seed=0)
    assert found.batch is not None


def test_a_search_for_exact_answers_ends_with_its_time(slow_search, caplog):
    with caplog.at_level(logging.INFO):
        (found,) = AutoAttack(budget=0.2)(mixed(1), seed=0)
    assert 1 <= len(slow_search) <= 10
    assert found.batch is not None
    assert "the clock ended a search for exact answers" in caplog.text


def test_time_for_exact_answers_is_shared_evenly(slow_search):
    """The first victim does not use up what others need."""
    with within(0.3) as limit:
        ExactInversion()(mixed(3), seed=0)
    assert 3 <= len(slow_search) <= 18 and limit.cut


def test_every_victim_has_a_first_round_though_the_time_is_over(slow_search):
    with within(0.0):
        found = ExactInversion()(mixed(3), seed=0)
    assert len(slow_search) == 3
    assert all(one.batch is not None for one in found)


def test_what_takes_no_search_is_proven_though_the_time_is_over():
    with within(0.0):
        found = ExactInversion()(images_behind(mlp(), 1, 2)[0], seed=0)
    assert {one.certainty for one in found} == {Certainty.PROVEN}


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_what_the_clock_ends_is_called_no_surer_than_it_is(activation):
    seen, truths = photos_behind(activation, number=3, count=6)
    with within(0.0):
        found = CocktailParty()(seen, seed=0)
    for one, truth in zip(found, truths, strict=True):
        assert one.certainty is Certainty.APPROXIMATE or psnr_of_the_worst([one], [truth]) > 60


def test_the_evaluations_that_are_said_repeat_the_attack(caplog):
    """To the last bit, where nothing is solved for."""
    seen = [without("5.bias", each) for each in observations(smooth_net(), 2)]
    with caplog.at_level(logging.INFO):
        found = AutoAttack(budget=0.3)(seen, seed=0)
    said = EVALUATIONS.search(caplog.text)
    assert said is not None
    again = AutoAttack(evaluations=int(said[1]))(seen, seed=0)
    assert [one.batch.inputs.tolist() for one in found] == [one.batch.inputs.tolist() for one in again]
    assert [(one.member, one.loss) for one in found] == [(one.member, one.loss) for one in again]


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("time_for", [1.5, 80.0, 481.0, 5000.0, 1e6])
def test_rungs_take_no_more_than_there_is_time_for(time_for, beside):
    number = affordable(time_for, beside)
    taken = sum(rung.attempts * rung.evaluations for rung in rungs(number, most_attempts(number) + beside))
    assert taken <= time_for or number == LEAST
    assert taken >= 0.9 * time_for or time_for < 500


def test_victims_of_other_models_have_their_share_of_the_time(monkeypatch):
    left = []

    def attack(self, group, seed, report):
        left.append((len(group.observations), seconds_left()))
        return {position: failed(observation, "") for position, observation in group.observations.items()}

    monkeypatch.setattr(AutoAttack, "_attack", attack)
    AutoAttack(budget=10.0)([*observations(smooth_net(), 1), *observations(smooth_net(1), 3)], seed=0)
    (first, own), (others, theirs) = left
    assert (first, others) == (1, 3)
    assert own <= 10 and 30 < theirs <= 40


def test_what_is_solved_for_is_named_and_shows_how_far_it_is(slow_search):
    """Of each victim, and within its search."""
    names: dict[str, None] = {}
    told: list[float] = []

    def listen(stages: tuple[Stage, ...]) -> None:
        names.update(dict.fromkeys(f"{stage.what} {stage.done}/{stage.total}" for stage in stages))

    def progress(done: int, total: int) -> None:
        told.append(done / total)

    with listening(listen):
        AutoAttack(evaluations=60)(mixed(2), seed=0, progress=progress)
    shown = list(names)
    assert shown[:5] == ["cocktail party 0/1", "victim 0/2", "victim 1/2", "exact 0/2", "exact 1/2"]
    assert any("by signed Adam" in name for name in shown[5:])
    assert told == sorted(told) and told[-1] == 1
    assert len({share for share in told if share < 0.1}) >= 10


def text_without_attention() -> Observation:
    """Make an update of a text that has no exact reconstruction."""
    (one,) = texts_of([5])
    return without("attention", one)


def test_texts_show_progress_that_never_goes_back():
    told: list[float] = []
    seen = [text_without_attention()]
    AutoAttack(evaluations=4)(seen, seed=0, progress=lambda done, total: told.append(done / total))
    assert told == sorted(told) and told[-1] == 1


def test_texts_keep_to_their_seconds(caplog):
    with caplog.at_level(logging.INFO):
        (found,) = AutoAttack(budget=0.1)([text_without_attention()], seed=0)
    said = EVALUATIONS.search(caplog.text)
    assert found.batch is not None and said is not None and LEAST <= int(said[1]) < 600
