"""``make docs`` checks every link with it: of the site as it was built, and of the Markdown files beside it.

    python docs/links.py site

A link within the project leads to a file, and with ``#`` to a place in it; one to elsewhere is an https address that is
well formed. Nothing is fetched.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEAD = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}")
MADE_HERE = ("data:", "mailto:", "javascript:void")


class Page(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        self.targets += [given[name] for name in ("href", "src") if given.get(name)]


def broken_in_site(site: Path) -> Iterator[str]:
    """List broken links of the built site, each with the page that it is on."""
    pages = {path: Page() for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        page.feed(path.read_text())
    base = urlsplit(site_address()).path.rstrip("/") + "/"
    places = {path: page.places for path, page in pages.items()}
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            if why := _why_broken(target, path, site, places, base):
                yield f"{path.relative_to(site)}: {target}: {why}"


def broken_in_markdown(files: list[Path]) -> Iterator[str]:
    """List broken links of Markdown files; links to generated pages are checked on the site only."""
    places = {path: set(map(slug, HEAD.findall(_prose(path)))) for path in files}
    for path in files:
        for target in dict.fromkeys(LINK.findall(_prose(path))):
            made_from_code = re.fullmatch(r"(attacks|defenses|reference)/\w+\.md", target)
            if not made_from_code and (why := _why_broken(target, path, ROOT, places, "/")):
                yield f"{path.relative_to(ROOT)}: {target}: {why}"


def _why_broken(target: str, page: Path, root: Path, places: Mapping[Path, set[str]], base: str) -> str:
    """Explain why a link is broken; empty where it is sound."""
    if target.startswith(MADE_HERE):
        return ""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return "" if parts.scheme == "https" and HOST.fullmatch(parts.netloc) else "no https address"
    name = unquote(parts.path)
    if name.startswith("/"):
        if not name.startswith(base):
            return "outside of the site"
        found = root / name.removeprefix(base)
    else:
        found = (page.parent / name).resolve() if name else page
    if found.is_dir() and (found / "index.html").is_file():
        found = found / "index.html"
    if not found.exists():
        return "no such file"
    place = unquote(parts.fragment)
    return "no such place in it" if place and found in places and place not in places[found] else ""


def _prose(path: Path) -> str:
    """Return the file's text without its code listings."""
    return re.sub(r"`[^`\n]*\]\([^`\n]*`", "", FENCE.sub("", path.read_text()))


def slug(head: str) -> str:
    """Turn a heading into its anchor, as the site and the repository's host name it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", head)
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain.lower()))


def markdown_files() -> list[Path]:
    """List the repository's Markdown files that are not pages of the published site."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = [ROOT / name for name in listed.splitlines()] or sorted(ROOT.glob("*.md"))
    return [path for path in found if (ROOT / "docs" / "published") not in path.parents]


def site_address() -> str:
    """Return the address of the site that ``mkdocs.yml`` configures."""
    line = next(line for line in (ROOT / "mkdocs.yml").read_text().splitlines() if line.startswith("site_url:"))
    return line.partition(" ")[2].strip()


def foreign_addresses() -> Iterator[str]:
    """List places where the project's own addresses do not agree."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"]
    home = urls["Repository"]
    if cited != home:
        yield f"CITATION.cff: {cited} is not {home}, the repository in pyproject.toml"
    if urls["Documentation"] != site_address():
        yield f"mkdocs.yml: {site_address()} is not {urls['Documentation']}, the documentation in pyproject.toml"
    for name in ("Issues", "Changelog"):
        if not urls[name].startswith(f"{home}/"):
            yield f"pyproject.toml: {name} is not within {home}"


def main() -> None:
    """Name every broken link, and fail if there is one."""
    site = Path(sys.argv[1]).resolve() if len(sys.argv) == 2 else ROOT / "site"
    if not (site / "index.html").is_file():
        raise SystemExit(f"A built site is expected in {site}; run `make docs`.")
    broken = [*broken_in_site(site), *broken_in_markdown(markdown_files()), *foreign_addresses()]
    if broken:
        raise SystemExit("\n".join([*broken, f"{len(broken)} links are broken."]))


if __name__ == "__main__":
    main()
