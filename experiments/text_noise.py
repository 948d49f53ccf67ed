"""Texts behind noise: what the search for the likeliest text reconstructs, and the rank of a client's own text.

    python experiments/text_noise.py --out experiments/rows/text_noise
    python experiments/text_noise.py --seed 1 --batch 2 --out experiments/rows/text_noise

SST-2 behind an untrained BERT-Tiny, a batch of texts and one step of AdamW for each client, clipped to norm 10, noise
of 0.01 an element. The attacker knows the defense and 5,000 other texts. A row for each victim: mean token F1 of
the reconstructions, assigned to its texts, and the mean with other victims' texts as a control. For single texts, also
the rank of the own text's likelihood among 200 public ones, and the rank that another client's update gives it. Rows
that are there are not computed again.
"""

import argparse
import itertools
import time

import torch
from row_file import RowFile, takes_rows

from fl_privacy.attacks.attack import no_progress
from fl_privacy.attacks.gradient_inversion.grouping import Groups
from fl_privacy.attacks.likelihood.texts import LikeliestText, begin_search
from fl_privacy.measure.texts import token_f1, without
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import build_untrained
from fl_privacy.types import Observation

SETTINGS = [
    *("data=sst2", "data.max_length=24", "model=bert_tiny", "federation=fedavg", "federation.plan.optimizer=adamw"),
    *("federation.plan.lr=1e-3", "federation.plan.batch_size=16", "defense=dp_noise"),
    *("defense.clip_norm=10", "defense.scale=0.01", "threat_model=strongest"),
]
PUBLIC, OTHERS = 5000, 200


def f1(guesses: torch.Tensor, texts: torch.Tensor) -> float:
    """Return the mean token F1 of the best assignment of guesses (B, L) to texts (B, M)."""
    special = frozenset(range(3))
    each = [[float(token_f1(without(g[None], special), without(t[None], special))) for t in texts] for g in guesses]
    return max(sum(each[g][t] for t, g in enumerate(p)) for p in itertools.permutations(range(len(texts)))) / len(texts)


def rank(observation: Observation, own: torch.Tensor, label: int, others: torch.Tensor) -> int:
    """Return the rank, from 1, of the likelihood of ``own`` (L,) among ``others`` (N, L)."""
    (group,) = Groups([observation], progress=no_progress)
    prepared = LikeliestText().prepared(group, 0)
    likelihood = begin_search(prepared, prepared.victims[0]).likelihood
    losses = likelihood.losses(torch.cat([own[None], others])[:, None], torch.tensor([label]))
    return 1 + int((losses[1:] <= losses[0]).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1, help="texts of an update; several by one step of SGD")
    parser.add_argument("--victims", type=int, default=6)
    parser.add_argument("--evaluations", type=int, default=4800)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    more = [f"batch_size={options.batch}", f"seed={options.seed}"]
    if options.batch > 1:
        more += ["federation.plan.optimizer=sgd", "federation.plan.lr=1"]
    setup = build_untrained(compose_run([*SETTINGS, f"victims={options.victims}", *more]))
    seen, truth = setup.observe(setup.server.state), setup.ground_truth()
    public = setup.unattacked.batch(torch.arange(min(PUBLIC, len(setup.unattacked))))
    known = {"defense": setup.defense.parts, "public_images": public.inputs, "public_labels": public.labels}
    texts = [truth.batch(one.id) for one in seen]
    longest = public.inputs.shape[1]
    own = [torch.nn.functional.pad(t.inputs[0], (0, longest - t.inputs.shape[1]), value=-1) for t in texts]
    for number, observation in enumerate(seen):
        key = {"seed": options.seed, "victim": number, "evaluations": options.evaluations}
        if options.batch > 1:
            key = {"batch": options.batch, **key}
        if kept.find(key) is not None:
            continue
        began = time.process_time()
        (found,) = LikeliestText(evaluations=options.evaluations)([observation.given(**known)], seed=0)
        used = time.process_time() - began
        if found.batch is None:
            raise SystemExit(found.failure)
        scores = [f1(found.batch.inputs, each.inputs) for each in texts]
        figures = {"f1": scores[number], "control_f1": (sum(scores) - scores[number]) / (len(scores) - 1)}
        if options.batch == 1:
            label, others = int(texts[number].labels[0]), public.inputs[:OTHERS]
            ranks = [rank(seen[k].given(**known), own[number], label, others) for k in (number, number - 1)]
            figures |= {"rank": ranks[0], "control_rank": ranks[1], "among": OTHERS + 1}
        figures["cpu_seconds"] = round(used, 1)
        print(kept.add(key, figures), flush=True)


if __name__ == "__main__":
    main()
