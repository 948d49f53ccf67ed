import pytest

from fl_privacy.data.transformations import Policy
from fl_privacy.defenses.policy_search import Scored, Selection
from fl_privacy.errors import UserError


def scored(name, privacy, accuracy, fsim=None, altered=1.0):
    return Scored(policy=Policy.parse(name), privacy=privacy, accuracy=accuracy, altered=altered, fsim=fsim)


FOUND = [
    scored("3-43", 0.1, -9.0, 0.5),
    scored("15-3", 0.2, -2.0, 0.6),
    scored("15-9", 0.3, -1.0, 0.9),
    scored("7", 0.4, -3.0, 0.95),
]


PLAIN = 0.5
"""S_pri of the images as they are."""


def names(found):
    return [str(s.policy) for s in found]


def test_the_accurate_half_the_most_private_first():
    assert names(Selection().accepted(FOUND, PLAIN)) == ["15-3", "15-9"]
    assert Selection().threshold(FOUND) == -2.0


def test_a_given_threshold():
    assert names(Selection(accuracy_at_least=-3.0).accepted(FOUND, PLAIN)) == ["15-3", "15-9", "7"]


def test_the_set_has_no_operation_in_common():
    assert names(Selection(accuracy_at_least=-3.0).chosen(FOUND, PLAIN)) == ["15-3", "7"]


def test_distorted_images_are_left_out():
    assert names(Selection(accuracy_share=1, fsim_at_least=0.9).accepted(FOUND, PLAIN)) == ["15-9", "7"]


def test_policies_without_effect_are_refused_however_private_they_score():
    """Color on grey images, at level 0, twice inverted: nothing would protect what was uploaded."""
    idle = [scored("12", 0.01, -0.1, altered=0.0), scored("0-29", 0.02, -0.2, altered=0.89)]
    assert names(Selection().accepted([*idle, *FOUND], PLAIN)) == ["15-3", "15-9"]
    assert Selection().threshold([*idle, *FOUND]) == Selection().threshold(FOUND)
    assert names(Selection(altered_at_least=0.8, accuracy_share=1).chosen([*idle, *FOUND], PLAIN)) == ["0-29", "3-43"]
    with pytest.raises(UserError, match="only 0 of 2"):
        Selection().chosen(idle, PLAIN)


def test_what_scores_no_more_private_than_the_images_as_they_are_is_refused():
    assert names(Selection(accuracy_share=1).accepted(FOUND, 0.3)) == ["3-43", "15-3"]


def test_too_few_are_one_line():
    with pytest.raises(UserError, match="only 1 of 4"):
        Selection().chosen(FOUND, PLAIN)


@pytest.mark.parametrize(
    "wrong",
    [{"accuracy_share": 0.0}, {"accuracy_share": 1.1}, {"fsim_at_least": 2.0}, {"keep": 0}, {"altered_at_least": 0.0}],
)
def test_wrong_demands_are_one_line(wrong):
    with pytest.raises(UserError):
        Selection(**wrong)


@pytest.mark.parametrize(("privacy", "accuracy"), [(float("nan"), -1.0), (0.1, float("inf"))])
def test_scores_that_are_not_finite_are_refused(privacy, accuracy):
    with pytest.raises(UserError, match="finite"):
        scored("3", privacy, accuracy)
