"""How often an honest mechanism's claim is called false: each of twelve at many seeds, epsilon .5, 1, 3 and 8 in turn.

A row for each mechanism and 20 seeds; stopped and started again, the command goes on with those that are missing.

    python experiments/epsilon_honest.py --seeds 200 --out experiments/rows/epsilon_honest
"""

import argparse
import json
import time
import warnings

import torch
from epsilon_mechanisms import EPSILONS, HONEST, Honest
from row_file import Row, RowFile, takes_rows

from fl_privacy.dp_check import check_mechanism

BLOCK = 20
"""Seeds of a row, as many at each epsilon."""


def checked(honest: Honest, first: int) -> Row:
    """Check a mechanism over ``BLOCK`` seeds and return its figures."""
    started = time.process_time()
    accused, above, lowers = 0, 0, []
    for seed in range(first, first + BLOCK):
        subject = honest.make(EPSILONS[seed % len(EPSILONS)], seed)
        torch.manual_seed(seed)
        found = check_mechanism(subject.mechanism, draws=honest.draws, seed=seed, **subject.asked())
        accused += found.contradicted
        above += found.lower_bound > subject.claim.epsilon
        lowers.append(round(found.lower_bound / subject.claim.epsilon, 3))
    return {
        "seeds": BLOCK,
        "draws": honest.draws,
        "accused": accused,
        "above": above,
        "lower_over_claim": lowers,
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", choices=list(HONEST), help="one mechanism")
    takes_rows(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = RowFile(options.out)
    names = sorted(HONEST, key=lambda name: HONEST[name].draws, reverse=True)  # what is drawn one by one comes last
    wanted = [name for name in names if options.only in (None, name)]
    one_by_one = [name for name in wanted if HONEST[name].draws < 4000]
    for group in ([name for name in wanted if name not in one_by_one], one_by_one):
        for first in range(0, options.seeds, BLOCK):
            for name in group:
                key = {"mechanism": name, "first_seed": first}
                if rows.find(key) is None:
                    print(json.dumps(rows.add(key, checked(HONEST[name], first))), flush=True)


if __name__ == "__main__":
    main()
