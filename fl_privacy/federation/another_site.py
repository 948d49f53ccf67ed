"""What a site of a federation sees of the others: each global model, less its own update.

Secure aggregation does not hide it, since the mean is public to all sites. With two sites, it is the other's update.
Such peer attacks: Huang et al., arXiv 2410.04661.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_privacy.federation.replies import unrounded
from fl_privacy.federation.server import Server, ServerPlan, mean_change
from fl_privacy.federation.server_optimizer import ServerSteps
from fl_privacy.types import LocalPlan, ModelState, Tensors, Upload

DETERMINED = 1e-6
"""Largest distance from 1 of a single client's share in a combination of means."""


@dataclass(kw_only=True, eq=False)
class AnotherSite:
    """Sites that pool their updates and subtract them from the global model's change.

    Attributes:
        plan: server's rule, as all sites know it; ``rest`` is called for each round, as moments last.
    """

    plan: ServerPlan
    local_plan: LocalPlan
    _steps: ServerSteps = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = ServerSteps(rule=self.plan.optimizer)

    def rest(
        self, before: ModelState, after: ModelState, own: Mapping[int, Upload], numbers: Mapping[int, int]
    ) -> Upload | None:
        """Return the weighted mean of the other participants' uploads, up to the rounding of ``after``.

        Values below the last digit of the model are zero, so that rows of absent words stay recognizable.

        Args:
            before: global model of the round.
            after: global model of the next one.
            own: uploads of the colluding sites that took part, by client.
            numbers: counted examples of each participant.

        Returns:
            Upload as if of one client, or ``None`` if nobody else took part.
        """
        sent, total = before.parameters, sum(numbers.values())
        steps = {n: (after.parameters[n].double() - t.double()) / self.plan.lr for n, t in sent.items()}
        mean, left = self._steps.mean_behind(steps), sum(numbers[c] for c in numbers.keys() - own.keys())
        if not left:
            return None
        uploads = list(own.values())
        names = [n for n, t in steps.items() if (t.any() if not uploads else all(n in u.tensors for u in uploads))]
        changes = {c: mean_change(upload, sent, self.local_plan) for c, upload in own.items()}
        rest = _less({n: mean[n] for n in names}, changes, numbers, left / total)
        # distances of neighboring numbers of the model's type
        powers = {n: torch.exp2(torch.frexp(after.parameters[n])[1].double()) for n in names}
        last = {n: torch.finfo(sent[n].dtype).eps / 2 * t / self.plan.lr * total / left for n, t in powers.items()}
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
            num_examples=left,
            rounding=float((torch.cat([t.flatten() for t in last.values()]).square().mean() / 12).sqrt()),
        )


def single_uploads(means: Sequence[tuple[Mapping[int, int], Upload]]) -> dict[int, Upload]:
    """Solve the means of rounds with different participants for single uploads, as far as they determine them.

    Exact for uploads that do not change between rounds, as of full batches at small steps; each client's are the last
    rounds that suffice (Lam et al., Gradient Disaggregation, ICML 2021, with known participants).

    Args:
        means: counted examples of the others that took part in a round, by client, and ``AnotherSite.rest`` of it.

    Returns:
        Uploads by client, without buffers, in ascending order.
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
) -> Upload:
    """Return what the sites ``own`` compute about the others if a server moves ``sent`` only by ``uploads``."""
    server = Server(state=sent, local_plan=local_plan, plan=plan, clients=list(uploads), seed=seed)
    server.receive(uploads, round)
    numbers = {client: upload.num_examples for client, upload in uploads.items()}
    site = AnotherSite(plan=plan, local_plan=local_plan)
    seen = site.rest(sent, server.state, {client: uploads[client] for client in own}, numbers)
    assert seen is not None, "there are other clients"
    return seen


def _less(
    mean: Mapping[str, Tensor], own: Mapping[int, Tensors], numbers: Mapping[int, int], share: float
) -> dict[str, Tensor]:
    total = sum(numbers.values())
    taken = {n: sum(numbers[c] / total * held[n].double() for c, held in own.items()) for n in mean}
    return {n: (t - taken[n]) / share for n, t in mean.items()}
