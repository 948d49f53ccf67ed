"""What a change of the code costs its reader: files on the ways through it, files that name a thing, sizes of files.

    python experiments/house.py [COMMIT...]    # the working tree, and commits not yet measured; and the page's table

A way is run, and counted are the package's files of which any function is called on it: from an override to the noise
that ``defense=dp_noise`` draws, and from a client's reply to the written page, of a training with an attack. Functions
that are called while a module is imported count on neither.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.test_shape import shape_of  # noqa: E402

ROWS = ROOT / "experiments" / "rows" / "house" / "rows.jsonl"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- Written by experiments/house.py; do not edit. -->", "<!-- end of the table -->"

RUN = "experiment=smoke backend=loop baseline=false seed=7 victims=1 federation.rounds=1 attack.iterations=5"
NAMED = {"defense": "soteria", "attack": "ggl", "metric": "rmse"}
"""Kind of thing -> one that was there before and after, under the same name."""

TRACED = """
import sys, threading
begins, ends, out = sys.argv[1:4]
seen, importing = set(), 0
state = {"on": not begins, "over": False}  # a function by its qualified name
def watch(frame, event, arg):
    code = frame.f_code
    if "/fl_privacy/" not in code.co_filename or code.co_name == "<module>":
        return
    name = code.co_qualname
    if event == "return" and begins and name == begins:
        state["on"] = True
    if event == "call" and state["on"] and not state["over"]:
        outer = frame.f_back
        while outer is not None and outer.f_code.co_name != "<module>":
            outer = outer.f_back
        if outer is None or "importlib" not in str(outer.f_back and outer.f_back.f_code.co_filename):
            seen.add(code.co_filename.rpartition("/fl_privacy/")[2])
    if event == "call" and ends and name == ends:
        state["over"] = True
sys.argv = ["fl-privacy", "run", *sys.argv[4:]]
threading.setprofile(watch)
sys.setprofile(watch)
from fl_privacy.cli.main import main
try:
    main()
finally:
    sys.setprofile(None)
    open(out, "w").write("\\n".join(sorted(seen)))
"""
"""Records which files' functions are called between the return of one function and the call of another."""

LINES = {
    "way_update": "files on the way from a client's reply to the page",
    "way_noise": "files on the way from `defense=dp_noise` to the noise",
    "names_defense": "Python files that name a defense (`soteria`)",
    "names_attack": "Python files that name an attack (`ggl`)",
    "names_metric": "Python files that name a metric (`rmse`)",
    "modality_files": "files that ask of what kind examples are, outside of those of one kind",
    "modality_places": "places in them",
    "record_files": "files that look into a message's arrays",
    "modules": "files",
    "mean_lines": "lines of a file, mean",
    "under_80": "files under 80 lines",
}


def main() -> None:
    """Measure each commit and write rows and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*")
    commits = parser.parse_args().commits
    kept = {row["code"]: row for row in map(json.loads, ROWS.read_text().splitlines())} if ROWS.exists() else {}
    rows = [row for code, row in kept.items() if code != "now"]
    for commit in (commit for commit in commits if commit not in kept):
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
            rows.append({"code": commit, **measured(Path(folder))})
    rows.append({"code": "now", **measured(ROOT)})
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}")
    print(table(rows))


def table(rows: list[dict[str, object]]) -> str:
    """Write the rows side by side."""
    head = ["", *(f"`{row['code']}`" if row["code"] != "now" else "now" for row in rows)]
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * len(rows)}|"]
    lines += [f"| {said} | {' | '.join(str(row[name]) for row in rows)} |" for name, said in LINES.items()]
    return "\n".join(lines)


def measured(root: Path) -> dict[str, object]:
    """Measure the package in ``root``."""
    files = {path: path.read_text() for path in sorted((root / "fl_privacy").rglob("*.py"))}
    lengths = [len(text.splitlines()) for text in files.values()]
    answered_above_chance = shape_of(root).asks
    return {
        "way_update": way(root, "Client.update", "", "defense=none"),
        "way_noise": way(root, "", "sample_noise", "defense=dp_noise"),
        **{f"names_{kind}": sum(names(text, name) for text in files.values()) for kind, name in NAMED.items()},
        "modality_files": len(answered_above_chance),
        "modality_places": sum(map(len, answered_above_chance.values())),
        "record_files": sum("array_records" in text for text in files.values()),
        "modules": len(files),
        "mean_lines": round(sum(lengths) / len(lengths)),
        "under_80": sum(length < 80 for length in lengths),
    }


def names(text: str, name: str) -> bool:
    """Say whether code names ``name``: defines, imports or uses it, or has it as a text."""
    for node in ast.walk(ast.parse(text)):
        said = {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None)}
        if name in said or (isinstance(node, ast.Constant) and node.value == name):
            return True
    return False


def way(root: Path, begins: str, ends: str, override: str) -> int:
    """Run a training and count the files of which functions are called between two moments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen"
        command = [sys.executable, "-c", TRACED, begins, ends, str(out), *RUN.split(), override, f"out={folder}/runs"]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{root}: {done.stderr[-500:]}")
        return len(out.read_text().splitlines())


if __name__ == "__main__":
    main()
