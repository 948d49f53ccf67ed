"""Texts that clients learn by heart are told from others, by each update and by the final model; strangers' are not."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from fl_privacy.attacks.inference import Membership, ReadRound
from fl_privacy.attacks.inference.final_model import ByReferences
from fl_privacy.attacks.inference.membership import METHODS
from fl_privacy.attacks.inference.read_round import losses_of, lowest_of, margins_of
from fl_privacy.defenses import ClientState, none
from fl_privacy.errors import UserError
from fl_privacy.federation import local_update
from fl_privacy.federation.client import local_batches
from fl_privacy.measure.roc import Separation, auc
from fl_privacy.models import gpt_tiny
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, VictimId
from tests.inference.rounds import asked as pictures, rounds

CLIENTS, OWN, OTHERS, WORDS, LENGTH = (0, 3), 12, 24, 60, 8
PLAN = LocalPlan(shares="delta", lr=0.3, epochs=6, batch_size=4)


@cache
def asked(seed: int = 3, number: int = len(CLIENTS) * OWN + OTHERS) -> Batch:
    """Make texts of two clients, and others, of different lengths."""
    rng = derive_generator(seed, "asked")
    tokens = torch.randint(WORDS, (number, LENGTH), generator=rng)
    lengths = torch.randint(4, LENGTH + 1, (number, 1), generator=rng)
    tokens = tokens.masked_fill(torch.arange(LENGTH) >= lengths, -1)
    follows = F.pad(tokens[:, 1:], (0, 1), value=-1)
    return Batch(tokens, follows.masked_fill(follows < 0, -100))


@cache
def read(first: int = 0) -> tuple[ReadRound, ...]:
    """Make three rounds in which each client trains on its own texts, counted from ``first``."""
    torch.manual_seed(0)
    model = gpt_tiny(vocabulary_size=WORDS, max_length=LENGTH, num_classes=WORDS, next_token=True).eval()
    sent, found = ModelState.of(model), []
    for round in range(1, 4):
        replies = []
        for place, client in enumerate(CLIENTS):
            rows = slice(first + place * OWN, first + (place + 1) * OWN)
            own = Batch(asked().inputs[rows], asked().labels[rows])
            order = local_batches(OWN, PLAN, derive_generator(5, round, client))
            result = local_update(
                model, sent, [Batch(own.inputs[i], own.labels[i]) for i in order], num_examples=OWN, plan=PLAN,
                defense=none(), state=ClientState(), rng=derive_generator(6), private_rng=derive_generator(7),
            )  # fmt: skip
            replies.append(
                Observation(
                    id=VictimId(round, client), model=model, sent=sent, upload=result.upload, plan=PLAN.in_round(round),
                    input_shape=(LENGTH,), num_classes=WORDS,
                )
            )  # fmt: skip
        made = ReadRound(observations=tuple(replies), candidates=asked(), remaining=3 - round, seed=0)
        sent = made.published
        found.append(made)
    return tuple(found)


@cache
def answers(names: tuple[str, ...], first: int = 0) -> dict[str, torch.Tensor]:
    """Ask by all ``names`` at once, which train reference models together."""
    watch = Membership(methods=names, shadows=12).begin(len(asked()), CLIENTS, WORDS)
    for one in read(first):
        watch.add(replace(one, public=asked(4, 64) if METHODS[names[0]] in BY_REFERENCES else None))
    return watch.answers()


def told(found: torch.Tensor) -> float:
    """Return the AUC of the texts that clients have in ``read()``, whatever they trained on."""
    assert bool(found.isfinite().all())
    members = torch.cat([found[k * OWN : (k + 1) * OWN, k] for k in range(len(CLIENTS))])
    return auc(Separation(positives=members.numpy(), negatives=found[len(CLIENTS) * OWN :].flatten().numpy())).value


BY_REFERENCES = [method for method in METHODS.values() if issubclass(method, ByReferences)]
OF_TWO = [name for name in METHODS if not name.startswith(("fedmia", "gradient_norm"))]
"""Methods that need no third client; lengths of gradients tell texts of different lengths apart, no members."""


@pytest.mark.parametrize("name", OF_TWO)
def test_texts_that_were_learned_are_told_from_others(name: str) -> None:
    alike = tuple(each for each in OF_TWO if (METHODS[each] in BY_REFERENCES) == (METHODS[name] in BY_REFERENCES))
    assert told(answers(alike)[name]) > 0.75


BLIND = ("loss", "min_k", "cosine", "final_loss", "final_reference", "final_min_k")


@pytest.mark.parametrize("name", BLIND)
def test_clients_of_other_texts_tell_nothing_of_these(name: str) -> None:
    """The control: the same question about the same texts, where clients learned half of the others."""
    assert told(answers(BLIND, first=len(CLIENTS) * OWN)[name]) < 0.6


def test_methods_of_tokens_are_left_out_where_none_is_predicted() -> None:
    watch = Membership(methods=("loss", "min_k")).begin(len(pictures()), (0, 3, 4, 7), 4)
    watch.add(rounds(1)[0])
    assert set(watch.answers()) == {"loss"}
    with pytest.raises(UserError, match="next_token"):
        Membership(methods=("min_k",)).begin(len(pictures()), (0, 3, 4, 7), 4).add(rounds(1)[0])


def test_a_text_counts_by_the_tokens_that_follow_alone() -> None:
    """Against one text at a time without its end."""
    rng = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 9, 5, generator=rng), torch.randint(9, (3, 5), generator=rng)
    labels[0, 3:], labels[2, 1:] = -100, -100
    for row, length in enumerate((3, 5, 1)):
        alone = logits[row : row + 1, :, :length], labels[row : row + 1, :length]
        p = alone[0].softmax(1).gather(1, alone[1][:, None])[0, 0]
        torch.testing.assert_close(losses_of(logits, labels)[row], -p.log().mean())
        torch.testing.assert_close(margins_of(logits, labels)[row], (p / (1 - p)).log().mean())
        torch.testing.assert_close(lowest_of(logits, labels)[row], p.log().min())
