"""Which kinds of Flower apps were audited, and what of each was attacked: a table in the README, from kept rows.

python docs/app_kinds.py          # writes it
python docs/app_kinds.py --check  # status 1 where it is not what the rows say
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kept_rows import Row, markdown, read_rows

from fl_privacy.measure.answer import Answer
from fl_privacy.measure.roc import Estimate

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- apps: made by docs/app_kinds.py -->\n", "<!-- /apps -->\n"

RECONSTRUCTED = ("The server reconstructed", "The server read")
"""First words of a headline on reconstructed examples, of this version and of older ones."""

CHANCE = {"labels": 0.5, "classes": 0.0, "words": 0.0, "members": 0.5, "participants": 0.5, "continued": 0.0}
"""What is asked of whole trainings -> what guessing gives."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "PyTorch, images": (
        "quickstart-pytorch", "advanced-pytorch", "custom-mods", "embedded-devices", "supernode-authentication",
        "flower-simulation-step-by-step-pytorch", "federated-vae", "quickstart-monai", "quickstart-fastai",
        "quickstart-pennylane", "flowertune-vit",
    ),
    "PyTorch, rows of numbers": ("quickstart-pytorch-lightning", "fl-tabular"),
    "Noise, secure aggregation": ("opacus", "fl-dp-sa", "flower-secure-aggregation"),
    "Hugging Face, texts": ("quickstart-huggingface",),
    "Language models with adapters": (
        "flowertune-llm", "flowertune-llm-code", "flowertune-llm-finance", "flowertune-llm-general-nlp",
        "flowertune-llm-medical",
    ),
    "Keras, JAX, MLX": ("quickstart-tensorflow", "quickstart-jax", "quickstart-mlx"),
    "Trees, scikit-learn": (
        "quickstart-sklearn", "quickstart-xgboost", "xgboost-comprehensive", "quickstart-catboost",
    ),
    "Analytics, vertical learning": (
        "federated-analytics", "quickstart-pandas", "federated-kaplan-meier-fitter", "vertical-fl", "quickstart-numpy",
    ),
    "Speech (Whisper)": ("whisper-federated-finetuning",),
}  # fmt: skip
"""Kind of app -> folders in Flower's ``examples``."""


def kinds_table(rows: Sequence[Row]) -> str:
    """Render a line for each kind, from the ``rows`` with a page."""
    pages = {str(row["example"]): row for row in rows if "headline" in row}
    lines = [_line(kind, [pages.pop(name) for name in names if name in pages]) for kind, names in KINDS.items()]
    assert not pages, f"these examples have no kind in KINDS: {sorted(pages)}"
    heads = ["kind of app", "image, row or text reconstructed", "facts inferred", "data in the clear"]
    return markdown(heads, [line for line in lines if line])


def _line(kind: str, own: Sequence[Row]) -> list[str]:
    if not own:
        return []
    single = [row for row in own if any(rung["uploaded"] and rung["counts"] for rung in row["rungs"])]
    asked = [row for row in own if any(one["found"] for one in row.get("survivors", ()))]
    clear = [row for row in own if any(finding["severity"] != "look" for finding in row["findings"])]
    read = sum(row["tone"] == "leak" and str(row["headline"]).startswith(RECONSTRUCTED) for row in single)
    leaking = sum(any(map(_leaks, row["survivors"])) for row in asked)
    return [
        kind,
        _share(read, single),
        _share(leaking, asked),
        _share(len(clear), own),
    ]


def _share(number: int, apps: Sequence[Row]) -> str:
    return f"{number} of {len(apps)}" if apps else "not tested"


def _leaks(one: Row) -> bool:
    """Say by the present rule whether a question about a whole training was answered better than by chance."""
    found, control = (each and Estimate(**each, chance=CHANCE[one["name"]]) for each in (one["found"], one["control"]))
    return Answer(question=one["name"], estimate=found, control=control).leaks


def written(text: str) -> str:
    """Return the README's ``text`` with the table between its marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{kinds_table(read_rows('flower_examples'))}\n\n{END}{tail}"


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    after = written(before)
    if sys.argv[1:] == ["--check"]:
        sys.exit(before != after)
    README.write_text(after, encoding="utf-8")
