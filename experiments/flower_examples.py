"""All examples of a fetched checkout of Flower, audited as they are: not a line of them is edited.

    python experiments/flower_examples.py --flower CHECKOUT --data DATA [--only NAME ...] [--out FOLDER]

Data come through ``--mirror``: small parts of the sets in DATA (parquet, as on the hub), and stand-ins of the right
columns where a set is missing, which the row says. Each example is one process of ``fl-privacy audit`` and ends in a
page or in the reason why there is none. Rows are kept in ``experiments/rows/flower_examples``; ``--table`` writes
docs/flower_examples.md.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from row_file import RowFile

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows" / "flower_examples"
PAGE = HERE.parent / "docs" / "flower_examples.md"

NO_APP = {
    "android": "an app for phones with a server of the legacy API; no ClientApp in Python",
    "android-kotlin": "an app for phones with a server of the legacy API; no ClientApp in Python",
    "ios": "an app for phones with a server of the legacy API; no ClientApp in Python",
    "quickstart-cpp": "clients are written in C++",
    "docs": "no example, the documentation of them",
}
"""Folders without a ClientApp that Python runs -> why."""

NOT_TRIED: Mapping[str, str] = {
    "quickstart-tensorflow": "TensorFlow is not installed where this was measured",
    "quickstart-mlx": "MLX runs on Apple's machines",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an example is started.

    Attributes:
        folder: of the app, within that of the example.
        nodes, rounds: of its clients.
        config: for ``--run-config``.
        note: what of the data, or the weights, stands in for something else.
    """

    folder: str = "."
    nodes: int = 4
    rounds: int = 1
    config: str = ""
    note: str = ""


CIFAR = "600 lossless CIFAR-10 images"
MNIST = "1,000 MNIST images"
FASHION = "1,000 Fashion-MNIST images"
ADULT = "2,000 rows of UCI Adult under the hub's column names"
BERT = "bert-tiny without trained weights, vocabulary of the data; sentences of movie reviews stand in for IMDB"

SETTINGS: Mapping[str, Setting] = {
    "quickstart-pytorch": Setting(note=CIFAR),
    "federated-vae": Setting(note=CIFAR),
    "fl-tabular": Setting(note=ADULT),
    "quickstart-pytorch-lightning": Setting(note=MNIST, config="max-epochs=1"),
    "opacus": Setting(note=CIFAR),
    "quickstart-huggingface": Setting(note=BERT, config='model-name="{mirror}/bert-tiny" fraction-train=1.0'),
    "custom-mods": Setting(note=CIFAR),
    "advanced-pytorch": Setting(note=FASHION, rounds=2),
    "quickstart-sklearn": Setting(note="Iris, from scikit-learn"),
    "quickstart-xgboost": Setting(note="600 drawn rows stand in for HIGGS"),
    "federated-kaplan-meier-fitter": Setting(nodes=2, note="the example's own"),
    "vertical-fl": Setting(nodes=3, rounds=20, note="600 drawn rows stand in for the Titanic's passengers"),
    "quickstart-pandas": Setting(note="Iris, from scikit-learn"),
    "quickstart-numpy": Setting(note="none is used"),
    "flower-secure-aggregation": Setting(nodes=5, note=CIFAR, config="is-demo=false"),
    "fl-dp-sa": Setting(nodes=20, note=MNIST),
    "flower-simulation-step-by-step-pytorch": Setting(folder="my-awesome-app", note=FASHION),
    "quickstart-catboost": Setting(note=ADULT),
    "xgboost-comprehensive": Setting(note="600 drawn rows stand in for HIGGS"),
    "quickstart-pennylane": Setting(note=CIFAR),
    "quickstart-fastai": Setting(note=MNIST),
    "quickstart-jax": Setting(note=MNIST),
    "flowertune-vit": Setting(nodes=2, note="drawn weights of ViT-B/16; Tiny ImageNet stands in for flowers"),
}

