"""How numbers are shown."""

from fl_privacy.report.numbers import interval


def test_no_zero_is_negative() -> None:
    assert interval({"ci95": [-0.0001, 0.0004]}, "lpips") == "[0.000, 0.000]"
