"""Compute what another site observes of a training."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Round, Server, ServerPlan
from fl_privacy.federation.another_site import AnotherSite, seen_by_sites, single_uploads
from fl_privacy.federation.interception import Interceptor
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.runs.setup import Setup
from fl_privacy.types import ModelState, Observation, Upload, VictimId

logger: logging.Logger = logging.getLogger(__name__)

SUMMED = 0  # client id of an update that is the sum of the other sites'
MOST_BY_SITES = 4  # maximum number of an audit's uploads that another site also attacks

SITE_NOTE = (
    "Another site receives each global model, knows the weights of the mean, and subtracts its own update. Secure"
    " aggregation does not prevent this. Noise that the server adds to the mean does."
)


def look_from_site(
    setup: Setup, server: Server, interceptor: Interceptor
) -> tuple[Audit, Callable[[Round], Iterator[Observation]]]:
    """Prepare an attack by clients (sites), which subtract their own uploads from the change of the global model.

    Return the uploads to intercept, and a function that yields what the sites see after each round. With
    ``threat_model.differences``, sites compute single uploads from the means of several rounds; this raises
    ``UserError`` if clients upload weights, or inference attacks are configured.
    """
    sites, numbers = frozenset(setup.config.sites), dict[int, int]()
    known, differences = setup.config.threat_model.knows_numbers, setup.config.threat_model.differences
    site = AnotherSite(plan=server.plan, local_plan=server.local_plan, knows_numbers=known)
    means, models = list[tuple[dict[int, int], Upload]](), dict[int, tuple[int, ModelState]]()
    seen_before = set[VictimId]()
    if differences and (server.local_plan.shares == "weights" or setup.audit.listens):
        raise UserError(
            "threat_model.differences=true is expected with uploads of changes and without inference attacks, but"
            f" got federation.plan.shares={server.local_plan.shares} and inference={setup.config.choices['inference']};"
            " set federation.plan.shares=delta and inference=none."
        )

    def heard(round: int, mean: Upload, counted: Mapping[int, int]) -> None:
        numbers.update(counted)

    def seen(round: Round) -> Iterator[Observation]:
        numbers.clear()
        before = server.state
        own = {observation.id.client: observation.upload for observation in round}
        own = {client: upload for client, upload in own.items() if client in numbers}
        rest = site.rest(before, server.state, own, numbers) if numbers else None
        if rest is None:
            return
        setup.excluded[round.number] = frozenset(server.select(round.number)) - numbers.keys()
        others = {client: number for client, number in numbers.items() if client not in sites}
        if not known:
            others = dict.fromkeys(others, max(1, rest.num_examples // len(others)))
            share, how = site.shares[-1]
            logger.info("Round %d: the site estimates its share of the mean as %.4f, by %s", round.number, share, how)
        means.append((others, rest))
        models.update(dict.fromkeys(others, (round.number, before)))
        if round.number not in setup.audit.rounds:
            return
        found = {VictimId(round.number, SUMMED): (before, rest)}
        if differences:
            found = {VictimId(models[c][0], c): (models[c][1], upload) for c, upload in single_uploads(means).items()}
        for id in [id for id in found if id not in seen_before]:
            observation = interceptor.observe(id, sent=found[id][0], upload=found[id][1])
            if observation is not None:
                yield observation
        seen_before.update(found)

    server.heard = heard
    every = frozenset(range(1, setup.rounds + 1))
    return replace(setup.audit, rounds=every, uploads="update", clients=sites, probes=()), seen


def seen_next_to(
    observations: Sequence[Observation], sites: int, rule: ServerPlan
) -> list[tuple[Observation, Sequence[VictimId]]]:
    """Return what one site can compute of other sites' uploads: their means, each with the ids of the uploads in it.

    ``observations``, sorted by round, form a round for each ``sites`` of them; the last one's client computes the mean
    of the others. ``rule``: how the server makes the global model. Left out are uploads of several steps from more than
    two sites, and later rounds if the server's optimizer is Adam or Yogi.
    """
    found = list[tuple[Observation, Sequence[VictimId]]]()
    ordered = sorted(observations, key=lambda o: (o.id.round, o.id.probe or 0, o.id.client))
    for start in range(0, len(ordered), sites) if sites > 1 else ():
        group = ordered[start : start + sites]
        first, alike = group[0], {(o.id.round, id(o.model), frozenset(o.upload.tensors)) for o in group}
        one_step = all(number_of_steps(o.upload.num_examples, o.plan) == 1 for o in group)
        later = rule.optimizer.name in ("adam", "yogi") and first.id.round > 1
        if len(group) < sites or len(alike) > 1 or later or not (one_step or sites == 2):
            continue
        uploads = {k: o.upload for k, o in enumerate(group)}
        upload = seen_by_sites(first.sent, uploads, [sites - 1], rule, first.plan)
        plan = first.plan if sites == 2 else replace(first.plan, epochs=None, steps=None, batch_size=None)
        found.append((replace(first, upload=upload, plan=plan), [o.id for o in group[:-1]]))
    return found[:MOST_BY_SITES]