RUNGS = ("gradient", "one", "batch", "all", "later")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, help="a checkout of Flower's repository")
    parser.add_argument("--data", type=Path, help="folder of data sets, NAME/SPLIT.parquet")
    parser.add_argument("--only", nargs="*", help="examples by name")
    parser.add_argument(
        "--out", type=Path, default=Path("flower_examples"), help="folder of pages, logs and the mirror"
    )
    parser.add_argument("--victims", type=int, default=6)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for an example")
    parser.add_argument("--table", action="store_true", help="write the table of the rows alone")
    asked = parser.parse_args()
    if not asked.table:
        if asked.flower is None or asked.data is None:
            parser.error("--flower and --data are expected, or --table alone")
        kept = RowFile(ROWS)
        out = asked.out.absolute()
        mirror = make_mirror(asked.data.absolute(), out / "mirror")
        for example in examples_of(asked.flower, asked.only):
            row = audited(example, mirror, out, asked.victims, asked.limit)
            kept.add({"example": example.name}, row)
            print(f"{example.name}: {row.get('headline') or row.get('reason')} ({row['seconds']:.0f} s)", flush=True)
    PAGE.write_text(table(), encoding="utf-8")


def examples_of(checkout: Path, only: list[str] | None) -> list[Path]:
    """Folders of examples: those with a setting first."""
    place = checkout / "examples" if (checkout / "examples").is_dir() else checkout
    found = sorted(each for each in place.iterdir() if each.is_dir())
    order = only or list(SETTINGS)
    found.sort(key=lambda each: order.index(each.name) if each.name in order else len(order))
    return [each for each in found if not only or each.name in only]


def audited(example: Path, mirror: Path, out: Path, victims: int, limit: float) -> dict[str, Any]:
    """The row of an example."""
    name, started, started_at = example.name, time.perf_counter(), time.time()
    if reason := NO_APP.get(name) or NOT_TRIED.get(name):
        return {"example": name, "reason": reason, "seconds": 0.0, "edited": 0}
    setting = SETTINGS.get(name, Setting())
    command = [sys.executable, "-m", "fl_privacy", "audit", str(example / setting.folder)]
    command += ["--mirror", str(mirror), "--nodes", str(setting.nodes), "--rounds", str(setting.rounds)]
    command += ["--victims", str(victims), "--out", str(out), "--seconds", str(limit / 6)]
    command += ["--run-config", setting.config.format(mirror=mirror)] if setting.config else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TORCH_HOME": str(mirror / "torch")}
    log = out / f"{name}.log"
    try:
        with log.open("w") as file:
            status = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
    except subprocess.TimeoutExpired:
        status = 124
    text = log.read_text(encoding="utf-8", errors="replace")
    row: dict[str, Any] = {"example": name, "edited": 0, "data": setting.note, "seconds": time.perf_counter() - started}
    row["command"] = shlex.join(["fl-privacy", "audit", name, *command[5:]])
    for place, called in ((str(mirror), "MIRROR"), (str(out), "OUT")):
        row["command"] = row["command"].replace(place, called)
    kept = [path for path in out.glob("audit-*/audit.json") if path.stat().st_mtime >= started_at]
    if kept and status in (0, 124):
        record = json.loads(kept[0].read_text(encoding="utf-8"))
        row["cut"] = status == 124
        return (
            row
            | {key: record[key] for key in ("headline", "tone", "models", "findings", "rungs", "problems")}
            | {"uploaded": uploaded(record)}
        )
    lines = [line for line in text.splitlines() if line.startswith("error:")] or text.splitlines()[-1:]
    reason = "took too long where this was measured" if status == 124 else " ".join(lines)[:300]
    return row | {"reason": reason, "traceback": "Traceback" in text}


