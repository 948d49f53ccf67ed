"""Accuracy of a model on held-out examples."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fl_privacy.data.examples import Examples
from fl_privacy.types import ModelState


@dataclass(frozen=True)
class Evaluation:
    """Share of right answers in [0, 1], mean cross entropy, and how many examples they are of."""

    accuracy: float
    loss: float
    num_examples: int


@torch.no_grad()
def evaluate_model(
    model: nn.Module,
    state: ModelState,
    examples: Examples,
    *,
    batch_size: int = 1000,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Evaluate ``state`` in eval mode on all of ``examples``."""
    model.eval()
    correct, loss = 0, 0.0
    for indices in torch.arange(len(examples)).split(batch_size):
        batch = examples.batch(indices, device)
        logits = functional_call(model, {**state.parameters, **state.buffers}, (batch.inputs,))
        correct += int((logits.argmax(1) == batch.labels).sum())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
    return Evaluation(correct / len(examples), loss / len(examples), len(examples))
