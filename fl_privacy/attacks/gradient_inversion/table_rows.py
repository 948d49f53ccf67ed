"""Rows of a table as variables, and pooled attempts (TabLeak, Vero et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fl_privacy.attacks.gradient_inversion.starts import Blank, NextSource, Shape
from fl_privacy.attacks.gradient_inversion.table_evidence import Evidence, evidence_of
from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.generator import Provenance
from fl_privacy.types.schema import Schema

_RARE = 1e-4
"""Least share of a category in a first guess."""

_FAR = -1e9
"""Logit that pads columns with fewer categories than the largest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRows:
    """Rows (V, B, F) from free variables: a softmax over each column's categories, and bounded numbers.

    Attributes:
        bounded: ``True`` computes numbers by a sigmoid between the schema's bounds.
        counted: ``True`` leaves out categories that no row has, and starts from the others' counts
            (:mod:`fl_privacy.attacks.gradient_inversion.table_evidence`).
        spread: standard deviation of the first variables of categories.
    """

    schema: Schema
    bounded: bool = True
    counted: bool = True
    spread: float = 1.0
    stages: int = 1

    def size(self, shape: Shape) -> int:
        return int(torch.Size(shape).numel())

    def start(self, blank: Blank) -> Tensor:
        schema, numbers = self.schema, self.schema.number_values
        drawn = self.spread * torch.randn(tuple(blank.shape), generator=blank.generator)
        middle = self._middles(blank)
        categories = torch.ones(schema.width, dtype=torch.bool)
        categories[numbers] = False
        drawn[..., categories] += middle[..., categories].clamp_min(_RARE).log()
        low, high = schema.bounds
        bounded = (low + high).isfinite() if self.bounded else torch.zeros_like(low, dtype=torch.bool)
        # so that the numbers themselves are normal: a column of rare large values does not start in its middle
        own = middle[..., numbers] + drawn[..., numbers]
        inside = ((own - low) / (high - low).clamp_min(1e-6)).clamp(0.01, 0.99).logit()
        drawn[..., numbers] = torch.where(bounded, inside, own)
        return drawn.flatten()

    def _middles(self, blank: Blank) -> Tensor:
        """Return shares of categories and means of numbers, (B, F) or (F,)."""
        schema, found = self.schema, self._evidence(blank)
        if found is None:
            return schema.usual
        labels = blank.labels
        if labels is None or labels.dim() != 1 or labels.is_floating_point():
            return found.shares.mean(0)
        return found.shares[labels.cpu()]

    def _evidence(self, blank: Blank) -> Evidence | None:
        if not self.counted:
            return None
        classes, size = blank.observation.num_classes, blank.observation.upload.num_examples
        counts = [size / classes] * classes
        if blank.labels is not None:
            rows = blank.labels if blank.labels.is_floating_point() else one_hot(blank.labels.long(), classes)
            counts = rows.float().sum(0).tolist()
        return evidence_of(blank.observation, self.schema, tuple(counts))

    def held(self, blank: Blank) -> Tensor:
        """Return a mask (F,), 0 for categories that no row has."""
        found = self._evidence(blank)
        return torch.ones(self.schema.width) if found is None else found.present.float()

    def images(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return the rows (V, B, F) as a model takes them."""
        return self.rows(variables.reshape(-1, *shape), held)

    def rows(self, free: Tensor, held: Tensor) -> Tensor:
        """Turn free variables (V, B, F) into rows, of categories that ``held`` (V, F) allows."""
        schema = self.schema
        places, there = (each.to(free.device) for each in schema.groups)
        found = free
        if len(places):
            allowed = there & (held[:, places] > 0)
            logits = torch.where(allowed[:, None], free[..., places], _FAR)
            shares = logits.softmax(-1).flatten(-2)[..., there.flatten()]
            found = found.index_copy(-1, places[there], shares)
        standard = (found - schema.shift.to(free)) / schema.scale.to(free)
        numbers = schema.number_values.to(free.device)
        if not len(numbers):
            return standard
        own = free[..., numbers]
        if self.bounded:
            low, high = schema.bounds.to(free)
            limited = low + (high - low) * own.sigmoid()
            own = torch.where((low + high).isfinite(), limited, own)
        return standard.index_copy(-1, numbers, own)

    def penalty(self, variables: Tensor, shape: Shape) -> Tensor:
        return variables.new_zeros(len(variables))

    def confined(self, variables: Tensor, held: Tensor, shape: Shape) -> Tensor:
        return variables

    def following(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> NextSource | None:
        return None

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        return None


def costs(schema: Schema, cells: Tensor, others: Tensor) -> Tensor:
    """Count the cells in which rows of ``cells`` (..., B, C) and of ``others`` differ, (..., B, B)."""
    apart = (cells[..., :, None, :] - others[..., None, :, :]).abs()
    return (apart > schema.tolerances.to(cells)).sum(-1).double()


def assigned(cost: Tensor) -> Tensor:
    """Assign a column (B,) to each row of ``cost`` (B, B), with the least sum."""
    if len(cost) == 1:
        return torch.zeros(1, dtype=torch.long)
    try:
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415
    except ImportError as error:
        raise UserError("Matching rows needs scipy, which is not installed; run `pip install scipy`.") from error
    return torch.as_tensor(linear_sum_assignment(cost.numpy())[1])


@dataclass(frozen=True, eq=False)
class Pooled:
    """The common result of many attempts at the same rows.

    Attributes:
        rows: (B, F) as a model takes them.
        certainty: (B, C) in [0, 1]: 1 less the entropy of a cell over the attempts, as a share of the largest.
    """

    rows: Tensor
    certainty: Tensor

    def certainty_of(self, rows: Tensor, schema: Schema) -> Tensor:
        """Return the certainty (B, C) in the order of ``rows`` (B, F)."""
        return self.certainty[assigned(costs(schema, schema.cells(rows), schema.cells(self.rows)))]


def pool(schema: Schema, attempts: Tensor, losses: Tensor, labels: Tensor | None = None) -> Pooled:
    """Return the median of attempts whose rows were put into the best one's order (TabLeak, section 4.1).

    Args:
        attempts: (R, B, F) as a model takes them.
        losses: (R,).
        labels: labels (R, B) of the rows, which are exchanged within a class only.
    """
    order = losses.argsort()
    attempts = attempts[order]
    cells = schema.cells(attempts)
    cost = costs(schema, cells[:1], cells)
    apart = torch.cdist(attempts[:1].double(), attempts.double(), p=1) / schema.width
    if labels is not None and labels.dim() == 2:
        own = labels[order]
        cost = cost + 2.0 * len(schema.columns) * (own[:1, :, None] != own[:, None, :])
    aligned = torch.stack([own[assigned(each)] for own, each in zip(attempts, cost + 0.1 * apart, strict=True)])
    raw = schema.raw(aligned.double())
    middle = raw.median(0).values
    rows = schema.nearest(((middle - schema.shift.double()) / schema.scale.double()).float())
    return Pooled(rows, _certainty(schema, raw, aligned))


def _certainty(schema: Schema, raw: Tensor, aligned: Tensor) -> Tensor:
    """Return the certainty (B, C) of attempts (R, B, F) in one order."""
    found = raw.new_zeros(raw.shape[1], len(schema.columns))
    places, there = schema.groups
    if len(places):
        shares = torch.where(there, raw[..., places], 0.0).clamp_min(0).mean(0)
        shares = shares / shares.sum(-1, keepdim=True).clamp_min(1e-12)
        entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1)
        found[:, ~schema.numbers] = 1 - entropy / there.sum(-1).double().clamp_min(2).log()
    cells = schema.cells(aligned)[..., schema.numbers]
    near = (cells - cells.median(0).values).abs() <= schema.tolerances[schema.numbers]
    found[:, schema.numbers] = near.double().mean(0)
    return found.clamp(0, 1)
