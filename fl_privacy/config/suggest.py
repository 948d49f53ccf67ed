"""The tail of an error about a name: what was probably meant, and what is allowed."""

import difflib
from collections.abc import Iterable


def suggest(word: str, allowed: Iterable[str]) -> str:
    """`` (did you mean X?); allowed: X, Y.``"""
    names = sorted(name for name in allowed if not name.startswith("_") and name != "defaults")
    close = difflib.get_close_matches(word, names, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"{meant}; allowed: {', '.join(names) or 'nothing'}."
