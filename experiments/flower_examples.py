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
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_data import make_mirror
from row_file import RowFile

from fl_privacy.report.audit_file import folder_name

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
    "quickstart-lerobot": "needs lerobot at a commit of its repository, which no package index has",
    "fedrag": "needs corpora and indices of several GB that its own scripts download",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an example is started.

    Attributes:
        folder: of the app, within that of the example.
        nodes, rounds: of its clients.
        config: for ``--run-config``.
        node_config: for ``--node-config``.
        files: folder of the mirror that the app finds where it works.
        path: folder within the app's from which its code imports, as its README has it, for ``PYTHONPATH``.
        older: it needs versions of packages that the others don't take: ``--older-python`` runs it.
        note: what of the data, or the weights, stands in for something else.
    """

    folder: str = "."
    nodes: int = 4
    rounds: int = 1
    config: str = ""
    node_config: str = ""
    files: str = ""
    path: str = ""
    older: bool = False
    note: str = ""


CIFAR = "600 lossless CIFAR-10 images"
MNIST = "1,000 MNIST images"
FASHION = "1,000 Fashion-MNIST images"
ADULT = "2,000 rows of UCI Adult under the hub's column names"
BERT = "bert-tiny without trained weights, vocabulary of the data; sentences of movie reviews stand in for IMDB"
LLAMA = (
    "a Llama of 231,000 parameters, LoRA of rank 4 and batches of 2 stand in for the model; 200 short instructions for"
    " the data; older transformers, trl and peft, as the example pins them"
)
SMALL = (
    "model.lora.peft-lora-r=4 train.seq-length=128 train.training-arguments.per-device-train-batch-size=2"
    " train.training-arguments.max-steps=8 strategy.fraction-train=1.0"
)
OWN_LLAMA = (
    "a Llama of 231,000 parameters stands in for the model, under its name, 200 short instructions for the data; all"
    " other settings are the example's (rank 32, batches of 16); older transformers, trl and peft, as it pins them"
)
TUNED = Setting(nodes=3, config=SMALL, older=True, note=LLAMA)

SETTINGS: Mapping[str, Setting] = {
    "quickstart-pytorch": Setting(note=CIFAR),
    "federated-vae": Setting(note=CIFAR),
    "fl-tabular": Setting(note=ADULT),
    "quickstart-pytorch-lightning": Setting(nodes=8, note=MNIST, config="max-epochs=1"),
    "opacus": Setting(note=CIFAR),
    "quickstart-huggingface": Setting(note=BERT, config='model-name="{mirror}/bert-tiny" fraction-train=1.0'),
    "custom-mods": Setting(note=CIFAR),
    "advanced-pytorch": Setting(note=FASHION, rounds=2, config="fraction-train=1.0"),
    "supernode-authentication": Setting(
        note="800 lossless CIFAR-10 images", node_config='dataset-path="{mirror}/cifar10_parts/part_{partition}"'
    ),
    "embedded-devices": Setting(
        note="800 Fashion-MNIST images", node_config='dataset-path="{mirror}/fashion_mnist_parts/part_{partition}"'
    ),
    "flower-simulation-step-by-step-pytorch": Setting(folder="my-awesome-app", note=FASHION),
    "flower-secure-aggregation": Setting(nodes=5, note=CIFAR, config="is-demo=false"),
    "fl-dp-sa": Setting(nodes=20, note=MNIST),
    "quickstart-sklearn": Setting(note="Iris, from scikit-learn, classes as numbers"),
    "quickstart-xgboost": Setting(note="600 drawn rows stand in for HIGGS"),
    "federated-kaplan-meier-fitter": Setting(nodes=2, note="the example's own"),
    "vertical-fl": Setting(nodes=3, rounds=20, note="600 drawn rows stand in for the Titanic's passengers"),
    "quickstart-pandas": Setting(note="Iris, from scikit-learn"),
    "quickstart-numpy": Setting(note="none is used"),
    "quickstart-catboost": Setting(note=ADULT),
    "xgboost-comprehensive": Setting(note="600 drawn rows stand in for HIGGS"),
    "federated-analytics": Setting(
        note="60 drawn people a node, in SQLite", node_config='db-url="sqlite:///{mirror}/measurements/{partition}.db"'
    ),
    "quickstart-jax": Setting(nodes=30, note=MNIST, config="batch-size=4"),
    "quickstart-tensorflow": Setting(nodes=8, note=CIFAR, config="fraction-train=1.0"),
    "quickstart-mlx": Setting(note=MNIST),
    "quickstart-pennylane": Setting(note=CIFAR, config="local-epochs=1"),
    "quickstart-fastai": Setting(nodes=3, note=MNIST, config="fraction-train=1.0"),
    "quickstart-monai": Setting(
        nodes=3, note="320 faces stand in for scans", files="mednist", config="batch-size=32 fraction-train=1.0"
    ),
    "whisper-federated-finetuning": Setting(
        note="Whisper-tiny of one layer as drawn; 105 drawn tones stand in for speech", config="fraction-train=1.0"
    ),
    "flowertune-vit": Setting(nodes=6, note="drawn weights of ViT-B/16; Tiny ImageNet stands in for flowers"),
    "flowertune-llm": Setting(nodes=3, config="strategy.fraction-train=1.0", older=True, note=OWN_LLAMA),
    "flowertune-llm-code": TUNED,
    "flowertune-llm-finance": TUNED,
    "flowertune-llm-general-nlp": TUNED,
    "flowertune-llm-medical": TUNED,
}

RUNGS = ("gradient", "one", "site", "batch", "all", "later")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, help="a checkout of Flower's repository")
    parser.add_argument("--data", type=Path, help="folder of data sets, NAME/SPLIT.parquet")
    parser.add_argument("--only", nargs="*", help="examples by name")
    parser.add_argument(
        "--out", type=Path, default=Path("flower_examples"), help="folder of pages, logs and the mirror"
    )
    parser.add_argument("--older-python", type=Path, help="a Python with packages as flowertune-llm pins them")
    parser.add_argument("--again", action="store_true", help="examples that have a row, too")
    parser.add_argument("--victims", type=int, default=6)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for an example")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder in which rows.jsonl is kept")
    parser.add_argument("--table", action="store_true", help="write the table of the rows alone")
    asked = parser.parse_args()
    if not asked.table:
        if asked.flower is None or asked.data is None:
            parser.error("--flower and --data are expected, or --table alone")
        kept = RowFile(asked.rows)
        out = asked.out.absolute()
        mirror = make_mirror(asked.data.absolute(), out / "mirror")
        for example in examples_of(asked.flower, asked.only):
            if not asked.again and not asked.only and kept.find({"example": example.name}):
                continue
            python = asked.older_python if SETTINGS.get(example.name, Setting()).older else Path(sys.executable)
            row = audited(example, mirror, python, asked)
            kept.add({"example": example.name}, row)
            print(f"{example.name}: {row.get('headline') or row.get('reason')} ({row['seconds']:.0f} s)", flush=True)
    if asked.rows == ROWS:
        PAGE.write_text(table(), encoding="utf-8")


def examples_of(checkout: Path, only: list[str] | None) -> list[Path]:
    """List the folders of examples, those with a setting first."""
    place = checkout / "examples" if (checkout / "examples").is_dir() else checkout
    found = sorted(each for each in place.iterdir() if each.is_dir())
    order = only or list(SETTINGS)
    found.sort(key=lambda each: order.index(each.name) if each.name in order else len(order))
    return [each for each in found if not only or each.name in only]


def audited(example: Path, mirror: Path, python: Path | None, asked: argparse.Namespace) -> dict[str, Any]:
    """Audit an example and return its row, or the reason why it can't be audited."""
    name = example.name
    if reason := NO_APP.get(name) or NOT_TRIED.get(name):
        return {"example": name, "reason": reason, "seconds": 0.0, "edited": 0}
    if python is None:
        return {"example": name, "reason": "needs older packages, which were not there", "seconds": 0.0, "edited": 0}
    setting = SETTINGS.get(name, Setting())
    return audit_of(name, example / setting.folder, setting, mirror, asked, python=python)


