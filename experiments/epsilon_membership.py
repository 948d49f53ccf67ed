"""Which epsilon LiRA disproves, and which canaries do, on the same runs of DP-SGD and of noise on updates.

python experiments/epsilon_membership.py --out experiments/rows/epsilon_membership
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from row_file import RowFile, takes_rows

from fl_privacy.runs.folder import read_run

COMMON = (
    "federation=fedavg", "federation.clients=3", "federation.rounds=3", "federation.plan.lr=0.02",
    "federation.plan.batch_size=8", "evaluate_every=3", "holdout=3850", "intercept.rounds=all", "attack=none",
    "baseline=false", "inference=[canaries,membership]", "inference.membership.members=100",
    "inference.membership.others=120", "model=mlp",
)  # fmt: skip
RUNS = {
    "DP-SGD, noise multiplier 0.5": ("defense=dp_sgd", "defense.clip_norm=1.0", "defense.noise_multiplier=0.5"),
    "DP-SGD, noise multiplier 1": ("defense=dp_sgd", "defense.clip_norm=1.0", "defense.noise_multiplier=1.0"),
    "noise of 1 on updates clipped to 1": ("defense=dp_noise", "defense.clip_norm=1.0", "defense.scale=1.0"),
    "clipping without noise": ("defense=dp_sgd", "defense.clip_norm=1.0", "defense.noise_multiplier=0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/epsilon_membership"))
    takes_rows(parser)
    options = parser.parse_args()
    rows = RowFile(options.out)
    for name, defense in RUNS.items():
        if rows.find({"run": name}):
            continue
        command = [sys.executable, "-m", "fl_privacy", "run", *COMMON, *defense, f"out={options.runs}"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        run = read_run(Path(printed.strip().splitlines()[-1]))
        (claim,) = run.claims
        proven = {finding.method: finding.proven_epsilon for finding in run.summary.inferred}
        figures = {
            "claimed": claim.claimed and round(claim.claimed, 2),
            "recomputed": claim.recomputed and round(claim.recomputed, 2),
            "canaries_bound": claim.lower and round(claim.lower, 3),
            "canaries_estimate": claim.estimate and round(claim.estimate, 2),
            "canaries_could_show": claim.noticed and round(claim.noticed, 2),
            "lira": round(proven.get("lira") or 0.0, 3),
            "best_of_membership": round(max((value or 0.0 for value in proven.values()), default=0.0), 3),
        }
        print(json.dumps(rows.add({"run": name}, figures)), flush=True)


if __name__ == "__main__":
    main()
