"""How often guesses that never saw an image are identified with it, and how far it leads then, by data set.

Guesses are other images of its class, samples of generators trained on such images, icons and smooth noise, each
several times for each original. A row counts the guesses of a kind, and those that are identified with a lead of at
least so much; guesses that are recognizable without that are apart. ``fl_privacy.measure.outcome.CHANCES`` is of these.

    python experiments/verdict_chance.py --guesses 300 --out experiments/rows/verdict_chance
"""

import argparse

import torch
from row_file import RowFile, takes_rows
from verdict_kinds import at_random, of_class
from verdict_pairs import DATA, judged, subjects
from verdict_turned import generated, icons, smooth

from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.outcome import Outcome, outcome_of

LEADS = (0.0, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KINDS = {
    "of its class": lambda s: of_class(s, at_random(s)),
    "generated": generated,
    "icons": icons,
    "smooth noise": lambda s: smooth(s, 2.0),
}
AT_ONCE = 60
"""Originals of a set."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=DATA)
    parser.add_argument("--guesses", type=int, default=300, help="of each kind and set")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    takes_rows(parser)
    asked = parser.parse_args()
    rows = RowFile(asked.out)
    torch.set_num_threads(1)
    for name in asked.data:
        s, candidates = subjects(name, "test", AT_ONCE)
        for kind in asked.kinds:
            key = {"data": name, "kind": kind}
            row = rows.find(key) or {"guesses": 0, "recognizable": 0, **{f"lead {lead:g}": 0 for lead in LEADS}}
            while row["guesses"] < asked.guesses:
                s.rng.manual_seed(1_000 + row["guesses"])
                records = judged(KINDS[kind](s).float(), s, Distractors(candidates=candidates))
                outcomes = [outcome_of(record) for record in records]
                leads = [r["lead"] for r, o in zip(records, outcomes, strict=True) if o is Outcome.IDENTIFIED]
                found = {f"lead {lead:g}": sum(own >= lead for own in leads) for lead in LEADS}
                found |= {"guesses": len(records), "recognizable": outcomes.count(Outcome.RECOGNIZABLE)}
                row = rows.add(key, {name: row[name] + number for name, number in found.items()})
            print(name, kind, {name: value for name, value in row.items() if name not in key}, flush=True)


if __name__ == "__main__":
    main()