def audit_of(
    name: str,
    app: Path,
    setting: Setting,
    mirror: Path,
    asked: argparse.Namespace,
    *,
    python: Path = Path(sys.executable),
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Audit the app in a folder, in a sandbox of its own, and return its row; ``more`` are further options."""
    started, started_at, limit, out = time.perf_counter(), time.time(), float(asked.limit), asked.out.absolute()
    if setting.files:
        app = with_files(app, mirror / setting.files, out / "apps" / app.name)
    command = [str(python), "-m", "fl_privacy", "audit", str(app)]
    command += ["--mirror", str(mirror), "--nodes", str(setting.nodes), "--rounds", str(setting.rounds)]
    command += ["--victims", str(asked.victims), "--out", str(out), "--seconds", str(limit / 6), "--sandbox"]
    command += ["--environment", "WANDB_MODE", *more]
    command += ["--run-config", setting.config.format(mirror=mirror)] if setting.config else []
    command += ["--node-config", setting.node_config.replace("{mirror}", str(mirror))] if setting.node_config else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TORCH_HOME": str(mirror / "torch")}
    environment["HF_HOME"] = str(mirror / "hf")
    if setting.path:
        own = (str(app / setting.path), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, own))
    log = out / f"{name}.log"
    status = ended(command, environment, log, limit)
    text = log.read_text(encoding="utf-8", errors="replace")
    row: dict[str, Any] = {"example": name, "edited": 0, "data": setting.note, "seconds": time.perf_counter() - started}
    row["command"] = shlex.join(["fl-privacy", "audit", name, *command[5:]])
    places = {str(mirror): "MIRROR", str(out): "OUT", f"{app}/": "", str(app): name}
    kept = out / folder_name(project_of(app)) / "audit.json"
    if kept.is_file() and kept.stat().st_mtime >= started_at and status in (0, 124):
        record = json.loads(kept.read_text(encoding="utf-8"))
        row["cut"] = status == 124
        row |= {k: record[k] for k in ("headline", "tone", "models", "findings", "rungs", "survivors", "problems")}
        return without_places(row | {"uploaded": uploaded(record)}, places)
    lines = [line for line in text.splitlines() if line.startswith("error:")] or text.splitlines()[-1:]
    reason = "took too long where this was measured" if status == 124 else " ".join(lines)[:300]
    return without_places(row | {"reason": reason, "traceback": "Traceback" in text}, places)


def without_places(row: dict[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """Return ``row`` with the folders of this machine by the names in ``places``, and no name of a user."""
    text = json.dumps(row)
    for place, called in places.items():
        text = text.replace(json.dumps(place)[1:-1], called)
    return dict(json.loads(re.sub(r"/(?:home|root|Users)/(?:[\w.+-]+/)?(?=[\w.+-]+/)", "~/", text)))


def with_files(app: Path, source: Path, copy: Path) -> Path:
    """Copy the app with files, which it finds where it works."""
    for each in (app, source):
        shutil.copytree(each, copy, dirs_exist_ok=True)
    return copy


def project_of(app: Path) -> str:
    """Return the name in an app's ``pyproject.toml``."""
    return str(tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])