def uploaded(record: Mapping[str, Any]) -> str:
    """What clients upload, in a phrase."""
    up = [line for line in record["inventory"] if line["direction"] == "client to server"]
    arrays = [line for line in up if line["what"].startswith("array") and not line["kind"].startswith("evaluate")]
    size = sum(line["size"] for line in arrays)
    told = dict(record["facts"]).get("What is uploaded", "")
    others = sorted({line["key"] for line in up if not line["what"].startswith("array")})
    said = told or (f"{len(arrays)} arrays" if arrays else "no arrays")
    said += f" ({size / 1000:.0f} kB)" if arrays else ""
    return said + (f"; {', '.join(others[:4])}{' …' if len(others) > 4 else ''}" if others else "")


def make_mirror(data: Path, mirror: Path) -> Path:
    """Small parts of data sets under their hub names, and stand-ins."""
    mirror.mkdir(parents=True, exist_ok=True)
    makers: Mapping[str, Callable[[Path, Path], None]] = {
        "cifar10": lambda d, m: part(d / "cifar10_exact", m, {"train": 600, "test": 100}),
        "mnist": lambda d, m: part(d / "mnist", m, {"train": 1000, "test": 200}),
        "fashion_mnist": lambda d, m: part(d / "fashion_mnist", m, {"train": 1000, "test": 200}),
        "imdb": lambda d, m: part(d / "rotten_tomatoes", m, {"train": 600, "test": 100}),
        "oxford_flowers": lambda d, m: part(d / "tiny_imagenet", m, {"train": 120, "test": 60}, {"valid": "test"}),
        "adult-census-income": adult,
        "scikit-learn__iris": lambda d, m: iris(m, "Id SepalLengthCm SepalWidthCm PetalLengthCm PetalWidthCm Species"),
        "hitorilabs__iris": lambda d, m: iris(
            m, "Id sepal_length sepal_width petal_length petal_width species", words=False
        ),
        "higgs": higgs,
        "titanic-survival": titanic,
        "bert-tiny": bert,
    }
    for name, make in makers.items():
        if not (mirror / name).is_dir():
            (mirror / f".{name}").mkdir(exist_ok=True)
            make(data, mirror / f".{name}")
            (mirror / f".{name}").rename(mirror / name)
    return mirror


def part(source: Path, into: Path, numbers: Mapping[str, int], renamed: Mapping[str, str] | None = None) -> None:
    """The first rows of the splits of a data set."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    for file in sorted(source.glob("*.parquet")):
        split = (renamed or {}).get(file.stem, file.stem)
        if split in numbers:
            pq.write_table(pq.read_table(file).slice(0, numbers[split]), into / f"{split}.parquet")


def adult(data: Path, into: Path) -> None:
    """UCI Adult under the names that the hub's copy has."""
    import pandas as pd  # noqa: PLC0415

    frame = pd.read_parquet(data / "adult" / "train.parquet").head(2000)
    names = {column: column.replace("_", ".") for column in frame.columns}
    frame = frame.rename(columns={**names, "label": "income"}).fillna("?")
    frame["income"] = frame["income"].map({0: "<=50K", 1: ">50K"})
    for column in frame.columns:
        if frame[column].dtype.kind in "iuf":
            frame[column] = frame[column].astype("int64")
    frame.to_parquet(into / "train.parquet", index=False)


def iris(into: Path, names: str, *, words: bool = True) -> None:
    """Iris of scikit-learn under other names."""
    import pandas as pd  # noqa: PLC0415
    from sklearn.datasets import load_iris  # noqa: PLC0415

    found = load_iris()
    frame = pd.DataFrame(found.data, columns=names.split()[1:5])
    frame.insert(0, names.split(maxsplit=1)[0], range(1, len(frame) + 1))
    frame[names.rsplit(maxsplit=1)[-1]] = [f"Iris-{found.target_names[k]}" if words else int(k) for k in found.target]
    frame.to_parquet(into / "train.parquet", index=False)


