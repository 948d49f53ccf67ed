"""The documentation is built from the code without a warning, and fetches nothing."""

import importlib
import re
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.utils.yaml import yaml_load

from fl_privacy.cli.main import run_command_line

ROOT = Path(__file__).resolve().parents[2]
METHODS = yaml.safe_load((ROOT / "docs" / "methods.yaml").read_text())


def test_ideas_are_of_three_sentences() -> None:
    for told in METHODS.values():
        for name, method in told.items():
            sentences = re.findall(r"[.!?](?:\s|$)", re.sub(r"\b(?:al|eq)\.|`[^`]*`", "", method["idea"]))
            assert len(sentences) == 3, f"the idea of {name} has {len(sentences)} sentences, not three"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert (ROOT / "docs" / "assets" / "picture.png").stat().st_size < 200_000


@pytest.mark.long
def test_the_readmes_program_reads_four_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    exec(block[1], {})
    assert (tmp_path / "reconstructed.png").stat().st_size > 1000


def test_the_parts_of_ones_own_are_what_their_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (tmp_path / "parts_of_a_page.py").write_text("\n\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    attack = ["attack=custom", "attack._target_=parts_of_a_page.huber", "attack.iterations=2", "attack.bound=0.1"]
    own = [
        ["defense=custom", "defense._target_=parts_of_a_page.shuffled_signs", "defense.share=0.3", *attack],
        ["data=custom", "data._target_=parts_of_a_page.noise", "+data.size=12", *attack, "attack.layers={*.bias:0}"],
    ]
    for words in own:
        assert run_command_line(["attack", "model=lenet_dlg", "victims=1", "page=false", "out=runs", *words]) == 0


def test_the_readmes_table_of_apps_is_that_of_the_rows() -> None:
    done = subprocess.run([sys.executable, "docs/app_kinds.py", "--check"], cwd=ROOT, check=False)
    assert not done.returncode, "run python docs/app_kinds.py"


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("links")


def test_links_outside_of_the_site_lead_somewhere(links: Any) -> None:
    files = links.markdown_files()
    assert {ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "audit.md"} <= set(files)
    assert list(links.broken_in_markdown(files)) == []
    assert list(links.foreign_addresses()) == []


def test_what_leads_nowhere_is_named(links: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ROOT", tmp_path)
    told = {
        "other.md#the-end": "", "other.md#nowhere": "no such place in it", "gone.md": "no such file",
        "#here": "", "https://host.org/a": "", "http://host.org": "no https address",
        "https://host": "no https address",
    }  # fmt: skip
    (tmp_path / "other.md").write_text("# The `end`\n\n```\n[no link](none.md)\n```\n")
    (tmp_path / "page.md").write_text("# Here\n\n" + "\n".join(f"[x]({target})" for target in told))
    found = list(links.broken_in_markdown([tmp_path / "page.md", tmp_path / "other.md"]))
    assert found == [f"page.md: {target}: {why}" for target, why in told.items() if why]


def test_links_of_the_site_that_lead_nowhere_are_named(links: Any, tmp_path: Path) -> None:
    base = "/" + links.site_address().rpartition("/")[2]
    whole = f'<a href="sub/#there">a</a><a href="{base}/sub/">b</a><img src="p.png"><a href="https://host.org">c</a>'
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "index.html").write_text('<h1 id="there">There</h1>')
    (tmp_path / "p.png").write_bytes(b"")
    (tmp_path / "index.html").write_text(whole)
    assert list(links.broken_in_site(tmp_path)) == []
    (tmp_path / "index.html").write_text(whole + '<a href="sub/#gone">d</a><a href="none/">e</a><a href="/x">f</a>')
    assert [line.partition(": ")[2] for line in links.broken_in_site(tmp_path)] == [
        "sub/#gone: no such place in it", "none/: no such file", "/x: outside of the site",
    ]  # fmt: skip


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
    """Build the site as ``make docs`` does, without the index of its search."""
    target = tmp_path_factory.mktemp("site")
    plugins = [plugin for plugin in yaml_load((ROOT / "mkdocs.yml").read_text())["plugins"] if plugin != "search"]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(ROOT)
        patch.syspath_prepend(str(ROOT))
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(target), plugins=plugins, strict=True)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)  # a warning ends it
        config.plugins.on_shutdown()
    return target


@pytest.mark.long
def test_links_of_the_site_lead_somewhere(site: Path, links: Any) -> None:
    assert list(links.broken_in_site(site)) == []


@pytest.mark.long
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


@pytest.mark.long
def test_pages_are_whole(site: Path) -> None:
    """No mark or formula is left over, settings are those of the code, the reference has its members."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "<!-- catalog" not in text and "<!-- metrics" not in text
        assert "$$" not in re.sub(r"<code.*?</code>", "", text, flags=re.DOTALL)
    assert f"fl_privacy {version('fl-privacy')}" in (site / "index.html").read_text()
    pruning = (site / "defenses" / "pruning" / "index.html").read_text()
    assert "defense.rate" in pruning and 'class="formula"' in pruning
    assert (
        'id="fl_privacy.attacks.reconstruct"' in (site / "reference" / "fl_privacy.attacks" / "index.html").read_text()
    )
