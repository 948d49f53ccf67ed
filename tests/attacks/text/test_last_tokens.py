"""The last token of a language model's text is read from the head, at whatever scale the client uploads."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import Dager
from fl_privacy.models import TextModel
from fl_privacy.models.transformers import Gpt
from fl_privacy.types import Certainty, Tensors
from tests.attacks.text.test_dager import LONGEST, VOCABULARY, language_model, observed, rows, texts

Scaling = Callable[[Tensors], Tensors]


def untied() -> TextModel:
    return Gpt(
        vocabulary_size=VOCABULARY,
        max_length=LONGEST,
        num_classes=VOCABULARY,
        width=64,
        layers=2,
        heads=2,
        hidden=64,
        next_token=True,
        tied=False,
    )


def times(factor: float) -> Scaling:
    return lambda gradient: {name: factor * value for name, value in gradient.items()}


def clipped(gradient: Tensors) -> Tensors:
    """To a length of 0.01."""
    length = float(torch.cat([value.flatten() for value in gradient.values()]).norm())
    assert length > 0.01
    return times(0.01 / length)(gradient)


@pytest.mark.parametrize("lengths", [[2], [9], [6, 4, 7], [LONGEST, 5]])
@pytest.mark.parametrize("scaling", [times(0.1), times(10.0), clipped], ids=["tenth", "ten", "clipped"])
@pytest.mark.parametrize("make", [language_model, untied])
def test_it_does_not_depend_on_the_scale(make: Callable[[], TextModel], scaling: Scaling, lengths: list[int]) -> None:
    tokens = texts(lengths)
    seen = observed(make, tokens)
    upload = replace(seen.upload, tensors=scaling(seen.upload.tensors))
    (found,) = Dager()([replace(seen, upload=upload)], seed=0)
    assert found.batch is not None and rows(found.batch.inputs) == rows(tokens)
    assert found.certainty is Certainty.PROVEN


def test_nor_do_layers_that_are_scaled_each_by_its_own_factor_change_what_is_read() -> None:
    tokens = texts([6, 4, 7])
    seen = observed(language_model, tokens)
    each = {name: 0.5 * value / value.norm().clamp_min(1e-9) for name, value in seen.upload.tensors.items()}
    (found,) = Dager()([replace(seen, upload=replace(seen.upload, tensors=each))], seed=0)
    assert found.batch is not None and rows(found.batch.inputs) == rows(tokens)
    assert found.certainty is not Certainty.PROVEN
