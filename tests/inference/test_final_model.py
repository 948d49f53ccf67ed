"""Membership by the models that every participant gets."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_privacy.attacks.inference import Membership
from fl_privacy.attacks.inference.final_model import BY_REFERENCES, continued, rmia
from fl_privacy.attacks.inference.membership import METHODS
from fl_privacy.measure.roc import Separation, auc
from fl_privacy.types import Batch
from tests.inference.rounds import CLASSES, CLIENTS, OWN, asked, public, rounds

OF_OTHERS = json.loads((Path(__file__).parent / "rmia_scores.json").read_text())
NAMES = [f"{models}_{name}" for models in ("final", "rounds") for name in BY_REFERENCES]


@pytest.mark.parametrize("scores", [name for name in OF_OTHERS if name != "made by"])
def test_rmia_gives_the_scores_of_privacy_meter_and_leakpro(scores: str) -> None:
    rng = np.random.default_rng(7)
    x, z = (torch.from_numpy(1 / (1 + np.exp(-rng.normal(0.5, 2, (number, 5))))) for number in (60, 400))
    _, number, gamma = (*scores.removeprefix("privacy_").split("_"), "1")[:3]
    usual, usual_z = (values[:, 1 : 1 + int(number)].mean(1) for values in (x, z))
    found = rmia(x[:, 0], usual, z[:, 0], usual_z, gamma=float(gamma))
    np.testing.assert_allclose(found.numpy(), OF_OTHERS[scores], atol=1e-6)


def answers(candidates: Batch, first: int = 0) -> dict[str, torch.Tensor]:
    watch = Membership(methods=NAMES).begin(len(candidates), CLIENTS, CLASSES)
    for read in rounds(4)[first:]:
        remaining = 4 - read.round
        watch.add(replace(read, candidates=candidates, remaining=remaining))
    return dict(watch.answers())


def test_the_final_model_tells_members_from_others_and_not_strangers() -> None:
    members = len(CLIENTS) * OWN
    rng = torch.Generator().manual_seed(8)
    shape = asked().inputs[:members].shape
    strangers = Batch(torch.rand(shape, generator=rng), torch.randint(CLASSES, shape[:1], generator=rng))
    others = Batch(asked().inputs[members:], asked().labels[members:])
    asked_of_strangers = Batch(
        torch.cat([strangers.inputs, others.inputs]), torch.cat([strangers.labels, others.labels])
    )
    for candidates, is_member in ((asked(), True), (asked_of_strangers, False)):
        for name, scores in answers(candidates).items():
            assert torch.equal(scores[:, 0], scores[:, 1]), "the model is the same for all clients"
            own = scores[:, 0].numpy()
            found = auc(Separation(positives=own[:members], negatives=own[members:]))
            assert (found.low > 0.5) if is_member else (found.low < 0.5 < found.high), (name, found)


def test_reference_models_that_would_begin_with_a_trained_model_are_not_made() -> None:
    assert all(bool(scores.isnan().all()) for scores in answers(asked(), first=1).values())


def test_stacked_signals_need_two_reference_models_and_all_methods_need_examples() -> None:
    one = Membership(methods=NAMES, references=1).begin(len(asked()), CLIENTS, CLASSES)
    none = Membership(methods=NAMES).begin(len(asked()), CLIENTS, CLASSES)
    read = replace(rounds(1)[0], remaining=0)
    one.add(read)
    none.add(replace(read, public=Batch(public().inputs[:9], public().labels[:9])))
    for name, scores in one.answers().items():
        assert bool(scores.isnan().all()) == name.endswith("stacked")
    assert all(bool(scores.isnan().all()) for scores in none.answers().values())


def test_methods_with_reference_models_are_asked_for_by_name() -> None:
    assert not set(NAMES) & set(Membership().methods) and set(NAMES) < set(METHODS)


def test_a_text_is_continued_if_each_next_word_of_its_end_is_the_likeliest() -> None:
    """A model that knows one text by heart, by its last token, against sampling by hand."""
    text, other = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6]), torch.tensor([3, 1, 4, 0, 5, 2, 9, 6])

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(*tokens.shape, 10)
        for place, token in enumerate(tokens[0].tolist()):
            found[0, place, int(text[(text == token).nonzero()[0, 0] + 1]) if token != 6 else 0] = 2.0
        return found

    greedy, sampled = continued(logits, [text, other, text[:7]])
    assert greedy.tolist() == [True, False], "a text of seven tokens is too short"
    each = float(torch.tensor([2.0] + [0.0] * 9).softmax(0)[0])
    assert math.isclose(float(sampled[0].exp()), each**4, rel_tol=1e-5) and sampled[1] < sampled[0]