def higgs(data: Path, into: Path) -> None:
    """Drawn rows of 28 numbers."""
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    rng = np.random.default_rng(0)
    for split, number in (("train", 600), ("test", 100)):
        inputs = rng.normal(size=(number, 28)).astype("float32")
        odds = 1.5 * inputs[:, 0] - inputs[:, 1] + inputs[:, 2] * inputs[:, 3]
        labels = (rng.random(number) < 1 / (1 + np.exp(-odds))).astype("float32")
        pd.DataFrame({"label": labels, "inputs": list(inputs)}).to_parquet(into / f"{split}.parquet", index=False)


def titanic(data: Path, into: Path) -> None:
    """Drawn passengers."""
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    rng, number = np.random.default_rng(0), 600
    titles = rng.choice(["Mr", "Mrs", "Miss", "Master"], number)
    frame = {
        "Survived": rng.integers(0, 2, number),
        "Pclass": rng.integers(1, 4, number),
        "Name": [f"{title}. Passenger {k}" for k, title in enumerate(titles)],
        "Sex": rng.choice(["male", "female"], number),
        "Age": rng.integers(1, 80, number).astype(float),
        "Siblings/Spouses Aboard": rng.integers(0, 4, number),
        "Parents/Children Aboard": rng.integers(0, 3, number),
        "Fare": rng.gamma(2.0, 16.0, number).round(2),
    }
    pd.DataFrame(frame).to_parquet(into / "train.parquet", index=False)


def bert(data: Path, into: Path) -> None:
    """A BERT of two layers of 128, as drawn, with the words of the data as its vocabulary."""
    import pandas as pd  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast  # noqa: PLC0415

    texts = pd.read_parquet(data / "rotten_tomatoes" / "train.parquet")["text"].head(600)
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    (into / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8")
    BertTokenizerFast(str(into / "vocab.txt"), model_max_length=512).save_pretrained(into)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words) + 5,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
    )
    BertForSequenceClassification(config).save_pretrained(into)


def table() -> str:
    """The page in docs."""
    rows = sorted(RowFile(ROWS).rows, key=lambda row: str(row["example"]))
    measured = [row for row in rows if any(rung["counts"] for rung in row.get("rungs", ()))]
    pages = [row for row in rows if "headline" in row]
    lines = [
        "# Flower's examples, audited as they are",
        "",
        "<!-- Written by experiments/flower_examples.py --table; do not edit. -->",
        "",
        f"`fl-privacy audit` was run on {len(rows)} of the folders in Flower's `examples`, the others not yet:"
        f" {len(pages)} ended in a page,"
        f" {len(measured)} of them with a measured attack; of the others the reason is named. Nothing was edited."
        " *Read* is how many single examples, or examples of a batch, the quick attack read of those attacked,"
        " beside how many guesses at other examples' uploads would have read. A hyphen: not"
        " attacked, which is no protection.",
        "",
        "| Example | Lines edited | Uploaded | In clear | Gradient of one | One, uploaded | Batch, uploaded"
        " | Last round | Seconds | Data |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in pages]
    lines += ["", "| Example | Why there is no page |", "|---|---|"]
    lines += [f"| {row['example']} | {_cell(row['reason'])} |" for row in rows if "headline" not in row]
    lines += ["", "Seconds are of one core of two that others used as well: a ceiling, no benchmark.", ""]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    rungs = {rung["rung"]: rung for rung in row["rungs"]}
    clear = sorted({finding["what"] for finding in row["findings"] if finding["severity"] != "look"})
    cells = [row["example"], str(row["edited"]), row["uploaded"], "; ".join(clear) or "-"]
    cells += [_read(rungs.get(name)) for name in ("gradient", "one", "batch", "later")]
    cells += [f"{row['seconds']:.0f}" + " (cut off)" * row.get("cut", False), row["data"] or "its own"]
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _read(rung: Mapping[str, Any] | None) -> str:
    if rung is None or not rung["counts"]:
        return "-"
    counts, control = rung["counts"], rung["control"]
    said = f"{counts['read']} of {counts['judged'] + counts['failures']}"
    return said + (f" (control {control['read']})" if control else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
