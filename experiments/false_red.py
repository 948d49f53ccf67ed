"""How often a run's page is red though its guesses know nothing: rows, texts and images, in batches of 1 to 64.

    python experiments/false_red.py --out experiments/rows/false_red --pages 400

A page is of six uploads for batches of 1, else of one. Guesses are other public examples, the same usual example for
all, or noise; originals are drawn from the split that is not public. Judged is as a run judges.
"""

import argparse
from dataclasses import dataclass
from functools import partial

import torch
from row_file import RowFile, takes_rows
from torch import Tensor

from fl_privacy.data import Dataset, load_data, load_table, load_text
from fl_privacy.measure import evaluate_all
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.tables import usual_row
from fl_privacy.runs.distractors import unattacked_others
from fl_privacy.runs.folder.leakage import AttackFacts
from fl_privacy.runs.folder.summary import summarize
from fl_privacy.runs.folder.verdict import LEAK, judged
from fl_privacy.types import Batch, Reconstruction, VictimId

SIZES = (1, 4, 16, 64)

UPLOADS = 6
"""Behind a page, of one example each."""

LOAD = {"adult": partial(load_table, missing="drop"), "sst2": load_text, "fashion_mnist": load_data}

GUESSES = ("public examples", "the usual example", "noise")


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """Examples, and what a page compares with."""

    data: Dataset
    others: Distractors
    text: bool
    usual: Tensor

    @classmethod
    def of(cls, name: str) -> "Kind":
        data = LOAD[name](name)
        others = unattacked_others(data.test, 1000, seed=0, name=name)
        public = data.test.batch(torch.arange(min(2000, len(data.test)))).inputs
        if others.rows is not None:
            schema = data.train.schema  # type: ignore[attr-defined]
            usual = schema.encode(usual_row(others.rows, schema)[None])[0].to(public)
        else:
            usual = public.float().mean(0) if others.texts is None else public[0]
        return cls(data=data, others=others, text=others.texts is not None, usual=usual)

    def page(self, size: int, kind: str, seed: int) -> tuple[bool, Counts]:
        """Judge a page of guesses that know nothing: whether it is red, and the counts."""
        rng = torch.Generator().manual_seed(seed)
        found, truths = [], []
        for upload in range(UPLOADS if size == 1 else 1):
            own = self.data.train.batch(torch.randint(len(self.data.train), (size,), generator=rng))
            public = self.data.test.batch(torch.randint(len(self.data.test), (size,), generator=rng))
            inputs = self._guesses(kind, public.inputs, rng)
            words = inputs[inputs >= 0].unique() if self.text else None
            batch = Batch(inputs.clone(), public.labels)
            found.append(Reconstruction(id=VictimId(upload, 1, 0), batch=batch, words=words))
            truths.append(own)
        language = getattr(self.data.train, "vocabulary", None)
        schema = getattr(self.data.train, "schema", None) if self.others.rows is not None else None
        scores = evaluate_all(found, truths, others=self.others, schema=schema, language=language)
        records = [
            {
                **{"kind": "image", "attacker": "plain", "id": str(one.id), "round": 1, "client": one.id.client},
                **{"image": image.image, **image.values, **image.compared.as_record(), "label_source": "inferred"},
                **{"certainty": image.certainty, "member": "", "attack_loss": 0.0, "failure": image.failure},
            }
            for one in scores
            for image in one.images
        ]
        summary = summarize(records, finished=True, undefended_accuracy=None, total_seconds=None)
        verdict = judged(summary, AttackFacts(attack="none", examples=(size, size)))
        return verdict.tone == LEAK, verdict.counts

    def _guesses(self, kind: str, public: Tensor, rng: torch.Generator) -> Tensor:
        if kind == "public examples":
            return public
        if kind == "the usual example":
            usual = self.usual[: public.shape[1]] if self.text else self.usual
            return usual.expand(len(public), *usual.shape)
        return self._noise(public, rng)

    def _noise(self, like: Tensor, rng: torch.Generator) -> Tensor:
        if self.text:
            most = int(self.others.texts.max()) if self.others.texts is not None else 2
            return torch.randint(most + 1, like.shape, generator=rng)
        return torch.rand(like.shape, generator=rng)


def main(arguments: argparse.Namespace) -> None:
    rows = RowFile(arguments.out)
    for name in arguments.data:
        kind = Kind.of(name)
        for size in SIZES:
            for guesses in GUESSES:
                key = {"data": name, "size": size, "guesses": guesses}
                if rows.find(key):
                    continue
                pages = -(-arguments.pages // (len(arguments.data) * len(SIZES) * len(GUESSES)))
                made = [kind.page(size, guesses, seed) for seed in range(pages)]
                figures = {
                    "pages": pages,
                    "red": sum(red for red, _ in made),
                    "read": sum(counts.read for _, counts in made),
                    "of": sum(counts.judged for _, counts in made),
                }
                print(rows.add(key, figures), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=list(LOAD), choices=list(LOAD), help="data sets")
    parser.add_argument("--pages", type=int, default=400, help="in all")
    takes_rows(parser)
    main(parser.parse_args())
