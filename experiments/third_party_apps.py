"""Flower apps of others, found by searching public repositories, audited as they are and never outside a sandbox.

    python experiments/third_party_apps.py --apps FOLDER --data DATA [--only NAME ...] [--out FOLDER] [--stand-in]

FOLDER holds a checkout of each repository, ``OWNER+NAME``, at the commit that its row says. None of their code is kept
here. Rows are in ``experiments/rows/third_party_apps``; ``--table`` writes docs/third_party_apps.md. A row keeps the
app's first try, its try ``again`` on a later version, and the ``second`` try there, after errors of ours were mended.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import first_tries
from first_tries import how_ended
from flower_data import make_mirror
from flower_examples import ADULT, CIFAR, Setting, audit_of, is_measured, lines_of, without_places
from row_file import RowFile

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows" / "third_party_apps"
PAGE = HERE.parent / "docs" / "third_party_apps.md"
HOMES = re.compile(r"/(home|Users)/\w+")
"""Folders of the machine on which an app was written, which its code names."""

RATINGS = "36,240 drawn ratings stand in for MovieLens"


@dataclass(frozen=True, kw_only=True)
class Found:
    """An app of somebody.

    Attributes:
        repository: owner/name.
        commit: that was run.
        about: what it is for, in a phrase.
        setting: how it is started.
        placed: a set of the mirror, and the folder of the checkout where the app looks for it.
    """

    repository: str
    commit: str
    about: str
    setting: Setting
    placed: tuple[str, str] | None = None


APPS: Mapping[str, Found] = {
    "shakespeare": Found(
        repository="marcusnglee/fedprox-shakespeare",
        commit="7b71af4ede",
        about="next letters, LSTM, FedProx",
        setting=Setting(),
    ),
    "pathmnist": Found(
        repository="Joe-IA/Federated_learning_on_medical_imaging_pathMNIST",
        commit="f7e5f0486a",
        about="tissue pictures",
        setting=Setting(),
    ),
    "opacus-medmnist": Found(
        repository="mohres/federated-dp-opacus-flower",
        commit="e0fef0eb95",
        about="DP-SGD, medical pictures",
        setting=Setting(),
    ),
    "autoencoder-ids": Found(
        repository="Bastian13/FederatedLearning_Autoencoder_IDS",
        commit="9544a07152",
        about="intrusion detection, autoencoder of rows",
        setting=Setting(),
    ),
    "recommender-baseline": Found(
        repository="TranhGio/Personalized-Federated-Learning-for-Privacy-Aware-Collaborative-Filtering-in-Recommender-Systems",
        commit="44a00c1e1d",
        about="films, matrix factorization",
        setting=Setting(folder="federated-baseline-cf", note=RATINGS),
        placed=("movielens", "data/ml-1m"),
    ),
    "recommender-personalized": Found(
        repository="TranhGio/Personalized-Federated-Learning-for-Privacy-Aware-Collaborative-Filtering-in-Recommender-Systems",
        commit="44a00c1e1d",
        about="films, users' embeddings stay",
        setting=Setting(folder="federated-personalized-cf", note=RATINGS),
        placed=("movielens", "data/ml-1m"),
    ),
    "reinforcement": Found(
        repository="lonexreb/flwr-frl-kit",
        commit="1e67753827",
        about="reinforcement learning, TorchRL",
        setting=Setting(),
    ),
    "spam": Found(
        repository="LavalAlexandre/flspam",
        commit="2972da2d85",
        about="spam, language model with LoRA",
        setting=Setting(nodes=20),
    ),
    "heat-demand": Found(
        repository="VarshaBadgujar/das-flwr-heatdemand",
        commit="d62a3de4c1",
        about="time series, TensorFlow",
        setting=Setting(),
    ),
    "conditional-vae": Found(
        repository="arpit35/heterogeneous_federated_learning_with_conditional_variational_autoencoder",
        commit="1cd9264790",
        about="pictures and a conditional VAE",
        setting=Setting(nodes=7),
    ),
    "graphs-ids": Found(
        repository="danieloladele7/g-pfl-ids",
        commit="a88e033b45",
        about="intrusion detection, graph network",
        setting=Setting(nodes=10, note="drawn graphs of 60 hosts stand in for IoT-23", files="graphs", path="src"),
    ),
    "choice-of-clients": Found(
        repository="eljonathas/cifar10-pow-strategy",
        commit="696658fbf1",
        about="pictures, own strategy",
        setting=Setting(note="600 lossless CIFAR-10 images"),
    ),
    "agents-cifar100": Found(
        repository="Sergo20025/mas-flwr-cifar100",
        commit="e86cc0a5eb",
        about="pictures, agents",
        setting=Setting(
            note="CIFAR-10's images with a hundred classes stand in for CIFAR-100",
            nodes=10,
            config='partition-mode="iid" local-epochs=1',
        ),
    ),
    "heterogeneity": Found(
        repository="Intechgent/flower-fl-heterogeneity",
        commit="c1215e3389",
        about="pictures, clients unlike each other",
        setting=Setting(note=CIFAR),
    ),
    "selection": Found(
        repository="chenyixin0423-lgtm/federated-learning-client-selection",
        commit="417af667c8",
        about="pictures, selection of clients, own noise",
        setting=Setting(note=CIFAR),
    ),
    "watermarks": Found(
        repository="jlnpch/fl-watermark-poisoning-detection",
        commit="1a23981887",
        about="pictures, a watermark in a ResNet",
        setting=Setting(
            note=CIFAR, config='pretrain-epochs=0 server-private-samples=64 client-samples=100 results-dir="results"'
        ),
    ),
    "simulation": Found(
        repository="NicolasSchuler/fl-pytorch-simulation",
        commit="56a8ed4844",
        about="pictures, measures of the machine",
        setting=Setting(note=CIFAR),
    ),
    "fairness": Found(
        repository="JoeSharp96/fairness-privacy-trade-offs",
        commit="24fb3c2cd5",
        about="rows about people, fairness, DP-SGD",
        setting=Setting(note=ADULT),
    ),
    "poisoning": Found(
        repository="adrianpena100/Dynamic-Attacks-for-Federated-Learning",
        commit="8d3fe3bc16",
        about="pictures, attacks of clients, robust strategies",
        setting=Setting(note=CIFAR, config='dataset="uoft-cs/cifar10" num-total-clients=4'),
    ),
    "uneven": Found(
        repository="RoaringRoyel/fl-flwr-app",
        commit="24d64e5c5b",
        about="pictures, clients with few classes each, state between rounds",
        setting=Setting(nodes=8, note="1,000 Fashion-MNIST images", config="local-epochs=1 fraction-fit=1.0"),
    ),
    "own-records": Found(
        repository="natiShimelis/fl-fashionmnist-flower",
        commit="c5697d2cd6",
        about="pictures, own server loop and records without names",
        setting=Setting(
            note="480 Fashion-MNIST images", files="distributed", config='local-epochs=1 client-algorithm="fedavg"'
        ),
    ),
    "intrusion-rows": Found(
        repository="vinic011/intrusion-fl",
        commit="094ca5b2f4",
        about="intrusion detection, autoencoder of rows",
        setting=Setting(note="1,600 drawn flows stand in for CICIDS2017", files="flows", config="batch-size=8"),
    ),
    "health-pictures": Found(
        repository="MagnusS0/fl-for-ai-health",
        commit="bea505ba39",
        about="tissue pictures, ResNet-18, mixed precision; segmentation takes another pyproject.toml",
        setting=Setting(nodes=3, note="240 Tiny ImageNet images stand in for tissue", config="from-disk=false"),
    ),
    "graph-recommender": Found(
        repository="Yang-Li86/recommender",
        commit="0258b115e4",
        about="ratings of things, graph network",
        setting=Setting(nodes=3),
    ),
    "energy": Found(
        repository="VarshaBadgujar/timeseries-flwr-app",
        commit="9f660f8998",
        about="time series of energy, LSTM, TensorFlow",
        setting=Setting(nodes=3),
    ),
    "sensors": Found(
        repository="Sal0089/flwr-edge-remote",
        commit="9a45e916b5",
        about="time series of a sensor, attention",
        setting=Setting(nodes=3, node_config='client-id="{partition}"'),
    ),
    "masked-medmnist": Found(
        repository="mohres/federated-dp-sec_agg-flower",
        commit="a53840b5e7",
        about="medical pictures, LocalDpMod and SecAgg+",
        setting=Setting(nodes=5),
    ),
    "green": Found(
        repository="Redcom94/Green-FL-Project",
        commit="2f79e07d66",
        about="pictures, energy that is used",
        setting=Setting(note=CIFAR),
    ),
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--apps", type=Path, help="folder of checkouts, OWNER+NAME")
    parser.add_argument("--data", type=Path, help="folder of data sets, NAME/SPLIT.parquet")
    parser.add_argument("--only", nargs="*", help="apps by name")
    parser.add_argument("--out", type=Path, default=Path("third_party_apps"), help="folder of pages and logs")
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for an app")
    parser.add_argument("--stand-in", action="store_true", help="draw data that are missing")
    parser.add_argument("--second", action="store_true", help="keep the try again, with this try beside it")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="a Python with the apps' packages")
    parser.add_argument("--table", action="store_true", help="write the table of the rows alone")
    asked = parser.parse_args()
    kept = RowFile(ROWS)
    if not asked.table:
        if asked.apps is None or asked.data is None:
            parser.error("--apps and --data are expected, or --table alone")
        mirror = make_mirror(asked.data.absolute(), asked.out.absolute() / "mirror", of_others=True)
        for name in asked.only or APPS:
            app = APPS[name]
            if app.placed is not None:
                into = asked.apps / app.repository.replace("/", "+") / app.placed[1]
                shutil.copytree(mirror / app.placed[0], into, dirs_exist_ok=True)
            place = asked.apps / app.repository.replace("/", "+") / app.setting.folder
            more = ["--stand-in"] if asked.stand_in else []
            row = audit_of(name, place, app.setting, mirror, asked, python=asked.python, more=more)
            row = without_places(row, {str(asked.apps / app.repository.replace("/", "+")): "CHECKOUT"})
            row = json.loads(HOMES.sub("HOME_OF_ITS_AUTHOR", json.dumps(row)))
            told = {"repository": app.repository, "commit": app.commit, "about": app.about}
            first = kept.find({"example": name})
            if first is not None:
                row |= {"stand_in": asked.stand_in, "head": head()}
                row = {**first, "second" if asked.second else "again": row}
            kept.add({"example": name}, row | told)
            newest = latest(row)
            print(f"{name}: {newest.get('headline') or newest.get('reason')} ({newest['seconds']:.0f} s)", flush=True)
    PAGE.write_text(table(kept.rows), encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """Render the page for the docs."""
    rows = sorted(rows, key=lambda row: str(row["example"]))
    again = [row["again"] for row in rows if "again" in row]
    newest = [latest(row) for row in rows]
    lines = [
        "# Flower apps of others, audited as they are",
        "",
        "<!-- Written by experiments/third_party_apps.py --table; do not edit. -->",
        "",
        "For apps that others have published this page says what clients upload,"
        " and how much of their data the server can reconstruct from it.",
        "",
        f"{len(rows)} apps of public repositories were found by searching and run by `fl-privacy audit APP --sandbox`,"
        f" not a line of them edited: {_counts(rows)}.",
        "",
        f"{len(again)} of them, first those without a page, were run again at {_heads(again)},"
        f" {sum(row['stand_in'] for row in again)} with `--stand-in`, which the first error advises where data are"
        f" missing: {_counts(again)}."
        f" Then errors of ours were mended, and {sum('second' in row for row in rows)} were tried a second time, some"
        f" more often, which counts apart: with the newest try of each {_counts(newest)}. Reasons of the others are"
        " named. Large files that a copy of a repository lacked, such as data, count as missing.",
        "",
        "Columns are those of [Flower's examples](flower_examples.md).",
        "",
        "| App | Repository | Commit | About |",
        "|---|---|---|---|",
        *(f"| {row['example']} | `{row['repository']}` | `{row['commit']}` | {row['about']} |" for row in rows),
        "",
        "| App | First try | Again | Second try |",
        "|---|---|---|---|",
        *(f"| {row['example']} | {_first(row)} | {_of(row, 'again')} | {_of(row, 'second')} |" for row in rows),
        "",
        "The newest try of each:",
        "",
        *lines_of(newest),
        *first_tries.section(),
    ]
    return "\n".join(lines)


def latest(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the newest try of an app."""
    newest = row.get("second") or row.get("again") or row
    stood = "; data that were missing are drawn" if newest.get("stand_in") else ""
    return {**newest, "data": (newest["data"] or "its own") + stood}


def head() -> str:
    """Return the last commit that changed the package."""
    command = ["git", "-C", HERE.parent, "log", "-1", "--format=%h", "--abbrev=8", "--", "fl_privacy"]
    return subprocess.check_output(command, text=True).strip()


def _heads(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{each}`" for each in sorted({row["head"] for row in rows}))


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    pages = [row for row in rows if first_tries.is_page(row)]
    return (
        f"{len(pages)} of {len(rows)} ended in a page on what their clients upload,"
        f" {sum(map(is_measured, pages))} of them with a measured attack"
    )


def _first(row: Mapping[str, Any]) -> str:
    page = "a page, measured" if is_measured(row) else "a page, not attacked"
    return page if first_tries.is_page(row) else how_ended(row)


def _of(row: Mapping[str, Any], which: str) -> str:
    tried = row.get(which)
    return "-" if tried is None else how_ended(tried) + " (`--stand-in`)" * tried["stand_in"]


if __name__ == "__main__":
    main()
