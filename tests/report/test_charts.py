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


@pytest.mark.parametrize(("x", "anchor"), [((80.0, 90.0), "end"), ((90.0, 100.0), "start")])
def test_the_label_of_a_bound_stands_where_no_point_is_near(x, anchor):
    points = [ChartPoint(x=x[0], y=30.0, label="A"), ChartPoint(x=x[1], y=30.0, label="B")]
    near = ChartPoint(x=x[0] if anchor == "end" else x[1], y=16.0, label="C")
    svg = scatter_chart([*points, near], x="x", y="y", alt="", bound=15.0, bound_label="recognizable above")
    style = re.search(r'<text style="([^"]*)"[^>]*>recognizable above', svg)
    assert style and (f"text-anchor: {anchor}" in style[1] or (anchor == "start" and "text-anchor" not in style[1]))
