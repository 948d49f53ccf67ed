"""How often an honest mechanism's claim is called false: each of twelve at many seeds, epsilon .5, 1, 3 and 8 in turn.

A row for each check; stopped and started again, the command goes on with the checks that are missing.

    python experiments/epsilon_honest.py --seeds 200 --out experiments/rows/epsilon_honest
"""

import argparse
import json
import time
import warnings

import torch
from epsilon_mechanisms import EPSILONS, HONEST
from row_file import RowFile, takes_rows

from fl_privacy.dp_check import check_mechanism


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", choices=list(HONEST), help="one mechanism")
    takes_rows(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = RowFile(options.out)
    for seed in range(options.seeds):
        for name, honest in HONEST.items():
            if options.only not in (None, name):
                continue
            epsilon = EPSILONS[seed % len(EPSILONS)]
            key = {"mechanism": name, "seed": seed, "epsilon": epsilon, "draws": honest.draws}
            if rows.find(key):
                continue
            started = time.process_time()
            subject = honest.make(epsilon, seed)
            torch.manual_seed(seed)
            found = check_mechanism(subject.mechanism, draws=honest.draws, seed=seed, **subject.asked())
            figures = {
                "claimed": round(subject.claim.epsilon, 4),
                "contradicted": found.contradicted,
                "lower": round(found.lower_bound, 3),
                "above": found.lower_bound > subject.claim.epsilon,
                "cpu_seconds": round(time.process_time() - started, 2),
            }
            print(json.dumps(rows.add(key, figures)), flush=True)


if __name__ == "__main__":
    main()
