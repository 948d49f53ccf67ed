"""What every page keeps out, and how it lies on paper and on a phone."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from fl_privacy.report import write_report
from fl_privacy.report.page import CONTENT_SECURITY_POLICY, link_to
from tests.results.runs import defended, record

pytestmark = pytest.mark.usefixtures("undrawn_charts")

TEMPLATES = Path(__file__).parents[2] / "fl_privacy" / "report" / "templates"
STYLE = (TEMPLATES / "style.css").read_text()


def rules_of(query):
    """Return the declarations within a media query."""
    start = STYLE.index("{", STYLE.index(query)) + 1
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(STYLE[end], 0)
        end += 1
    return STYLE[start : end - 1]


@pytest.mark.parametrize("name", ["javascript:alert(1)", "a b#c?d", "https:", "50%41", "quote\"'<"])
def test_no_folder_name_becomes_anything_but_a_relative_path(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "report.html").write_text("page")
    link = link_to(folder, tmp_path / "comparison.html")
    assert link.startswith("./") and unquote(link) == f"./{name}/report.html"
    assert not set(link) & set(":#?\"'< ")
    assert link_to(folder, tmp_path / "deep" / "page.html") == link.replace("./", "./../", 1)
    assert link_to(tmp_path / "nowhere", tmp_path / "page.html") is None


def test_links_of_a_comparison_are_relative(tmp_path):
    runs = [record(tmp_path, label="javascript:alert(1)"), record(tmp_path, label="b", changes=defended(scale=0.1))]
    for run in runs:
        write_report([run])
    links = re.findall(r'<a href="([^"]*)"', write_report(runs).read_text())
    assert len(links) == 2 and all(link.startswith("./") and ":" not in link for link in links)


def test_every_page_says_what_may_be_loaded(tmp_path):
    bases = [path for path in TEMPLATES.glob("*.j2") if "<html" in path.read_text()]
    assert [path.name for path in bases] == ["base.html.j2"]
    policy = f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'.replace("'", "&#39;")
    single = write_report([record(tmp_path)]).read_text()
    assert policy in single and single.index(policy) < single.index("<style>")
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY and "script" not in CONTENT_SECURITY_POLICY
    assert "http" not in CONTENT_SECURITY_POLICY and "*" not in CONTENT_SECURITY_POLICY


def test_paper_is_white_and_nothing_is_closed_cut_or_split():
    rules = rules_of("@media print")
    assert "--paper: #fff" in rules and "color-scheme: light" in rules
    assert re.search(r"details::details-content \{ content-visibility: visible", rules)
    assert re.search(r"details, \.scroll \{ overflow: visible", rules)
    unsplit = re.search(r"([^}]*)\{ break-inside: avoid; \}", rules).group(1)
    assert {".chart", ".pair", "tr", "svg"} <= {part.strip() for part in unsplit.split(",")}
    assert "white-space: normal" in rules and "landscape" in rules
    dark = STYLE.index("prefers-color-scheme: dark")
    assert STYLE[:dark].endswith("@media screen and (")
    assert "lazy" not in (TEMPLATES / "macros.html.j2").read_text(), "a picture that was not seen yet is not printed"


def test_rows_are_cards_on_a_phone(tmp_path):
    rules = rules_of("@media (max-width: 560px)")
    assert re.search(r"\.cards tr, \.cards th, \.cards td \{ display: block", rules)
    assert "content: attr(data-label)" in rules
    text = write_report([record(tmp_path, adaptive=0.1)]).read_text()
    for table in re.findall(r'<table class="[^"]*cards[^"]*">.*?</table>', text, re.DOTALL):
        cells = re.findall(r"<td([^>]*)>", table)
        assert cells and all("data-label=" in cell or "nothing" in cell for cell in cells)
    heads = re.findall(
        r"<th(?: [^>]*)?>([^<]*)", re.search(r'<table class="leakage cards">.*?</thead>', text, re.DOTALL)[0]
    )
    assert heads[:4] == ["Metric", "Attacker", "Mean", "95 % CI"]
