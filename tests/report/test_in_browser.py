"""Pages of every kind in a headless Chromium: on a phone, a desk, by night and on paper."""

import re
import threading
from pathlib import Path

import pytest

from fl_privacy.cli.watching import WatchServer
from fl_privacy.data.transformations import Policy
from fl_privacy.defenses.policy_search import Scored
from fl_privacy.report import write_brief, write_report, write_trade_off
from fl_privacy.report.live import WatchedFolder
from fl_privacy.report.policy_search import Findings, render_search
from fl_privacy.runs.folder.ongoing import Teller
from fl_privacy.types.film import Frame
from tests.report import kinds
from tests.report.browser import Browser, find_chromium
from tests.report.test_film import filmed_run, filmed_texts
from tests.results.runs import defended, pictures, record, study_entry
from tests.selection import few

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")

BOARDS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
PHONE, DESK, PAPER, BROAD_PAPER = 400, 1280, 703, 1047
"""Pixels in width; paper is A4 within its margins, upright or, for wide pages, across."""

KINDS = ["run", "attack", "audit", "audit without truth", "text", "inference", "malicious"]
PAGES = [
    *KINDS, *(f"brief of {kind}" for kind in KINDS), "film", "film of texts", "comparison",
    "comparison of texts", "trade-off", "trade-off of texts", "policy search", "watched runs", "watched run",
    "progress",
]  # fmt: skip

FAULTS = r"""
(() => {
  const say = e => `${e.tagName}.${e.getAttribute('class') || ''} ${(e.innerText || '').slice(0, 40)}`;
  const scrolls = e => { for (let p = e.parentElement; p; p = p.parentElement)
    if (p.closest('svg') || /auto|scroll|hidden|clip/.test(getComputedStyle(p).overflowX)) return true; return false; };
  const all = [...document.querySelectorAll('body *')].filter(e => !e.closest('svg') && e.getClientRects().length);
  const width = innerWidth, taken = document.documentElement.scrollWidth, faults = [];
  if (taken > width) faults.push(`the page is ${taken} wide`);
  for (const e of all) {
    const r = e.getBoundingClientRect(), style = getComputedStyle(e);
    if ((r.right > width + 1 || r.left < -1) && !scrolls(e)) faults.push(`sticks out: ${say(e)}`);
    const cuts = style.overflowX === 'hidden' && style.clipPath === 'none' && !e.closest('.film');
    if (cuts && e.scrollWidth > e.clientWidth + 1) faults.push(`is cut: ${say(e)}`);
  }
  for (const e of document.querySelectorAll('svg')) {
    const r = e.getBoundingClientRect();
    for (const t of e.querySelectorAll('text')) { const b = t.getBoundingClientRect();
      const out = b.width && (b.right > r.right + 2 || b.left < r.left - 2);
      if (out) faults.push(`out of its chart: ${t.textContent}`); }
  }
  return [...new Set(faults)];
})()
"""

CLOSED = """
[...document.querySelectorAll('details > :not(summary)')]
  .filter(e => !e.checkVisibility() || !e.getClientRects().length)
  .map(e => e.parentElement.querySelector('summary').innerText)
"""

