"""Axes that can be read, whatever the range."""

import re

import pytest

from fl_privacy.report.charts import ChartPoint, Curve, line_chart, scatter_chart


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


def test_points_on_each_other_share_a_label():
    places = {"A": (100, 1.0), "B": (100, 0.89), "C": (78, 1.0), "D": (99.9, 0.995), "E": (78, float("inf"))}
    points = [ChartPoint(x=x, y=y, label=label) for label, (x, y) in places.items()]
    svg = scatter_chart(points, x="x", y="y", alt="", bound=0.5, bound_label="recognizable above")
    labels = [label for label in re.findall(r">([^<>]+)</text>", svg) if label[0] in places]
    assert labels == ["A, D", "B", "C", "E (exact)"]
