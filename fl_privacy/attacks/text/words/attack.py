"""The words of texts as a reconstruction of its own, in order where the positions of a single text tell it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Progress, Report, no_progress
from fl_privacy.attacks.exact.certificate import model_as_sent
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.grouping import Group, attack_in_groups, failed, one_each
from fl_privacy.attacks.text.heads import next_tokens
from fl_privacy.attacks.text.lengths import Lengths
from fl_privacy.attacks.text.spans import readable_model
from fl_privacy.attacks.text.words.bag import Bag, BagReader
from fl_privacy.attacks.text.words.rows import is_text_with_words
from fl_privacy.gradients import frozen_copy
from fl_privacy.models import TextModel
from fl_privacy.types import Batch, Observation, Reconstruction

_ROWS_AT_ONCE = 1 << 27
"""Elements of rows held at a time."""

WITHHELD = (
    "A row for each token is expected, of the embeddings or of a language model's head, but none was uploaded: no words"
    " are read; attack=dager tries what enters the first block."
)


@dataclass(frozen=True, kw_only=True)
class BagOfWords:
    """Which words the texts consist of, and how often each is there: the rows of the embeddings' gradient (ours).

    Only the tokens of a batch send something to their rows. Pruning and rounding leave words that no other token can be
    mistaken for, and so do several steps of any optimizer, since what weight decay does to all rows is computed. Above
    noise a row is a word's by its likelihood under what the attacker's own simulation with the values sent says words'
    rows look like, at the scale that all rows together make likeliest. Rows of noise, drawn again from the elements of
    the upload itself, say how many words noise alone would seem to be: at most one for each text, and one in ten of
    those named. A word that is likely by its frequency alone is none. How often a word is there follows from the
    length of its row, or for a single text from the rows of the positions, of which that of its word is the sum: these
    order the words as well.

    Noise that leaves most elements alone lets more false words through. Of a language model whose embeddings are its
    output layer, too, or whose output layer alone was uploaded, words are rows that stand out by their length: under
    noise, or where the model is sure of its words, none is named, and none is called exact.

    The words of several texts are told apart by no row: they are dealt out to the texts.
    """

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """Attack all ``observations``; see :class:`fl_privacy.attacks.ReconstructionAttack`."""

        def attack(group: Group, report: Report) -> dict[int, Reconstruction]:
            first = group.first
            model = readable_model(model_as_sent(first))
            if not is_text_with_words(first):
                raise NotAttackableError(WITHHELD)
            like = next(iter(first.sent.parameters.values()))
            quick = frozen_copy(first.model, first.assumed(), first.plan, device=like.device, dtype=torch.float32)
            reader = BagReader(readable_model(quick), first, seed)
            size = max(1, _ROWS_AT_ONCE // model.words.weight.numel())
            places, found = list(group.observations), dict[int, Reconstruction]()
            for some in (places[i : i + size] for i in range(0, len(places), size)):
                seen = [group.observations[place] for place in some]
                bags = reader.read(seen)
                found |= {place: _made(o, model, bag) for place, o, bag in zip(some, seen, bags, strict=True)}
                report(len(found) / len(places))
            return found

        return attack_in_groups(observations, attack, progress=progress, as_victims=one_each)


def _made(observation: Observation, model: TextModel, bag: Bag) -> Reconstruction:
    if not len(bag.tokens):
        return failed(observation, "No row stands out of what all tokens have in common: no word was read.")
    texts = _dealt(observation, model, bag)
    labels = next_tokens(texts) if model.next_token else torch.full((len(texts),), -1)
    return Reconstruction(
        id=observation.id, batch=Batch(texts.cpu(), labels.cpu()), words=bag.all.cpu(), words_exact=bag.exact
    )


def _dealt(observation: Observation, model: TextModel, bag: Bag) -> Tensor:
    """(B, L) the words in the order that is known, or dealt to the texts."""
    if bag.ordered is not None:
        return bag.ordered[None]
    number, words = observation.upload.num_examples, bag.all
    lengths = Lengths.of(observation, model)
    even = -(-len(words) // number)
    told = [even] * number if lengths.told is None else [n + int(model.next_token) for n in lengths.told]
    texts = torch.full((number, max(told)), -1, dtype=torch.long, device=words.device)
    begin = 0
    for row, length in enumerate(told):
        part = words[begin : begin + length]
        texts[row, : len(part)] = part
        begin += length
    return texts
