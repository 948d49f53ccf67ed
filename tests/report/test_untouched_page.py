"""The page of an untouched app says below its headline which facts leave in clear, though no example was read."""

from fl_privacy.report.untouched import AppPage, render_app

COUNTS = {"severity": "facts", "what": "exact numbers of rows", "where": "0", "why": ".", "times": 2, "of": 2}


def test_facts_in_clear_are_told_below_the_headline() -> None:
    page = AppPage(app="app", lede="", findings=[{**COUNTS, "kind": "train"}])
    assert page.further == ["Facts about the data leave in clear: exact numbers of rows"]
    assert "leave in clear: exact numbers of rows." in render_app(page).split("What leaves a client in clear")[0]


def test_nothing_in_clear_is_not_told() -> None:
    assert AppPage(app="app", lede="").further == []
