"""Templates to a page that needs nothing besides itself."""

import base64
import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fl_privacy.errors import neutral
from fl_privacy.report import headline, numbers
from fl_privacy.report.words import with_words
from fl_privacy.runs.folder import leakage as readings

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""Of every page: its own styles and pictures inside it, no scripts but one that ``render`` is given, nothing from
elsewhere."""

TEMPLATES = Path(__file__).resolve().parent / "templates"


def render(template: str, *, live: bool = False, script: str | None = None, **values: Any) -> str:
    """Render the page ``template`` with ``values``; whatever they hold is escaped and neutral.

    Args:
        template: name of its file.
        live: it is served, and has a frame of its own with the progress.
        script: name of the only script that the page may run, one of this package's own, which stands in it as it is.
        values: by name.
    """
    policy, program = f"{CONTENT_SECURITY_POLICY}; frame-src 'self'" if live else CONTENT_SECURITY_POLICY, Markup("")
    if script is not None:
        program = Markup((TEMPLATES / script).read_text(encoding="utf-8"))
        digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
        policy = f"{policy}; script-src 'sha256-{digest}'"
    page = _environment().get_template(template)
    return neutral(with_words(page.render(content_security_policy=policy, live=live, script=program, **values)))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fl_privacy.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "unbroken": unbroken,
        "percent": _unbroken(numbers.percent),
        "points": _unbroken(numbers.points),
        "seconds": numbers.seconds,
        "size": numbers.size,
        "metric": _unbroken(numbers.metric),
        "ratio": numbers.ratio,
        "interval": numbers.interval,
        "title_of": numbers.title,
        "title_within": numbers.title_within,
        "few": readings.few,
        "read_in_words": headline.read_in_words,
    }
    return environment


def unbroken(sentence: str) -> str:
    """Keep percent signs in one line with their numbers, as in a heading that is wrapped."""
    return sentence.replace(" %", "\N{NO-BREAK SPACE}%")


def _unbroken(show: Callable[..., str]) -> Callable[..., str]:
    """Return ``show`` with a figure, its sign and its unit kept in one line."""
    return lambda *values: show(*values).replace(" ", "\N{NO-BREAK SPACE}")


def link_to(folder: Path, out: Path) -> str | None:
    """Return the address of the page of the run in ``folder`` within the page ``out``; ``None`` if it has none.

    It starts with ``./`` and is percent-encoded, so that no folder's name is read as a scheme, a query or a fragment.
    """
    page = folder / "report.html"
    if not page.is_file():
        return None
    return "./" + quote(Path(os.path.relpath(page.resolve(), out.resolve().parent)).as_posix())
