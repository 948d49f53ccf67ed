"""Whether a change of the code changes what the package computes, writes or shows: one run of each family, compared.

    python experiments/same.py --since COMMIT            # both commits in folders of their own, then what differs
    python experiments/same.py --since COMMIT --families attack audit --keep runs/same

Each family is run by the code of ``COMMIT`` and by that of the working tree, with the same packages and seeds. Compared
are ``metrics.jsonl``, ``summary.json``, captures, pictures and pages, byte for byte but for seconds, bytes of memory,
dates, names of folders and the code's own hash. Status 1 if anything differs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ATTACK = "attack data=mnist_mini model=lenet victims=2 seed=7 attack=inverting_gradients attack.iterations=40"
_SMOKE = "run experiment=smoke seed=7 baseline=false victims=2 backend=loop federation.rounds=3"

FAMILIES = {
    "attack": [_ATTACK, "attack data=mnist_mini model=mlp victims=2 seed=7 attack=exact"],
    "defense": [f"{_SMOKE} defense={name}" for name in ("dp_sgd", "quantization", "soteria", "spn", "ats")],
    "adaptive": [f"{_ATTACK} defense={name} threat_model=adaptive" for name in ("pruning", "dp_noise")],
    "server": [f"attack data=mnist_mini model=mlp victims=2 seed=7 server={name}" for name in ("imprint", "loki")],
    "inference": [f"{_SMOKE} attack=none inference={name}" for name in ("membership", "source", "canaries")],
    "text": ["attack data=tweets model=bert_tiny victims=2 seed=7 attack=bag_of_words"],
    "flower": [_SMOKE.replace("backend=loop", "backend=flower")],
    "captured": [f"{_SMOKE} defense=pruning intercept.save=true"],
    "audit": [
        "audit examples/flower_quickstart --nodes 2 --victims 2 --out {out}",
        "audit examples/flower_numpy_client --nodes 2 --victims 2 --out {out}",
    ],
    "benchmark": ["benchmark smoke"],
    "trade_off": ["trade-off tiny"],
}
"""Family -> command lines of ``fl-privacy``; an ``out=`` or ``{out}`` is put in."""

_PASSING = re.compile(
    r"second|time|date|code|hash|memory|started|finished|machine|energy|watt|cpu|environment|_ms$|rss"
)
"""Names of fields that no two runs have alike."""

_READ = {".json", ".jsonl", ".html", ".csv", ".yaml", ".safetensors", ".png", ".npz", ".md"}
_FIGURE = re.compile(
    r"\d[\d.,:]*\s*(?:s|ms|min|h|MB|GB|kB|KB|J|Wh|seconds?|minutes?|hours?)\b(?:\s+\d+\s*(?:s|min)\b)*"
    r"|\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?|\b[0-9a-f]{8,64}\b"
)
_HASH = re.compile(r"-[0-9a-f]{8}(?=$|/|\")")


def main() -> None:
    """Run both sides and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD", help="the commit to compare the working tree with")
    parser.add_argument("--families", nargs="*", default=[*FAMILIES], choices=[*FAMILIES])
    parser.add_argument("--keep", type=Path, help="folder of the runs; what is finished there is not run again")
    options = parser.parse_args()
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "code"
        _git(here, "worktree", "add", "--quiet", "--detach", str(before), options.since)
        try:
            work = options.keep.resolve() if options.keep else Path(folder) / "runs"
            differing = [line for family in options.families for line in _compared(family, before, here, work)]
        finally:
            _git(here, "worktree", "remove", "--force", str(before))
    print("\n".join(differing) if differing else f"Same: {', '.join(options.families)}.")
    sys.exit(bool(differing))


def _git(here: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(here), *words], check=True)


def _compared(family: str, before: Path, after: Path, work: Path) -> list[str]:
    """Run ``family`` by both codes; a line for each difference."""
    found: list[str] = []
    for number, words in enumerate(FAMILIES[family]):
        sides = [_run(code, words, work / side / family / str(number)) for side, code in (("a", before), ("b", after))]
        print(f"{family} {number}: {words}", file=sys.stderr, flush=True)
        if failed := [(side / "status").read_text() for side in sides if not _succeeded(side)]:
            found.append(f"{family} {number}: {words}: {failed[0].strip()}")
        one, other = (_contents(side) for side in sides)
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                found.append(f"{family} {number}: {name}: {_first_difference(one.get(name), other.get(name))}")
    return found


def _run(code: Path, words: str, out: Path) -> Path:
    """Run a command line by the package in ``code``; what has finished is kept."""
    if (out / "status").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    given = words.format(out=out / "audit").split()
    if "{out}" not in words:
        given.append(f"out={out}")
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "fl_privacy", *given]
    done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)
    (out / "status").write_text(f"{done.returncode}\n{done.stderr.splitlines()[-1] if done.returncode else ''}\n")
    return out


def _succeeded(out: Path) -> bool:
    return (out / "status").read_text().startswith("0")


def _contents(folder: Path) -> dict[str, Any]:
    """Load what is compared, by the name of each file without its run's hash."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in _READ | {""}]
    named = {_HASH.sub("", str(path.relative_to(folder))): path for path in files}
    return {name: _plain(path, folder) for name, path in named.items() if not _PASSING.search(Path(name).name)}


def _plain(path: Path, folder: Path) -> Any:
    """Load a file's content without what changes from run to run."""
    if path.suffix in {".png", ".safetensors", ".npz"}:
        return path.read_bytes()
    text = path.read_text().replace(str(folder), "FOLDER")
    if path.suffix == ".json":
        return _without_passing(json.loads(text))
    if path.suffix == ".jsonl":
        return [_without_passing(json.loads(line)) for line in text.splitlines()]
    return _FIGURE.sub("#", _HASH.sub("", text))


def _without_passing(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_passing(each) for name, each in value.items() if not _PASSING.search(name)}
    if isinstance(value, list):
        return [_without_passing(each) for each in value]
    return _HASH.sub("", value) if isinstance(value, str) else value


def _first_difference(one: Any, other: Any, *, place: str = "") -> str:
    """Say where two contents part."""
    if one is None or other is None:
        return f"only {'after' if one is None else 'before'}"
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys(), key=str):
            if one.get(name) != other.get(name):
                return _first_difference(one.get(name), other.get(name), place=f"{place}.{name}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return _first_difference(a, b, place=f"{place}[{number}]")
    if isinstance(one, str) and isinstance(other, str) and len(one) > 80:
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        one, other = one[max(0, at - 40) : at + 60], other[max(0, at - 40) : at + 60]
    if isinstance(one, bytes):
        return "other bytes"
    return f"{place}: {str(one)[:200]!r} before, {str(other)[:200]!r} after"


if __name__ == "__main__":
    main()
