"""Tokens as a person reads them."""

BEGINNINGS = ("\u0120", "\u2581")
"""How byte-level and SentencePiece tokenizers write the space before a word."""

_SPACES = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n"})


def as_shown(piece: str) -> tuple[str, bool]:
    """Return a token for display, and whether it continues the word before it, where it says so itself."""
    if piece.startswith("##"):
        return piece[2:], True
    readable = piece.translate(_SPACES)
    return readable.strip(" ") or readable, False
