"""Examples that are drawn where an app's data are missing: pictures, rows and texts whose classes can be learned."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import zoom

TRAIN, TEST = 600, 200
"""Numbers of drawn examples."""

LABEL = re.compile(
    r"^(label|target|class|outcome|diagnosis|y|species|category|attack|fraud|churn|income|survived|default|result"
    r"|sentiment|output|character)s?$|[-_ ](label|target|class|y|type|flag)$|^(fine|coarse|is)[-_]|^y_|label",
    re.IGNORECASE,
)
IMAGE = re.compile(r"^(x|img|image|pixel|picture|photo|scan|slide)s?$|image|pixel|img|^x_", re.IGNORECASE)
TEXT = re.compile(r"text|sentence|content|review|comment|prompt|message|tweet|email|document|question", re.IGNORECASE)
TIME = re.compile(r"date|time", re.IGNORECASE)

_TEXT = """
the patient was seen on monday with pain in left knee after a fall at home and no fever since two days doctor
found swelling gave ice rest asked for x ray which showed broken bone then plan to come back next week if it
gets worse people like this film because story is good actors play well but end too long music makes you feel
sad happy price of stock rose market closed team won game last night police said fire near river new study
shows coffee may help sleep school opens again children learn to read number of new cases fell
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What examples look like.

    Attributes:
        side, channels: pixels of a picture's side, and its colors.
        classes: number of classes.
        features: number of columns of rows, without the label.
    """

    side: int = 32
    channels: int = 3
    classes: int = 10
    features: int = 10


def labels(number: int, classes: int) -> np.ndarray:
    """Return ``number`` labels (N,), each class in turn."""
    return np.arange(number) % max(classes, 1)


def pictures(number: int, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Draw smooth pictures (N, H, W, C) of bytes: of each class its own coarse pattern, with another one on top."""

    def smooth(many: int) -> np.ndarray:
        coarse = rng.normal(size=(many, 6, 6, shape.channels))
        factor = shape.side / 6
        return zoom(coarse, (1, factor, factor, 1), order=1)[:, : shape.side, : shape.side]

    patterns, own = smooth(max(shape.classes, 1)), smooth(number)
    values = 0.5 + 0.15 * (patterns[labels(number, shape.classes)] + own) + 0.02 * rng.normal(size=own.shape)
    return (values.clip(0, 1) * 255).astype(np.uint8)


def numbers(number: int, columns: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Draw rows (N, columns) of numbers, whose means depend on the class."""
    means = rng.normal(size=(max(classes, 1), columns))
    return (means[labels(number, classes)] + rng.normal(size=(number, columns))).round(3)


def texts(number: int, classes: int, rng: np.random.Generator) -> list[str]:
    """Draw texts of 8 to 24 common words, with words of their own for each class."""
    weights = 1 / np.arange(1, len(_WORDS) + 1)
    found = []
    for label in labels(number, classes):
        drawn = rng.choice(len(_WORDS), size=rng.integers(8, 25), p=weights / weights.sum())
        found.append(" ".join(_WORDS[(n + 7 * int(label)) % len(_WORDS)] for n in drawn))
    return found


def column(name: str, number: int, classes: int, rng: np.random.Generator) -> Sequence[object] | np.ndarray:
    """Draw a column of a table by what its name says: a label, a text, days, or numbers."""
    if LABEL.search(name):
        return labels(number, classes)
    if TEXT.search(name):
        return texts(number, classes, rng)
    if TIME.search(name):
        return np.datetime_as_string(np.datetime64("2024-01-01") + np.arange(number)).tolist()
    return numbers(number, 1, classes, rng)[:, 0]
