"""Render self-contained pages from templates."""

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fl_privacy.errors import UserError, neutral
from fl_privacy.report import headline, words
from fl_privacy.report.words import with_words
from fl_privacy.runs.folder import leakage as readings

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""Policy of every page: inline styles and pictures, no script except one given to ``render``."""

TEMPLATES = Path(__file__).resolve().parent / "templates"


def render(template: str, *, live: bool = False, script: str | None = None, **values: Any) -> str:
    """Render ``template``; ``live`` lets the page embed a frame with a run's progress, ``script``: file to inline."""
    policy, program = CONTENT_SECURITY_POLICY + "; frame-src 'self'" * live, Markup("")
    if script is not None:
        program = Markup((TEMPLATES / script).read_text(encoding="utf-8"))
        digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
        policy = f"{policy}; script-src 'sha256-{digest}'"
    page = part_of_page(template, content_security_policy=policy, live=live, script=program, **values)
    return neutral(with_words(str(page)))


def part_of_page(template: str, **values: Any) -> Markup:
    """Render ``template`` with escaped ``values``, as a part of a page that ``render`` makes."""
    return Markup(environment().get_template(template).render(**values))


@cache
def environment() -> Environment:
    """Make Jinja's environment: templates and filters."""
    made = Environment(
        loader=PackageLoader("fl_privacy.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "unbroken": lambda sentence: sentence.replace(" %", "\N{NO-BREAK SPACE}%"),
        "percent": _unbroken(words.percent),
        "points": _unbroken(words.points),
        "seconds": words.seconds,
        "size": words.size,
        "metric": _unbroken(words.metric),
        "ratio": words.ratio,
        "capital": headline.capital,
        "interval": lambda *values: words.interval(*values).replace(" %", "\N{NO-BREAK SPACE}%"),
        "share_interval": words.share_interval,
        "title_of": words.title,
        "title_within": words.title_within,
        "few": readings.few,
        "without_error": words.without_error,
        "options": lambda text: Markup(_OPTION.sub(r'<span class="option">\1</span>', str(escape(text)))),
        "read_in_words": headline.read_in_words,
    }
    return made


_OPTION = re.compile(r"(--[a-z]+(?:-[a-z]+)*)")  # such as --with-defense, in which no line breaks


def _unbroken(show: Callable[..., str]) -> Callable[..., str]:
    return lambda *values: show(*values).replace(" ", "\N{NO-BREAK SPACE}")


@contextmanager
def writable(page: Path, instead: str = "another place with --out") -> Iterator[None]:
    """Create the folder of ``page``; if a write in the context fails, raise ``UserError`` that suggests ``instead``."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"A writable file is expected, but {page} is not ({error.strerror}); choose {instead}."
        ) from error


def link_to(folder: Path, out: Path) -> str | None:
    """Return the escaped link from ``out`` to the page of the run in ``folder``; ``None`` if the run has no page."""
    page = folder / "report.html"
    if not page.is_file():
        return None
    return "./" + quote(Path(os.path.relpath(page.resolve(), out.resolve().parent)).as_posix())
