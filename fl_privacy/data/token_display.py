"""Tokens in readable form."""

BEGINNINGS = ("\u0120", "\u2581")
"""Marks of byte-level and SentencePiece tokenizers for the space before a word."""

_SPACES = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n"})


def as_shown(piece: str) -> tuple[str, bool]:
    """Return a token for display, and ``True`` if it is marked as continuing a word."""
    if piece.startswith("##"):
        return piece[2:], True
    readable = piece.translate(_SPACES)
    return readable.strip(" ") or readable, False
