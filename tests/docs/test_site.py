"""The documentation is built from the code without a warning, and fetches nothing."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from fl_privacy.config import options

ROOT = Path(__file__).resolve().parents[2]
METHODS = yaml.safe_load((ROOT / "docs" / "methods.yaml").read_text())
NOT_A_METHOD = {"attack": {"none", "custom"}, "defense": {"none", "custom"}}


def test_every_attack_and_defense_is_on_one_page() -> None:
    for kind, told in METHODS.items():
        listed = [option for method in told.values() for option in method["options"]]
        assert sorted(listed) == sorted(set(options(kind)) - NOT_A_METHOD[kind])


def test_ideas_are_of_three_sentences() -> None:
    for told in METHODS.values():
        for name, method in told.items():
            sentences = re.findall(r"[.!?](?:\s|$)", re.sub(r"\b(?:al|eq)\.|`[^`]*`", "", method["idea"]))
            assert len(sentences) == 3, name


def test_the_readme_is_short_and_links_to_what_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []
    picture = ROOT / "docs" / "assets" / "picture.png"
    assert picture.stat().st_size < 200_000


class Resources(HTMLParser):
    """What a browser loads for a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loads = tag in ("script", "img", "iframe", "source") or (
            tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload")
        )
        if loads and (address := given.get("src") or given.get("href")):
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` does."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return target


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        parser = Resources()
        parser.feed(page.read_text())
        assert [address for address in parser.found if re.match(r"(https?:)?//", address)] == []
        assert 'data-md-component="source"' not in page.read_text()  # asks the repository's host for its stars
        style = "".join(path.read_text() for path in site.glob("assets/stylesheets/*.css"))
        assert not re.search(r"url\(\s*['\"]?https?:", style)


@pytest.mark.slow
def test_pages_are_whole(site: Path) -> None:
    """No mark or formula is left over, settings are those of the code, the reference has its members."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "<!-- catalog" not in text and "<!-- metrics" not in text
        assert "$$" not in re.sub(r"<code.*?</code>", "", text, flags=re.DOTALL)
    pruning = (site / "defenses" / "pruning" / "index.html").read_text()
    assert "defense.rate" in pruning and 'class="formula"' in pruning
    assert (
        'id="fl_privacy.attacks.reconstruct"' in (site / "reference" / "fl_privacy.attacks" / "index.html").read_text()
    )