def ended(command: list[str], environment: Mapping[str, str], log: Path, limit: float) -> int:
    """Exit status of a command with all that it started; 124 where it took longer."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124


def uploaded(record: Mapping[str, Any]) -> str:
    """Say in a phrase what clients upload."""
    up = [line for line in record["inventory"] if line["direction"] == "client to server"]
    arrays = [line for line in up if line["what"].startswith("array") and not line["kind"].startswith("evaluate")]
    size = sum(line["size"] for line in arrays)
    told = dict(record["facts"]).get("What is uploaded", "")
    others = sorted({line["key"] for line in up if not line["what"].startswith("array")})
    said = told or (f"{len(arrays)} arrays" if arrays else "no arrays")
    said += f" ({size / 1000:.0f} kB)" if arrays else ""
    return said + (f"; {', '.join(others[:4])}{' …' if len(others) > 4 else ''}" if others else "")


def table() -> str:
    """Render the page for the docs."""
    rows = sorted(RowFile(ROWS).rows, key=lambda row: str(row["example"]))
    measured = [row for row in rows if is_measured(row)]
    pages = [row for row in rows if not why_none(row)]
    lines = [
        "# Flower's examples, audited as they are",
        "",
        "<!-- Written by experiments/flower_examples.py --table; do not edit. -->",
        "",
        "For each of Flower's examples this page says what its clients upload,"
        " and how much of their data the server can reconstruct from it.",
        "",
        f"Of {len(rows)} folders in Flower's `examples`, `fl-privacy audit` made a page on what clients of {len(pages)}"
        " upload,"
        f" {len(measured)} of them with a measured attack; of the others the reason is named. Nothing was edited."
        " *Read* is how many of the attacked single examples, or examples of a batch, the quick attack reconstructed,"
        " next to how many guesses at other examples' uploads match; *Fitted*: rows behind a model that is not"
        " trained by steps. The three columns on whole trainings are"
        " asked of what clients really uploaded: how the shares of classes in which clients differ correlate with what"
        " the last bias says (0 is guessing), how well losses tell a client's examples from another's (0.5 is"
        " guessing), and the F1 of a client's own words; each with its 95 % interval. The two columns after"
        " them ask the mean of the last models: who trained, and which texts it ends word for word. *Labels,"
        " vertical* is the share of labels that a client infers from what the server sends. A hyphen: not"
        " attacked, which is no protection. *Withdrawn*: rows and words of batches, which an earlier version counted"
        " though guesses that know nothing come to as many.",
        "",
        *lines_of(rows),
    ]
    return "\n".join(lines)


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Render two tables: the audited apps, and the reasons why others have no page."""
    pages = [row for row in rows if not why_none(row)]
    lines = [
        "| Example | Lines edited | Uploaded | In clear | Gradient of one | One, uploaded | Batch, uploaded"
        " | Last round | Fitted | Classes, whole training | Members | Words | Members, final model | Texts continued"
        " | Labels, vertical | Seconds | Data |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in pages]
    lines += ["", "| Example | Why there is no page on what clients upload |", "|---|---|"]
    lines += [f"| {row['example']} | {_cell(why)} |" for row in rows if (why := why_none(row))]
    lines += ["", "Seconds are of one core of two that others used as well: a ceiling, no benchmark.", ""]
    return lines


def why_none(row: Mapping[str, Any]) -> str:
    """Say why there is no page, or none on anything that clients sent; empty where there is one."""
    if "headline" not in row:
        return str(row["reason"]).removeprefix("error: ").removesuffix("; --debug shows the traceback.").rstrip(".")
    if row.get("network_alone"):
        own = [] if "was not audited:" in row["headline"] else row["problems"][:1]  # where later pages say why
        return f"network alone: {'. '.join([row['headline'], *own])}"
    nothing = row["uploaded"] == "no arrays"
    if row["findings"] or not (nothing or (row["uploaded"].startswith("no arrays") and row["problems"])):
        return ""
    what = "sent anything" if nothing else "trained"
    why = "; ".join(row["problems"][:2]) or row["headline"].removeprefix("Nothing to audit: ")
    return f"its page says that no client {what} ({why})"


def is_measured(row: Mapping[str, Any]) -> bool:
    """Say whether anything was attacked with a figure beside its control."""
    return any(rung["counts"] for rung in row.get("rungs", ())) or any(one["found"] for one in row.get("survivors", ()))


def _line(row: Mapping[str, Any]) -> str:
    rungs = {rung["rung"]: rung for rung in row["rungs"]}
    clear = sorted({finding["what"] for finding in row["findings"] if finding["severity"] != "look"})
    cells = [row["example"], str(row["edited"]), row["uploaded"], "; ".join(clear) or "-"]
    cells += [_read(rungs.get(name)) for name in ("gradient", "one", "batch", "later")]
    cells.append(_read(next((rung for name, rung in rungs.items() if name not in (*RUNGS, "evaluation")), None)))
    told = {one["name"]: one for one in row.get("survivors", ())}
    cells += [_told(told.get(name)) for name in ("classes", "members", "words", "participants", "continued", "labels")]
    cells += [f"{row['seconds']:.0f}" + " (cut off)" * row.get("cut", False), row["data"] or "its own"]
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _read(rung: Mapping[str, Any] | None) -> str:
    if rung is None or not rung["counts"]:
        return "-"
    counts, control = rung["counts"], rung["control"]
    if counts["read"] and control is None and rung["kind"] in ("row", "text") and "chance" not in counts:
        return "withdrawn"  # counted before chance was taken from the same assignment
    said = f"{counts['read']} of {counts['judged'] + counts['failures']}"
    return said + (f" (control {control['read']})" if control else "")


def _told(one: Mapping[str, Any] | None) -> str:
    if one is None or not one["found"]:
        return "-"
    found, control = one["found"], one["control"]
    said = f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
    return said + (f" (control {control['value']:.2f})" if control else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
