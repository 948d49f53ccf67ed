import pytest

from fl_privacy.types import VictimId


@pytest.mark.parametrize(
    ("victim", "text", "source"),
    [
        (VictimId(3, 7), "round-3/client-7", "client-7"),
        (VictimId(0, 0, 12), "round-0/client-0/victim-12", "client-0/victim-12"),
    ],
)
def test_victims_have_names_that_can_be_read_back(victim: VictimId, text: str, source: str) -> None:
    assert (str(victim), victim.source) == (text, source)
    assert VictimId.parse(text) == victim


def test_a_part_is_named_after_its_victim() -> None:
    assert str(VictimId(1, 2, 3, part="features")) == "round-1/client-2/victim-3/features"


@pytest.mark.parametrize(
    "text", ["", "round-1", "round-1/client-1/", "round--1/client-0", "round-1/client-\u0661", "../round-1/client-1"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected to be round-R/client-C or round-R/client-C/victim-K"):
        VictimId.parse(text)


@pytest.mark.parametrize("part", ["..", "a/b", "a b", "\u00e9"])
def test_a_part_that_leaves_its_folder_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="at least 0 and its part a word"):
        VictimId(1, 1, 1, part=part)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        VictimId(1, -1)


def test_victims_are_ordered_by_their_numbers() -> None:
    ordered = [VictimId(r, c, p) for r in (1, 2, 10) for c in (0, 9, 11) for p in (None, 0, 12)]
    assert sorted({*ordered}) == ordered
