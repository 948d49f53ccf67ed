"""Public Flower projects that nothing was tuned to, audited by one and the same command, first try, nothing edited.

    python experiments/first_tries.py --apps FOLDER [--only NAME ...] [--out FOLDER] [--python PYTHON]

FOLDER holds a checkout of each repository, ``OWNER+NAME``, at the commit that its row says; none of their code is kept
here. PYTHON has the packages that ``fl-privacy audit --check`` lists as missing. Rows are in
``experiments/rows/first_tries``; ``experiments/third_party_apps.py --table`` writes them into docs/third_party_apps.md.
"""

import argparse
import json
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_examples import ended, is_measured, lines_of, uploaded, why_none, without_places
from row_file import RowFile

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows" / "first_tries"
COMMAND = "audit --sandbox --stand-in --nodes 3 --victims 4 --seconds 60"

CELL = re.compile(r"[^\s\"]*fl-privacy-cell-\w+[^\s\":]*")
"""A folder in the sandbox of an audit."""

FIELDS = ("headline", "tone", "models", "findings", "rungs", "survivors", "problems", "notes")
"""Fields of an audit's record that a row keeps."""

PROJECTS: Mapping[str, tuple[str, str, str]] = {
    "GabDonzelli/Federated_learning_wFlower": ("4cbdbdab60", "", "pictures"),
    "KaramveerSidhu/flwr-app": ("6e8ecd0b71", "", "an app"),
    "MurtonN/Federated-Learning-Research-UW-Platteville": ("8025e01de7", "", "research"),
    "NabilDjelloudi/masteriales": ("ace597dd95", "", "thesis"),
    "alhu22/Fedarated_learning": ("144c3dfec5", "", "an app"),
    "dev-andalib/FLWR": ("0dd7ff841b", "FL/fedavgids", "intrusion detection"),
    "nozzolillo01/battery-aware-federated-learning": ("f738aaa878", "", "pictures, batteries"),
    "sebin-maret/federated-learning-cloud": ("ac1f846862", "", "cloud"),
    "sihamshm/federated-generalization-generative": (
        "44f2322567",
        "federated_learning_logistic_regression",
        "logistic regression",
    ),
    "thanhpro09022004-afk/FederatedLearning": ("cf88faff89", "", "an app"),
    "tkhs-dev/semi-flower": ("9fe985f584", "", "semi-supervised"),
    "vleps59/UAV-FL": ("213a5e5558", "", "drones"),
    "yagnesh1708/FDL-FLOWER": ("827cab915f", "", "an app"),
    "Derkora/Federated-Learning-in-Facial-Recognition-Based-Attendance-System": ("3b8330f6af", "", "faces"),
    "Hanbat-IoT/Lab2": ("c13da7ef0f", "", "internet of things"),
    "Iruos8805/Federated-Learning-based-Heart-Disease-Prediction": ("892c59f104", "", "rows of patients"),
    "Iryvern/FML2": ("a096ab170b", "", "an app"),
    "RohanPhutke/privacy-resilient-afl": ("85eb438b4c", "", "asynchronous training"),
    "Shyam5323/Mura_Federated": ("067acaf1eb", "", "X-rays"),
    "StavanRKhobare/Explainable-Federated-Learning-Framework-for-Early-Epidemic-Forecasting": (
        "cd2315ee2d",
        "",
        "epidemics",
    ),
    "Volpix28/Federated_ML": ("ef6bcbc3ba", "", "an app"),
    "YoshidaR3n/FL_poison": ("433bddf952", "", "poisoning"),
    "abhisek-dhungel/federated-ecg-fl": ("d7c80b5608", "", "electrocardiograms"),
    "birnbaum/flwr-lowcarb": ("8edf376218", "", "energy"),
    "candido05/Federated-Learning": ("012e629e63", "", "an app"),
    "choi328328/FederatedPLP": ("c612445b58", "", "patients' records"),
    "darshm1029/FLower": ("067cee6d09", "", "an app"),
    "ganguls/Federated-Learning-for-Secure-Finance-System": ("0c5b9dad32", "", "fraud"),
    "h3dema/fedl": ("ca7fd54e91", "", "an app"),
    "jiyeone99/flower_fl": ("9bce88c923", "", "an app"),
    "labdaps/federated-learning-for-health-in-a-multicentric-sample-of-hospitals": ("e89616ed9c", "", "hospitals"),
    "selhadi88/FedShield-IDS": ("c02a3cf7c4", "", "intrusion detection"),
}
"""OWNER/NAME -> commit, the folder of the app, and what it is about."""


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--apps", type=Path, required=True, help="folder of checkouts, OWNER+NAME")
    parser.add_argument("--only", nargs="*", help="projects by OWNER/NAME")
    parser.add_argument("--again", action="store_true", help="projects that have a row, too")
    parser.add_argument("--out", type=Path, default=Path("first_tries"), help="folder of pages and logs")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="a Python with the apps' packages")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for an app")
    asked = parser.parse_args()
    kept = RowFile(ROWS)
    for name in asked.only or PROJECTS:
        if asked.again or asked.only or kept.find({"example": name}) is None:
            row = json.loads(CELL.sub("SANDBOX", json.dumps(tried(name, asked))))
            kept.add({"example": name}, row)
            print(f"{name}: {row.get('headline') or row.get('reason')} ({row['seconds']:.0f} s)", flush=True)


