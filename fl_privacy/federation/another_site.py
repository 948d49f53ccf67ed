"""Compute the mean update of the other sites from each global model and the attacking sites' own updates.

Secure aggregation does not hide this mean, since the global model is public to all sites. With two sites, the mean is
the other site's update. Peer attacks of this kind: Huang et al., arXiv 2410.04661.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fl_privacy.federation.replies import unrounded
from fl_privacy.federation.server import Server, ServerPlan, mean_change
from fl_privacy.federation.server_optimizer import ServerSteps
from fl_privacy.types import LocalPlan, ModelState, Tensors, Upload

DETERMINED = 1e-6  # largest distance from 1 of a client's share in a combination of means that counts as its upload

ALIKE, FEWEST_ALIKE, FEWEST_IN_LINE, ABOVE_ROUNDING, ONE_SIZE = 1e-3, 20, 5, 10.0, 0.9
"""Thresholds for estimating a share: relative width of a cluster of estimates, fewest values in it and in its rows or
columns, least size of a value in roundings, and least share of values that have one size after a step of Adam."""

MOST_SINGULAR = 1024  # largest shorter side of a matrix for which singular values are computed


@dataclass(kw_only=True, eq=False)
class AnotherSite:
    """Colluding sites that compute the mean update of all other sites from the global model's change."""

    plan: ServerPlan  # server's rule; since its optimizer may have moments, call ``rest`` for every round, in order
    local_plan: LocalPlan
    knows_numbers: bool = True  # ``True`` if given all numbers of examples; else sites estimate their share of a mean
    shares: list[tuple[float, str]] = field(default_factory=list, init=False)  # share, and how it was found
    _steps: ServerSteps = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = ServerSteps(rule=self.plan.optimizer)

    def rest(
        self, before: ModelState, after: ModelState, own: Mapping[int, Upload], numbers: Mapping[int, float]
    ) -> Upload | None:
        """Return the weighted mean of the other participants' uploads, up to the rounding of ``after``.

        ``before``, ``after``: global model before and after the round. ``own``: uploads of these sites, by client.
        ``numbers``: client -> examples, by which the server weights. ``None`` if nobody else took part, if the own
        uploads have no tensor in common, or if there are none and no value changed. Under SGD or momentum, values
        within the rounding error become zero, as they are for unused words.
        """
        sent, others = before.parameters, numbers.keys() - own.keys()
        steps = {n: (after.parameters[n].double() - t.double()) / self.plan.lr for n, t in sent.items()}
        mean = self._steps.mean_behind(steps)
        uploads = list(own.values())
        names = [n for n, t in steps.items() if (t.any() if not uploads else all(n in u.tensors for u in uploads))]
        if not others or not names:
            return None
        changes = {c: mean_change(upload, sent, self.local_plan) for c, upload in own.items()}
        # distances of neighboring numbers of the model's type
        powers = {n: torch.exp2(torch.frexp(after.parameters[n])[1].double()) for n in names}
        last = {n: torch.finfo(sent[n].dtype).eps / 2 * t / self.plan.lr for n, t in powers.items()}
        if not self.knows_numbers:
            plan = self.local_plan  # all clients' weight decay is the same
            shrunk = plan.lr * plan.weight_decay * (plan.shares != "gradient" and plan.optimizer != "adam")
            undone = {c: {n: one[n].double() + shrunk * sent[n] for n in names} for c, one in changes.items()}
            numbers = self._estimated({n: mean[n] + shrunk * sent[n] for n in names}, undone, last, numbers)
        total, left = sum(numbers.values()), sum(numbers[c] for c in others)
        rest = _less({n: mean[n] for n in names}, changes, numbers, left / total)
        last = {n: t * total / left for n, t in last.items()}
        if self.plan.optimizer.name in ("sgd", "momentum"):  # what is below the last digit is zero, as of absent words
            rest = {n: t.where(t.abs() > last[n], torch.zeros_like(t)) for n, t in rest.items()}
        if self.local_plan.shares == "gradient":
            rest = {n: -t for n, t in rest.items()}
        elif self.local_plan.shares == "weights":
            rest = {n: sent[n] + t for n, t in rest.items()}
        shared = after.buffers if self.local_plan.buffers == "shared" else {}
        held = uploads[0].buffers if uploads else shared
        buffers = {n: after.buffers[n].double() for n in held}
        buffers = _less(buffers, {c: upload.buffers for c, upload in own.items()}, numbers, left / total)
        buffers = {n: t if before.buffers[n].is_floating_point() else t.round() for n, t in buffers.items()}
        return Upload(
            tensors={n: t.to(sent[n].dtype) for n, t in rest.items()},
            buffers=unrounded({n: t.to(before.buffers[n].dtype) for n, t in buffers.items()}),
            num_examples=round(left),
            rounding=float((torch.cat([t.flatten() for t in last.values()]).square().mean() / 12).sqrt()),
        )

    def _estimated(
        self, mean: Tensors, changes: Mapping[int, Tensors], last: Tensors, numbers: Mapping[int, float]
    ) -> dict[int, float]:
        own, others = {c: numbers[c] for c in changes}, [c for c in numbers if c not in changes]
        total, found = sum(own.values()), (len(own) / len(numbers), "equal numbers of examples")
        if own:
            held = {n: sum(k / total * changes[c][n] for c, k in own.items()) for n in mean}
            found = estimated_share(mean, held, last) or found  # type: ignore[arg-type]
        self.shares.append(found)
        left = max(len(others), round(total / found[0]) - total) if own else len(others)
        return own | dict.fromkeys(others, left / len(others))


