"""The rows of an upload that belong to tokens: which of them are those of a token that is in no text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fl_privacy.attacks.text.heads import head_of
from fl_privacy.gradients.unrolled import step_direction, step_slices
from fl_privacy.models import TextModel
from fl_privacy.types import LocalPlan, Observation, Tensors

Where = Literal["embeddings", "head", "tied"]
"""Whose rows: the embeddings', those of a language model's head, or those of one matrix that is both."""

_ULPS = 4.0
"""Roundings of a weight in single precision that a row may be off by, in each local step, and still be untouched."""


@dataclass(frozen=True, eq=False)
class WordRows:
    """What uploads say of each token.

    Attributes:
        values: (n, V, d) the row of each token of n victims, without what one that is in no text has, with the sign of
            a gradient, in the units of the upload.
        untouched: (n, V) whether it is exactly, but for rounding, that of a token which is in no text.
        where: whose rows they are.
    """

    values: Tensor
    untouched: Tensor
    where: Where

    def of(self, number: int) -> "WordRows":
        """Those of one victim, as n = 1."""
        return replace(self, values=self.values[number, None], untouched=self.untouched[number, None])


def where_words_are(model: TextModel, uploaded: Tensors) -> tuple[str, Where] | None:
    """Name of the uploaded tensor that has a row for each token, and what it is; ``None`` where none was uploaded."""
    head = head_of(model) if model.next_token else None
    if model.word_weight in uploaded:
        return model.word_weight, "tied" if head is not None and head[0] == model.word_weight else "embeddings"
    if head is not None and head[0] in uploaded:
        return head[0], "head"
    return None


@torch.no_grad()
def word_rows(observations: Sequence[Observation], name: str, where: Where) -> WordRows:
    """The rows of the tensor ``name`` in updates with one plan and one model.

    Weight decay moves every row, of a token that is in no text by nothing else: that is computed and taken off. One
    matrix that is both embeddings and head, or a head, also has what the model expects of each token; for most tokens
    it is the same and next to nothing, hence the median row is taken off. So it is where all rows that do not count
    are rounded to the same one that is not zero.
    """
    first = observations[0]
    sent, plan = first.sent.parameters[name].float(), first.plan
    updates = torch.stack([observation.update()[name].to(sent.device).float() for observation in observations])
    rounding = torch.zeros_like(sent)
    if plan.shares != "gradient":
        steps = len(step_slices(first.upload.num_examples, plan))
        idle = decayed(sent, plan, steps) - sent
        updates = idle - updates
        rounding = _ULPS * steps * torch.finfo(torch.float32).eps * (sent.abs() + idle.abs())
        if not plan.weight_decay and plan.shares == "delta":
            rounding = torch.zeros_like(sent)
    usual = updates.median(1, keepdim=True).values
    untouched = ((updates - usual).abs() <= rounding).all(2)
    mostly = untouched.float().mean(1) > 0.5
    off = usual if where != "embeddings" else usual * mostly[:, None, None]
    return WordRows(updates - off, untouched & mostly[:, None], where)


def decayed(rows: Tensor, plan: LocalPlan, steps: int) -> Tensor:
    """What ``steps`` of the client's optimizer make of ``rows`` by weight decay alone."""
    if not plan.weight_decay:
        return rows
    moments: list[Tensors] = [{}, {}]
    for number in range(1, steps + 1):
        slope = torch.zeros_like(rows) if plan.optimizer == "adamw" else plan.weight_decay * rows
        direction, moments = step_direction({"": slope}, moments, plan, number)
        shrunk = rows * (1 - plan.lr * plan.weight_decay) if plan.optimizer == "adamw" else rows
        rows = shrunk - plan.lr * direction[""]
    return rows


def is_text_with_words(observation: Observation) -> bool:
    """Whether ``observation`` is of texts, and a tensor with a row for each token was uploaded."""
    model: nn.Module = observation.model
    return isinstance(model, TextModel) and where_words_are(model, observation.upload.tensors) is not None
