"""Axes that can be read, whatever the range."""

import re

import pytest

from fl_privacy.report.charts import Curve, line_chart


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([0.046, 0.02, 0.0115], {"0.02", "0.03", "0.04"}),
        ([3.0, 2.0, 1.2], {"2"}),
        ([1.0, 1e-3, 1e-6], {"1", "0.001", "1e-06"}),
        ([1.0, 1.0], {"1"}),
        ([float("nan"), 2.0, 1.0], {"1", "2"}),
    ],
)
def test_a_logarithmic_axis_names_some_values(values, named):
    svg = line_chart([Curve(x=range(len(values)), y=values)], x="Share", y="Loss", log=True, alt="")
    labels = set(re.findall(r">([\d.e-]+)</text>", svg))
    assert named <= labels and "mathdefault" not in svg
