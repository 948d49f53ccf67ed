"""Update the table of settings: ``python docs/settings_table.py docs/settings.md``."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.runs.config.compose import compose_run
from fl_privacy.runs.config.parse import select
from fl_privacy.runs.config.settings import declared_settings

BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->\n"


def settings_table() -> str:
    """Build a row for each setting: key, default, role and meaning."""
    rows = "".join(f"| {' | '.join(row)} |\n" for row in _rows())
    return f"| setting | default | decides | |\n|---|---|---|---|\n{rows}"


def with_table(text: str) -> str:
    """Return ``text`` with the table between the marks ``BEGIN`` and ``END``; ``UserError`` without marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise UserError(f"The marks {BEGIN.strip()} and {END.strip()} are expected in the page; put them back.")
    return before + begin + settings_table() + end + after


def _rows() -> Iterator[tuple[str, str, str, str]]:
    defaults = compose_run().plain()
    for key, declared in declared_settings():
        is_group = "group" in declared.metadata
        default = defaults["choices"].get(key) if is_group else select(defaults, key)
        in_yaml = default if isinstance(default, str) else json.dumps(default)
        shown = "" if default is None and is_group else f"`{in_yaml}`"
        yield f"`{key}`", shown, declared.metadata["role"], declared.metadata["meaning"].replace("|", "\\|")


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_whole(page, with_table(page.read_text()))
