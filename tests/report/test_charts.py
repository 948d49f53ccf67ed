"""Axes that can be read, whatever the range."""

import math
import re
from xml.etree import ElementTree

import pytest

from fl_privacy.report.charts import ChartPoint, Curve, line_chart, partition_chart, scatter_chart


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


def test_a_line_has_gaps_where_nothing_is_known_and_keeps_its_peaks():
    values = [1.0] * 5000 + [None, math.nan, math.inf] + [1.0] * 5000
    values[2222], values[7777] = 9.0, -3.0
    svg = line_chart([Curve(x=range(len(values)), y=values)], x="<Step>", y="a & b", alt='"quoted"')
    assert ElementTree.fromstring(svg).get("aria-label") == '"quoted"' and "&lt;Step&gt;" in svg
    (path,) = re.findall(r'<path d="([^"]*)" style="fill:none', svg)
    heights = [float(y) for y in re.findall(r" ([\d.]+)", path)]
    assert path.count("M") == 2 and len(heights) < 4 * 2 * 400
    assert sorted(heights)[1] - min(heights) > 50 < max(heights) - sorted(heights)[-2], "one peak and one low each"


@pytest.mark.parametrize("log", [False, True])
def test_values_without_neighbors_are_dots_and_huge_ones_are_left_out(log: bool) -> None:
    values = [None, 1.0, None, 1e300, 2.0, 3.0, math.nan, 1.5, -1e308]
    svg = line_chart([Curve(x=range(len(values)), y=values)], x="Round", y="Loss", log=log, alt="")
    (path,) = re.findall(r'<path d="([^"]*)" style="fill:none', svg)
    assert path.count("h0") == 2 and path.count("L") == 1 and "1e+" not in svg
    assert line_chart([Curve(x=[1], y=[1e300])], x="Round", y="Loss", log=log, alt="")


@pytest.mark.parametrize("many", [False, True])
def test_bars_add_up_and_have_a_color_for_each_class(many: bool):
    counts = [[3, 0, 7] + [2] * 20 * many, [1, 4, 0] + [0] * 20 * many]
    names = [f"class <{k}>" for k in range(len(counts[0]))]
    svg = ElementTree.fromstring(partition_chart(counts, names))
    bars = [bar.attrib for bar in svg.iter() if bar.tag.endswith("rect")]
    assert len(bars) == sum(count > 0 for row in counts for count in row)
    left = [bar for bar in bars if bar["x"] == bars[0]["x"]]
    lowest = max(float(bar["y"]) + float(bar["height"]) for bar in left)
    total, highest = sum(counts[0]), min(float(bar["y"]) for bar in left)
    assert (lowest - highest) / float(left[0]["height"]) == pytest.approx(total / 3, abs=0.2)
    assert len({bar["style"] for bar in left}) == len(left)
    assert ("class &lt;0&gt;" in partition_chart(counts, names)) is not many


def test_moments_of_a_film_are_marked_on_their_curves():
    curves = [Curve(x=[0, 50, 100], y=[1.0, 0.1, 0.01], label=name) for name in "ab"]
    svg = line_chart(curves, x="Share", y="Loss", log=True, alt="", marks=[[(0, 1.0), (100, 0.01)]] * 2)
    groups = re.findall(r'<g id="c\d+-moment-(\d)">(.*?)</g>', svg)
    assert [(moment, dots.count("<circle")) for moment, dots in groups] == [("0", 2), ("1", 2)]
