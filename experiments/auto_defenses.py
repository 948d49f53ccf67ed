"""``attack=auto`` beside the presets against each defense, by an attacker that is told nothing and one that knows it.

    python experiments/auto_defenses.py --out runs/auto_defenses --minutes 60
    python experiments/auto_defenses.py --out runs/auto_defenses --minutes 0    # the table of what there is

Every attack gets the same number of evaluations of loss and gradient for a victim. One line of ``rows.jsonl`` for each
defense and attack, appended as it comes, and the folders of ``fl-privacy attack`` beside it: a run that was stopped
goes on where it was.
"""

import argparse
import io
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fl_privacy.cli.main import run_command_line

DEFENSES: Mapping[str, tuple[str, ...]] = {
    "none": ("defense=none",),
    "pruning 0.9": ("defense=pruning", "defense.rate=0.9"),
    "soteria 0.5": ("defense=soteria", "defense.scores=estimated", "defense.rate=0.5"),
    "noise 0.001": ("defense=dp_noise", "defense.clip_norm=1", "defense.scale=1e-3"),
    "8 bits": ("defense=quantization", "defense.bits=8"),
    "2 bits": ("defense=quantization", "defense.bits=2"),
    "sharing 0.05": ("defense=selective_sharing", "defense.share=0.05"),
    "noise 0.01": ("defense=dp_noise", "defense.clip_norm=1", "defense.scale=1e-2"),
    "pruning 0.5": ("defense=pruning", "defense.rate=0.5"),
    "1 bit": ("defense=quantization", "defense.bits=1"),
    "soteria mixing 0.5": ("defense=soteria_mixing", "defense.rate=0.5"),
    "spn 0.1": ("defense=spn",),
    "ats": ("defense=ats", "defense.policies=3-43-15"),
    "ppdl": ("defense=ppdl",),
    "local_dp": ("defense=local_dp",),
    "dp_sgd": ("defense=dp_sgd",),
    "instahide": ("defense=instahide",),
    "pruning 0.99": ("defense=pruning", "defense.rate=0.99"),
}


@dataclass(frozen=True)
class Row:
    """Mean PSNR in dB by both attackers; seconds of both, by the clock."""

    defense: str
    attack: str
    evaluations: int
    plain: float | None
    adaptive: float | None
    seconds: float
    members: dict[str, int]


def attacks(evaluations: int) -> Mapping[str, tuple[str, ...]]:
    moves = max(1, evaluations // 20)
    return {
        "auto": ("attack=auto", f"attack.evaluations={evaluations}"),
        "inverting_gradients": ("attack=inverting_gradients", f"attack.iterations={evaluations}"),
        "inverting_gradients_code": ("attack=inverting_gradients_code", f"attack.iterations={evaluations}"),
        "idlg": ("attack=idlg", f"attack.iterations={moves}"),
    }


def attacked(defense: str, attack: str, options: argparse.Namespace) -> Row:
    """Run ``fl-privacy attack`` once, where both attackers attack the same uploads."""
    arguments = (
        "attack",
        f"data={options.data}",
        f"model={options.model}",
        f"victims={options.victims}",
        f"seed={options.seed}",
        "threat_model=adaptive",
        *DEFENSES[defense],
        *attacks(options.evaluations)[attack],
        f"out={options.out / 'runs'}",
    )
    printed = io.StringIO()
    with redirect_stdout(printed):
        run_command_line(list(arguments))
    folder = Path([line for line in printed.getvalue().splitlines() if line.strip()][-1])
    summary = json.loads((folder / "summary.json").read_text())
    adaptive = summary["adaptive"]
    return Row(
        defense=defense,
        attack=attack,
        evaluations=options.evaluations,
        plain=psnr_of(summary),
        adaptive=psnr_of(adaptive) if adaptive else None,
        seconds=summary["seconds"]["attack"] + (adaptive["seconds"] if adaptive else 0),
        members=(adaptive or summary)["members"],
    )


def psnr_of(leakage: Mapping[str, Any]) -> float | None:
    found = leakage["metrics"].get("psnr")
    return None if found is None else min(float(found["mean"]), 200.0)


def read_rows(path: Path) -> dict[tuple[str, str], Row]:
    if not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]
    return {(row.defense, row.attack): row for row in rows}


def table(rows: Mapping[tuple[str, str], Row]) -> Iterator[str]:
    names = list(attacks(1))
    yield f"| defense | {' | '.join(f'{name}, plain | adaptive' for name in names)} | won |"
    yield f"|{'---|' * (2 * len(names) + 2)}"
    for defense in DEFENSES:
        own = rows.get((defense, "auto"))
        if own is None:
            continue
        pairs = [rows.get((defense, name)) for name in names]
        figures = [shown(figure) for row in pairs for figure in ((row.plain, row.adaptive) if row else (None, None))]
        won = ", ".join(f"{member} {count}" for member, count in own.members.items())
        yield f"| {defense} | {' | '.join(figures)} | {won} |"


def shown(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/auto_defenses"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--victims", type=int, default=16)
    parser.add_argument("--evaluations", type=int, default=600, help="of each attack, for each victim")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    rows, began = read_rows(path), time.monotonic()
    for defense in DEFENSES:
        for attack in attacks(options.evaluations):
            if (defense, attack) in rows or time.monotonic() - began > 60 * options.minutes:
                continue
            row = rows[defense, attack] = attacked(defense, attack, options)
            with path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
