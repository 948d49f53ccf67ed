"""Observations of a training by another site, in place of the server's."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from fl_privacy.federation import Audit, Round, Server
from fl_privacy.federation.another_site import AnotherSite
from fl_privacy.federation.interception import Interceptor
from fl_privacy.runs.setup import Setup
from fl_privacy.types import Observation, Upload, VictimId

SUMMED = 0  # client id of an update that is the sum of the other sites'


def look_from_site(
    setup: Setup, server: Server, interceptor: Interceptor
) -> tuple[Audit, Callable[[Round], Iterator[Observation]]]:
    """Return the uploads that the sites of ``setup`` know, their own, and a function that makes a round's observation.

    Each site gets every global model and the numbers of examples, as for evaluation after a round.
    """
    sites, numbers = frozenset(setup.config.sites), dict[int, int]()
    site = AnotherSite(plan=server.plan, local_plan=server.local_plan)

    def heard(round: int, mean: Upload, counted: Mapping[int, int]) -> None:
        numbers.update(counted)

    def seen(round: Round) -> Iterator[Observation]:
        numbers.clear()
        before = server.state
        own = {observation.id.client: observation.upload for observation in round}
        own = {client: upload for client, upload in own.items() if client in numbers}
        rest = site.rest(before, server.state, own, numbers) if numbers else None
        if rest is None or round.number not in setup.audit.rounds:
            return
        observation = interceptor.observe(VictimId(round.number, SUMMED), sent=before, upload=rest)
        if observation is not None:
            yield observation

    server.heard = heard
    every = frozenset(range(1, setup.rounds + 1))
    return replace(setup.audit, rounds=every, uploads="update", clients=sites, probes=()), seen