def tried(name: str, asked: Namespace) -> dict[str, Any]:
    """Audit the checkout of ``name`` and return its row."""
    commit, inner, about = PROJECTS[name]
    place, out = asked.apps.absolute() / name.replace("/", "+") / inner, asked.out.absolute() / name.replace("/", "+")
    out.mkdir(parents=True, exist_ok=True)
    started, started_at = time.perf_counter(), time.time()
    words = COMMAND.split()
    command = [str(asked.python), "-m", "fl_privacy", words[0], str(place), *words[1:], "--out", str(out)]
    status = ended(command, {**os.environ, "HF_HUB_OFFLINE": "1"}, out / "log", asked.limit)
    text = (out / "log").read_text(encoding="utf-8", errors="replace")
    row: dict[str, Any] = {
        "repository": name,
        "commit": commit,
        "about": about,
        "edited": 0,
        "data": "",
        "traceback": "Traceback" in text,
        "format": "app" if "serverapp" in _project(place) else "scripts",
        "seconds": time.perf_counter() - started,
    }
    places = {f"{place}/": "", str(place): name, str(out): "OUT"}
    records = [path for path in out.glob("audit-*/audit.json") if path.stat().st_mtime >= started_at]
    if records and status in (0, 124):
        record = json.loads(records[0].read_text(encoding="utf-8"))
        row |= {
            k: record[k] for k in ("headline", "tone", "models", "findings", "rungs", "survivors", "problems", "notes")
        }
        return without_places(row | {"cut": status == 124, "uploaded": uploaded(record)}, places)
    lines = [line for line in text.splitlines() if line.startswith("error:")] or text.splitlines()[-1:]
    reason = "took too long where this was measured" if status == 124 else " ".join(lines)[:400]
    return without_places(row | {"reason": reason}, places)


def _project(place: Path) -> str:
    path = place / "pyproject.toml"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def section() -> list[str]:
    """Render the section of docs/third_party_apps.md."""
    rows = sorted(RowFile(ROWS).rows, key=lambda row: str(row["example"]).lower())
    pages = [row for row in rows if not why_none(row)]
    scripts = sum(row["format"] == "scripts" for row in rows)
    return [
        "## First tries",
        "",
        f"{len(rows)} further projects, {scripts} of them without Flower's app format, were taken as they were found"
        f" and audited once by `fl-privacy {COMMAND}`; nothing was tuned to them, and not a line was edited:"
        f" {len(pages)} ended in a page on what clients upload, {sum(map(is_measured, pages))} of them with a measured"
        f" attack, {sum(row['traceback'] for row in rows)} in a traceback. Data that were missing were drawn.",
        "",
        "| Project | Commit | Format | About |",
        "|---|---|---|---|",
        *(f"| `{row['repository']}` | `{row['commit']}` | {row['format']} | {row['about']} |" for row in rows),
        "",
        *lines_of(rows),
    ]


if __name__ == "__main__":
    main()