def estimated_share(mean: Tensors, own: Tensors, last: Tensors) -> tuple[float, str] | None:
    """Estimate the share p in (0, 1) of the attacker's update in the round's mean; return p and a phrase on the method.

    ``mean`` is p ``own`` + (1 - p) rest; ``last``: its rounding errors. Three ways are tried; ``None`` if none works.

    1. After one step of Adam, mean / own is 2p - 1 at its smallest, where all other updates have the opposite sign.
    2. Rows and columns that only the examples of ``own`` change, as of unique words, have the ratio p at each value.
    3. If a layer of ``mean`` has less than full rank, its pseudoinverse times ``own`` has the eigenvalue 1 / p.
    """
    if (share := _share_by_signs(mean, own, last)) is not None:
        return share, "the other sign's values"
    layers = [n for n in own if own[n].dim() > 1]
    ratios = torch.cat([torch.empty(0), *(_alike_in_lines(mean[n], own[n], last[n]) for n in layers)])
    ratios = ratios[(ratios > ALIKE) & (ratios < 1 - ALIKE)].sort().values
    up, down = (torch.searchsorted(ratios, ratios * (1 + sign * ALIKE)) for sign in (1, -1))
    if len(ratios) and int((near := up - down).max()) >= FEWEST_ALIKE:
        return float(ratios[near.argmax()]), "values that its examples alone change"
    found = [p for n in layers if (p := _share_by_rank(mean[n], own[n], last[n])) is not None]
    return (found[0], "a layer's rank") if found else None


def _share_by_signs(mean: Tensors, own: Tensors, last: Tensors) -> float | None:
    part, whole, off = (torch.cat([t[n].flatten() for n in own]) for t in (own, mean, last))
    sizes = part.abs()
    full = (sizes > (1 - ALIKE) * sizes.max()) & (sizes > off / ALIKE)
    if int(full.sum()) < max(FEWEST_ALIKE, ONE_SIZE * int((sizes > 0).sum())):
        return None
    ratios = (whole / part)[full].sort().values
    least = float(ratios[:FEWEST_ALIKE].median())
    alike = ratios[FEWEST_ALIKE - 1] - ratios[0] < ALIKE and abs(float(ratios[-1]) - 1) < ALIKE
    return (1 + least) / 2 if alike and -1 + ALIKE < least < 1 - ALIKE else None


def _alike_in_lines(mean: Tensor, own: Tensor, last: Tensor) -> Tensor:
    """Return the ratios ``mean`` / ``own`` of rows and columns with a constant ratio; ``last``: rounding errors."""
    whole, part = mean.flatten(1), own.flatten(1)
    ratios, found = (whole / part).where(whole.abs() > last.flatten(1) / ALIKE, torch.nan), []
    for lines in (ratios, ratios.T):
        usual, number = lines.nanmedian(1, keepdim=True).values, (~lines.isnan()).sum(1)
        alike = ((lines / usual - 1).abs() < ALIKE).sum(1)
        found.append(lines[(number >= FEWEST_IN_LINE) & (alike == number)].flatten())
    values = torch.cat(found)
    return values[~values.isnan()]