RAW = re.compile(
    r"\$|\\math|\\[a-z]+\{|\{\{|\}\}|\{%|\bundefined\b|\bnan\b|\bNaN\b|<[a-z]+ |&[a-z]+;|StrictUndefined|Markup\("
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


def policies():
    """Render the page of a search for policies that scored four."""

    def scored(indices, privacy):
        return Scored(policy=Policy(indices), privacy=privacy, accuracy=-80.0 - 9 * privacy, altered=0.9, fsim=0.6)

    few = [scored((k,), 0.1 * k) for k in range(1, 4)]
    many = [*few, scored((1, 2, 3), 0.05)]
    found = Findings(
        scored=many, untransformed=scored((0,), 0.4), accepted=many[1:], chosen=many[-1:], threshold=-85,
        without_effect=many[:1],
    )  # fmt: skip
    return render_search(found, data="mnist_mini", model="resnet20", seed=0)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Name -> file or address."""
    out = tmp_path_factory.mktemp("pages")
    found: dict[str, Path | str] = {}
    runs = kinds.every_kind(out)
    for kind, run in runs.items():
        found[kind], found[f"brief of {kind}"] = write_report([run]), write_brief(run)
    found["film"] = write_report([filmed_run(out / "film", adaptive=True)])
    found["film of texts"] = write_report([filmed_texts(out / "film")])
    open_ = record(out, label="open", undefended=True)
    strong = [record(out, label=f"dp-{s}", changes=defended(scale=s), noise=4 * s, accuracy=0.5) for s in (0.1, 0.2)]
    told, hidden = (kinds.texts(out / "t", label=name, right=r, accuracy=0.8) for name, r in (("none", 9), ("sgd", 0)))
    found["comparison"] = write_report([open_, *strong, runs["inference"]], out / "comparison.html", cap=False)
    found["comparison of texts"] = write_report([told, hidden], out / "texts.html")
    undefended = study_entry("Undefended", "", open_, {"idlg": open_})
    noisy = [study_entry("Noise", str(k), s, {"idlg": s}) for k, s in enumerate(strong)]
    found["trade-off"] = write_trade_off([undefended, *noisy], out / "trade_off.html")
    of_texts = [study_entry("Undefended", "", told, {"dager": told})]
    of_texts.append(study_entry("Noise", "1", hidden, {"dager": hidden}))
    found["trade-off of texts"] = write_trade_off(of_texts, out / "trade_off_texts.html")
    found["policy search"] = out / "policies.html"
    found["policy search"].write_text(policies())
    going = record(out / "watched", label="a-run-with-a-name-that-is-as-long-as-names-of-runs-are", finish=False)
    teller = Teller(going)
    teller.telling("Attacking 6 updates of round 12, adaptive attacker", lambda done, total: None)(1, 3)
    teller.picture([Frame(0, (255 * image).byte()) for image in pictures(3)], pieces=lambda _: [])
    with WatchServer(WatchedFolder(going.parent)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        found["watched runs"], found["progress"] = server.address, f"{server.address}status"
        found["watched run"] = f"{server.address}{going.name}/report.html"
        yield found
        server.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_nothing_sticks_out_or_stands_raw(browser, pages, name):
    browser.open(pages[name], width=PHONE)
    assert not browser.evaluate(FAULTS), "on a phone"
    said = browser.evaluate("document.body.innerText + document.title")
    assert not RAW.search(said), RAW.search(said)
    assert browser.evaluate("!document.querySelector('script') && [...document.images].every(i => i.naturalWidth)")
    day = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.look(dark=True)
    night = browser.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert max(map(int, re.findall(r"\d+", night[0])[:3])) < 60 < min(map(int, re.findall(r"\d+", night[1])[:3]))
    browser.resize(DESK)
    assert not browser.evaluate(FAULTS), "on a desk"
    browser.look(dark=True, media="print")
    browser.resize(BROAD_PAPER if browser.evaluate("!!document.querySelector('main.wide')") else PAPER)
    assert not browser.evaluate(FAULTS), "on paper"
    assert browser.evaluate(CLOSED) == [], "closed on paper"
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)" != day


@pytest.mark.parametrize("name", ["trade-off", "laptop", "smoke", "table"])
def test_the_first_sheet_of_a_trade_off_or_board_holds_a_chart(request, browser, name):
    page = BOARDS / f"{name}.html"
    browser.open(page if page.exists() else request.getfixturevalue("pages")[name], width=BROAD_PAPER, media="print")
    sheet = 186 / 25.4 * 96  # A4 across, within its margins
    assert browser.evaluate("document.querySelector('.chart').getBoundingClientRect().bottom") < sheet


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_a_brief_is_one_sheet(browser, pages, kind):
    browser.open(pages[f"brief of {kind}"])
    assert len(re.findall(rb"/Type\s*/Page\b", browser.pdf())) == 1


def test_the_film_plays_stops_and_lies_flat(browser, pages):
    browser.open(pages["film"])
    shown = "new DOMMatrix(getComputedStyle(document.querySelector('.reel')).transform).e"
    playing = "document.getAnimations().filter(a => a.playState === 'running').length"
    assert browser.evaluate(playing) > 0
    for moment in (0, 7, 11):
        browser.evaluate(f"document.querySelectorAll('.film .track input')[{moment}].click()")
        width = browser.evaluate("document.querySelector('.window').getBoundingClientRect().width")
        assert browser.evaluate(shown) == pytest.approx(-moment * width, abs=1)
        marks = "[...document.querySelector('.film').querySelectorAll('g[id*=\"-moment-\"]')]"
        assert browser.evaluate(f"{marks}.map(g => getComputedStyle(g).opacity).indexOf('1')") == moment
    browser.evaluate("document.querySelector('.film .play input').click()")
    browser.look(calm=True)
    assert browser.evaluate(playing) == 0, "where motion is not wanted"
    assert browser.evaluate(shown) == pytest.approx(-11 * width, abs=1)
    browser.look(media="print")
    rows = "[...document.querySelector('.reel').children].map(e => Math.round(e.getBoundingClientRect().top))"
    assert len(set(browser.evaluate(rows))) == 1 and browser.evaluate(shown) == 0
    assert browser.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"


def test_a_film_of_texts_moves_like_one_of_images_and_is_lines_on_paper(browser, pages):
    browser.open(pages["film of texts"], width=PHONE)
    seen = """[...document.querySelectorAll('.window')].map(w => [...w.querySelectorAll('p')].filter(p => {
        const a = p.getBoundingClientRect(), b = w.getBoundingClientRect();
        return a.left > b.left - 2 && a.right < b.right + 2; }).map(p => [...w.querySelectorAll('p')].indexOf(p)))"""
    for moment in (0, 7, 11):
        browser.evaluate(f"document.querySelectorAll('.film .track input')[{moment}].click()")
        assert browser.evaluate(seen) == [[moment]] * 3
    browser.look(media="print")
    tops = "[...document.querySelector('.reel').children].map(e => Math.round(e.getBoundingClientRect().top))"
    assert len(set(browser.evaluate(tops))) == 12


@pytest.mark.long
def test_a_watched_page_shows_its_progress_and_refreshes(browser, pages):
    browser.open(pages["watched run"])
    frame = "document.querySelector('iframe.live').contentDocument"
    assert "Attacking 6 updates of round 12, adaptive attacker, 33.3 %" in browser.evaluate(f"{frame}.body.innerText")
    assert browser.evaluate(f"[...{frame}.images].filter(i => i.naturalWidth).length") == 3
    assert browser.evaluate(f"{frame}.querySelector('meta[http-equiv=refresh]').content") == "2"
    for width in (DESK, PHONE):
        browser.resize(width)
        room = browser.evaluate("document.querySelector('iframe.live').clientHeight")
        assert browser.evaluate(f"{frame}.querySelector('.progress').scrollHeight") <= room
    browser.open(pages["watched runs"])
    assert browser.evaluate("document.querySelectorAll('.pair').length") == 3


def test_a_long_name_in_a_headline_breaks_on_a_phone(browser):
    browser.open(BOARDS / "smoke.html", width=PHONE)
    browser.evaluate("document.querySelector('h1').textContent = 'inverting_gradients_refiner_paper_of_an_author'")
    assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE


@pytest.mark.parametrize("name", ["laptop", "table"])
def test_a_board_fits_a_desk_and_shows_the_other_columns_on_demand(browser, name):
    over = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('#board').parentElement)"
    shown = "[...document.querySelectorAll('#board thead th')].filter(e => e.getClientRects().length).length"
    browser.open(BOARDS / f"{name}.html", width=DESK)
    assert browser.evaluate(over) <= 0 and browser.evaluate(shown) == 5
    order = "[...document.querySelectorAll('.chart, .tiles, #board')].map(e => e.className)"
    assert browser.evaluate(order) == ["chart", "tiles", "cards"], "a board begins with its chart"
    browser.evaluate("document.querySelector('#columns').click()")
    assert browser.evaluate(shown) == browser.evaluate("document.querySelectorAll('#board thead th').length") > 5
