"""The reference's text on fields: comments at the end of their lines, which mkdocstrings leaves out by itself."""

import re
from typing import Any

from griffe import Docstring, Extension

COMMENT = re.compile(r"\S  # (?!noqa|type:|fmt:|mypy:)(.+?)(?:  # .*)?$", re.MULTILINE)


class FieldNotes(Extension):
    """Take such a comment for the docstring of a field that has none."""

    def on_attribute_instance(self, *, attr: Any, agent: Any, **kwargs: Any) -> None:
        """Add the docstring."""
        lines = agent.code.splitlines()[(attr.lineno or 0) - 1 : attr.endlineno] if attr.lineno else []
        found = COMMENT.findall("\n".join(lines))
        if attr.docstring is None and found:
            attr.docstring = Docstring(". ".join(found), lineno=attr.lineno, parent=attr)
