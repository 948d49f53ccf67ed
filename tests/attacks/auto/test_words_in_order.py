"""Words that were read are where descents begin, and are put into order by the gradient."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks.auto.other_modalities import TextMembers
from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings
from fl_privacy.attacks.gradient_inversion.settings import Space, VictimContext
from fl_privacy.attacks.text import BagOfWords
from tests.attacks.text.test_bag_of_words import changed, rounded
from tests.attacks.text.test_dager import decoder, observed, texts


def test_a_start_has_the_words_that_are_known_and_draws_the_others() -> None:
    table = torch.randn(30, 8)
    source = WordEmbeddings(table=table, first=lambda blank: torch.zeros(blank.shape), reading="nearest")
    seen = observed(decoder, texts([4])).given(previous=torch.tensor([[7, 9]]))
    blank = VictimContext(
        shape=(1, 4, 8), generator=torch.Generator(), space=Space(), observation=seen, labels=torch.tensor([0])
    )
    found = source.start(blank).reshape(1, 4, 8)
    assert torch.equal(found[:, :2], source.variables_of(torch.tensor([[7, 9]])))
    assert not bool(found[:, 2:].any())


@pytest.mark.long
def test_words_of_a_rounded_update_are_put_into_order() -> None:
    """Without the rows of positions, which tell the order, and with too little precision for spans."""
    tokens = texts([7])
    seen = changed(observed(decoder, tokens), rounded(8))
    kept = {name: g for name, g in seen.upload.tensors.items() if name != "positions.weight"}
    seen = replace(seen, upload=replace(seen.upload, tensors=kept))
    (bag,) = BagOfWords()([seen], seed=0)
    assert bag.batch is not None and set(bag.words.tolist()) <= set(tokens.flatten().tolist())
    (found,) = TextMembers(evaluations=60)([seen], seed=0, progress=lambda done, total: None)
    assert found.batch is not None

    def placed(guess: torch.Tensor) -> int:
        return int((guess[0, : tokens.shape[1]] == tokens[0, : guess.shape[1]]).sum())

    assert placed(found.batch.inputs) > placed(bag.batch.inputs)
