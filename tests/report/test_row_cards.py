"""Rows side by side on a phone: nothing of the last attacker's column is cut, and names of columns are text."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_privacy.report.page import environment
from tests.report.browser import Browser, find_chromium

CARD = (
    '{% from "macros.html.j2" import row_card %}<style>{% include "style.css" %}</style>'
    "<main>{{ row_card(row) }}</main>"
)


def card(*, adaptive: bool) -> str:
    def cell(text: str) -> SimpleNamespace:
        return SimpleNamespace(kind="right", certain=True, text=text)

    names = ["exercise_angina", "fasting_blood_sugar", "<b>_column", "a" * 40]
    values = ["asymptomatic", "reversable defect", "Married-civ-spouse", "1234567890.125"]
    lines = [
        SimpleNamespace(column=name, original=value, guess=cell(value), adaptive=cell(value))
        for name, value in zip(names, values, strict=True)
    ]
    row = SimpleNamespace(
        rank="", failure="", adaptive=adaptive, lines=lines, figures="Cells right 100 %", where="client 0", label="",
        known=True,
    )  # fmt: skip
    return environment().from_string(CARD).render(row=row)


def test_names_of_columns_break_at_underscores_and_are_escaped() -> None:
    page = card(adaptive=False)
    assert "exercise_<wbr>angina" in page
    assert "&lt;b&gt;_<wbr>column" in page and "<b>_" not in page


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")
@pytest.mark.parametrize("adaptive", [False, True])
def test_no_column_is_cut_on_a_phone(adaptive: bool, tmp_path: Path) -> None:
    page = tmp_path / "card.html"
    page.write_text(card(adaptive=adaptive))
    with Browser(tmp_path / "profile") as browser:
        browser.open(page, width=400)
        over = browser.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('figure.row'))")
    assert over <= 0
