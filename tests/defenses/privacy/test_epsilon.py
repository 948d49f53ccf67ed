import math

import pytest
from opacus.accountants import RDPAccountant

from fl_privacy.defenses.privacy import MILESTONES, epsilon, epsilons, noise_multiplier_for
from fl_privacy.errors import UserError
from tests.selection import few

SETTINGS = {"noise_multiplier": 1.1, "sample_rate": 0.05, "delta": 1e-5}


@pytest.mark.long
def test_a_course_is_what_opacus_says_step_by_step():
    accountant = RDPAccountant()
    expected = []
    for _ in range(30):
        accountant.step(noise_multiplier=1.1, sample_rate=0.05)
        expected.append(accountant.get_epsilon(1e-5))
    assert epsilons(**SETTINGS, steps=range(1, 31)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
def test_the_tight_course_is_an_upper_bound_exact_at_both_ends():
    steps = range(2, 80)
    course = epsilons(**SETTINGS, steps=steps, accountant="prv")
    assert len(set(course)) <= MILESTONES
    assert course == sorted(course)
    for k in (0, 30, 50, len(steps) - 1):
        exact = epsilon(**SETTINGS, steps=steps[k], accountant="prv")
        assert exact <= course[k] + 0.01
        assert course[k] == pytest.approx(exact, rel=0.25)
    assert course[-1] == epsilon(**SETTINGS, steps=steps[-1], accountant="prv")


@pytest.mark.parametrize("steps", [[], [5], [5, 6], [0, 1, 2]])
def test_short_courses(steps):
    assert epsilons(**SETTINGS, steps=steps) == pytest.approx([epsilon(**SETTINGS, steps=n) for n in steps])


def test_no_noise_spends_without_end():
    assert epsilons(noise_multiplier=0.0, sample_rate=0.1, delta=1e-5, steps=[1, 2, 3, 4]) == [math.inf] * 4


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("target", few([0.5, 8.0], 1, all_but_fuzz=1))
def test_noise_for_a_budget(accountant, target):
    options = {"sample_rate": 0.1, "steps": 50, "delta": 1e-5, "accountant": accountant}
    noise = noise_multiplier_for(epsilon=target, **options)
    spent = epsilon(noise_multiplier=noise, **options)
    assert target - 0.03 <= spent <= target
    assert epsilon(noise_multiplier=0.9 * noise, **options) > target


def test_a_budget_out_of_reach_is_one_line():
    with pytest.raises(UserError, match="no noise"):
        noise_multiplier_for(epsilon=1e-9, sample_rate=1.0, steps=10**6, delta=1e-5)
    with pytest.raises(UserError, match="above 0"):
        noise_multiplier_for(epsilon=0.0, sample_rate=1.0, steps=1, delta=1e-5)
