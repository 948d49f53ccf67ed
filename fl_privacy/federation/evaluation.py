"""Accuracy of a model on held-out examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fl_privacy.data.examples import LabelledExamples
from fl_privacy.progress import counted
from fl_privacy.types import ModelState

_NOT_ASKED = -100
"""Label of a position without a next token."""


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in [0, 1], mean cross entropy, and number of examples.

    Answers are one per example, or the next tokens of all texts.
    """

    accuracy: float
    loss: float
    num_examples: int


def mean_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Average over clients that tested their own models, equally weighted."""
    count = len(evaluations)
    return Evaluation(
        sum(e.accuracy for e in evaluations) / count,
        sum(e.loss for e in evaluations) / count,
        sum(e.num_examples for e in evaluations),
    )


@torch.no_grad()
def evaluate_model(
    model: nn.Module,
    state: ModelState,
    examples: LabelledExamples,
    *,
    batch_size: int = 200,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Evaluate ``state`` in eval mode on all of ``examples``."""
    model.eval()
    correct, asked, loss = 0, 0, 0.0
    for indices in counted("testing batch", torch.arange(len(examples)).split(batch_size)):
        batch = examples.batch(indices, device)
        logits = functional_call(model, {**state.parameters, **state.buffers}, (batch.inputs,))
        correct += int((logits.argmax(1) == batch.labels).sum())
        asked += int((batch.labels != _NOT_ASKED).sum())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum", ignore_index=_NOT_ASKED))
    return Evaluation(correct / max(1, asked), loss / max(1, asked), len(examples))