def _share_by_rank(mean: Tensor, own: Tensor, last: Tensor) -> float | None:
    whole, part = mean.flatten(1), own.flatten(1)
    if min(whole.shape) > MOST_SINGULAR or not part.any():
        return None
    left, sizes, right = torch.linalg.svd(whole, full_matrices=False)
    kept = sizes > ABOVE_ROUNDING * float(last.max()) * sum(side**0.5 for side in whole.shape)
    inside = left[:, kept].T @ part @ right[kept].T
    outside = float((part - left[:, kept] @ inside @ right[kept]).norm()) / float(part.norm())
    if kept.all() or outside > ALIKE:
        return None
    own_rank = int((torch.linalg.svdvals(inside) > ALIKE**2 * float(part.norm())).sum())
    values = torch.linalg.eigvals(inside / sizes[kept, None]).abs().sort(descending=True).values[:own_rank]
    near = values[(values / values.median() - 1).abs() < ALIKE]
    share = 1 / float(near.mean())
    return share if 2 * len(near) > own_rank and ALIKE < share < 1 - ALIKE else None


def single_uploads(means: Sequence[tuple[Mapping[int, int], Upload]]) -> dict[int, Upload]:
    """Solve for the uploads of single clients, given the means of rounds with different participants.

    Return, by client, the uploads that the means determine (Lam et al., Gradient Disaggregation, ICML 2021, with known
    participants), from as few of the last rounds as suffice. They are exact if uploads do not change between rounds.

    ``means``: for each round, the numbers of examples of all participants but the attacker, and their mean upload.
    """
    clients = sorted({client for numbers, _ in means for client in numbers})
    shares = [[numbers.get(client, 0) / sum(numbers.values()) for client in clients] for numbers, _ in means]
    found: dict[int, Upload] = {}
    for first in reversed(range(len(means))):
        weights, uploads = torch.tensor(shares[first:]).double(), [upload for _, upload in means[first:]]
        solved = torch.linalg.pinv(weights)
        determined = (solved @ weights).diagonal() > 1 - DETERMINED
        names = [name for name in uploads[-1].tensors if all(name in upload.tensors for upload in uploads)]
        for client, factors, alone in zip(clients, solved, determined.tolist(), strict=True):
            if not alone or client in found:
                continue
            sums = {n: sum(f * u.tensors[n].double() for f, u in zip(factors, uploads, strict=True)) for n in names}
            number = next(numbers[client] for numbers, _ in reversed(means) if client in numbers)
            off = sum(float(f * u.rounding) ** 2 for f, u in zip(factors, uploads, strict=True)) ** 0.5
            tensors = {n: torch.as_tensor(t).to(uploads[-1].tensors[n]) for n, t in sums.items()}
            found[client] = Upload(tensors=tensors, num_examples=number, rounding=off)
    return dict(sorted(found.items()))


def seen_by_sites(
    sent: ModelState,
    uploads: Mapping[int, Upload],
    own: Collection[int],
    plan: ServerPlan,
    local_plan: LocalPlan,
    *,
    round: int = 1,
    seed: int = 0,
    knows_numbers: bool = True,
) -> Upload:
    """Return the other clients' mean upload, as the colluding clients ``own`` compute it from the new global model.

    They know the model ``sent`` and, among ``uploads``, their own. ``knows_numbers``: see :class:`AnotherSite`.
    """
    plan = replace(plan, norm_factor=math.inf)
    server = Server(state=sent, local_plan=local_plan, plan=plan, clients=list(uploads), seed=seed)
    server.receive(uploads, round)
    numbers = {client: upload.num_examples for client, upload in uploads.items()}
    site = AnotherSite(plan=plan, local_plan=local_plan, knows_numbers=knows_numbers)
    seen = site.rest(sent, server.state, {client: uploads[client] for client in own}, numbers)
    assert seen is not None, "there are other clients"
    return seen


def _less(
    mean: Mapping[str, Tensor], own: Mapping[int, Tensors], numbers: Mapping[int, float], share: float
) -> dict[str, Tensor]:
    total = sum(numbers.values())
    taken = {n: sum(numbers[c] / total * held[n].double() for c, held in own.items()) for n in mean}
    return {n: (t - taken[n]) / share for n, t in mean.items()}
