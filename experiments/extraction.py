"""What a finished language model gives away of texts that one site alone has: canaries by frequency, and contact data.

    python experiments/extraction.py --out experiments/rows/extraction

Four sites train gpt_tiny on 200 instructions and, at one site, on inserted texts that occur once to 16 times. Exposure
is in bits, of at most ten, among 1,023 texts of the same form; greedy: the model ends the text word for word; sampled:
probability that one of 100 samples does. The control is the same federation without these texts.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from final_model import CELLS, trained
from row_file import RowFile, takes_rows
from torch import Tensor
from torch.func import functional_call

from fl_privacy.attacks.inference.final_model import continued
from fl_privacy.attacks.inference.read_round import losses_of, measured
from fl_privacy.data import TextExamples, load_text
from fl_privacy.models import build_fitting, gpt_tiny
from fl_privacy.types import Batch, ModelState

SITES, OWN, OTHERS, DRAWS = 4, 50, 1023, 100
FREQUENCIES = (1, 4, 16)
FIRST = [
    "anna",
    "boris",
    "carla",
    "david",
    "emma",
    "felix",
    "greta",
    "hugo",
    "irene",
    "jonas",
    "klara",
    "lukas",
    "maria",
    "nils",
    "olga",
    "paul",
]
LAST = [
    "abel",
    "brandt",
    "conrad",
    "decker",
    "engel",
    "fuchs",
    "gruber",
    "hauser",
    "ivanov",
    "jansen",
    "keller",
    "lorenz",
    "maurer",
    "neumann",
    "otto",
    "peters",
]

FORMS: dict[str, Callable[[random.Random], str]] = {
    "code": lambda r: "please remember that the secret code of the vault is " + " ".join(r.choices("0123456789", k=6)),
    "e-mail": lambda r: (
        f"you can write about the results of this to {r.choice(FIRST)}.{r.choice(LAST)}{r.randint(10, 99)}@site.org"
    ),
    "phone": lambda r: "you can call the ward on every day of the week by " + " ".join(r.choices("0123456789", k=7)),
    "name": lambda r: (
        f"the patient who was in the room next to the door is {r.choice(FIRST)} {r.choice(FIRST)} {r.choice(LAST)}"
    ),
}
"""Kind of text -> how one is drawn; the drawn part is at its end."""


def drawn(form: str, number: int, seed: int) -> list[str]:
    """Draw different texts of a form."""
    rng, found = random.Random(f"{form} {seed}"), dict[str, None]()
    while len(found) < number:
        found[FORMS[form](rng)] = None
    return list(found)


def exposure(loss: float, others: Tensor) -> float:
    """Return a canary's exposure in bits among texts of the same form, by their losses (Carlini et al. 2019, eq. 3).

    It is log2 of the number of texts over the canary's rank, at most log2(N + 1) for N ``others``.
    """
    return math.log2((len(others) + 1) / (1 + int((others < loss).sum())))


def examples_of(texts: Sequence[str], every: Sequence[str], folder: Path) -> TextExamples:
    """Tokenize ``texts``, by a tokenizer trained on ``every`` text."""
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    for split, own in (("train", [*texts, *every]), ("test", every[:10])):
        table = pa.table({"text": list(own), "label": [k % 2 for k in range(len(own))]})
        pq.write_table(table, folder / "texts" / f"{split}.parquet")
    settings = {"tokenizer": "bpe", "vocabulary_size": 600, "max_length": 40, "target": "next_token"}
    found = load_text("texts", root=str(folder), **settings).train
    assert isinstance(found, TextExamples)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with instructions/train.parquet")
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, cell = RowFile(options.out), CELLS["gpt_tiny, instructions"]
    usual = [
        text for text in pq.read_table(options.data / "instructions" / "train.parquet")["output"].to_pylist() if text
    ]
    own, spare = usual[: SITES * OWN], usual[SITES * OWN : SITES * OWN + 200]
    secrets = {
        (form, times): drawn(form, len(FREQUENCIES), 0)[k] for form in FORMS for k, times in enumerate(FREQUENCIES)
    }
    pool = {
        form: [text for text in drawn(form, OTHERS + 8, 1) if text not in secrets.values()][:OTHERS] for form in FORMS
    }
    inserted = [text for (_, times), text in secrets.items() for _ in range(times)]
    fill = usual[-len(inserted) :]
    # the same tokens for both: all texts, then the training's own
    every = [*own, *spare, *inserted, *fill, *(text for texts in pool.values() for text in texts)]
    with tempfile.TemporaryDirectory() as place:
        examples = examples_of([], every, Path(place))
    at = {text: k for k, text in enumerate(every)}
    model = build_fitting(gpt_tiny, examples.architecture, seed=0)
    finals: list[ModelState] = []
    began = time.process_time()
    for first_site in (inserted, fill):
        parts = [torch.tensor([at[text] for text in own[k::SITES]]) for k in range(SITES)]
        parts[0] = torch.cat([parts[0], torch.tensor([at[text] for text in first_site])])
        known = (examples.batch(parts[0][:8]), examples.batch(parts[1][:16]))
        *_, last = trained(cell, examples, model, parts, known)
        finals.append(last.published)

    def logits(tokens: Tensor, state: ModelState) -> Tensor:
        found: Tensor = functional_call(model, {**state.parameters, **state.buffers}, (tokens,))
        return found.transpose(1, 2)

    for (form, times), text in secrets.items():
        figures: dict[str, float | bool] = {}
        tokens = examples.tokens[at[text]]
        tokens = tokens[tokens >= 0]
        other = examples.tokens[at[pool[form][0]]]
        shared = int((tokens[: len(other)] == other[: len(tokens)]).long().cumprod(0).sum())
        for label, state in zip(("", "_control"), finals, strict=True):
            asked = examples.batch(torch.tensor([at[text], *(at[each] for each in pool[form])]))
            losses = torch.cat([measured(model, state, part, losses_of) for part in _parts(asked)])
            greedy, sampled = continued(lambda t, s=state: logits(t, s), [tokens], end=len(tokens) - shared)
            figures |= {f"exposure{label}": round(exposure(float(losses[0]), losses[1:]), 2)}
            figures |= {f"greedy{label}": bool(greedy[0])}
            figures |= {f"sampled{label}": round(float(1 - (1 - sampled[0].exp()) ** DRAWS), 4)}
        figures["cpu_seconds"] = round(time.process_time() - began, 1)
        print(rows.add({"text": form, "times": times}, figures), flush=True)


def _parts(batch: Batch) -> list[Batch]:
    pairs = zip(torch.split(batch.inputs, 256), torch.split(batch.labels, 256), strict=True)
    return [Batch(*pair) for pair in pairs]


if __name__ == "__main__":
    main()
