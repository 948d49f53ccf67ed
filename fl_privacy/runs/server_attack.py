"""Build a malicious server's attack, apply it to the server, and run its reconstruction as an attack."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fl_privacy.attacks import Progress, ReconstructionAttack, no_progress
from fl_privacy.attacks.malicious import ServerAttack, ThreatLevel
from fl_privacy.data import LabelledExamples, expect_images
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Server
from fl_privacy.federation.interception import Interceptor
from fl_privacy.models.gradients.choose_method import decayed, number_of_steps
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.config.building import instantiate_as
from fl_privacy.types import LocalPlan, ModelState, Observation, Reconstruction, Upload, VictimId

PUBLIC_IMAGES = 2000  # public images that a server holds as its prior, from the split that is not attacked
EVERYBODY = -1  # client id if all are sent the same model


def expect_named(section: Mapping[str, Any], group: str) -> None:
    """Raise ``UserError`` if ``section``, the settings of config group ``group``, has no text ``name``."""
    if not isinstance(name := section.get("name"), str):
        raise UserError(f"{group}.name is expected to be text, but got {name!r}; leave it to {group}=NAME.")


def build_server_attack(
    section: Mapping[str, Any], public: LabelledExamples | None = None, attacked: LabelledExamples | None = None
) -> ServerAttack | None:
    """Build a malicious server's attack from its settings; ``None`` for an honest server.

    ``public``: images that the server has; ``attacked``: clients' images, for attacks that infer membership.
    """
    if "_target_" not in section:
        expect_named(section, "server")
        return None
    made: ServerAttack = instantiate_as(ServerAttack, section, "server")  # type: ignore[type-abstract]
    if public is None:
        return made
    expect_images(public, "A malicious server")
    held = public.batch(torch.arange(min(PUBLIC_IMAGES, len(public)))).inputs
    if made.asks_of_members and attacked is not None:
        own = attacked.batch(torch.arange(min(len(held), len(attacked)))).inputs
        held = torch.stack([own, held[: len(own)]], 1).flatten(0, 1)
    return made.informed(held)


def expect_readable_sum(attack: ServerAttack | None, config: RunSettings) -> None:
    """Raise ``UserError`` if ``attack`` needs the clients' mean update, but ``config`` does not intercept it."""
    if attack is None or not attack.reads_sum:
        return
    server, uploads = config.choices["server"], config.intercept.uploads
    if uploads != "update":
        raise UserError(
            f"server={server} is expected with intercept.uploads=update, whose mean it attacks, but got {uploads}; set"
            " intercept.uploads=update."
        )
    if config.federation.plan.get("shares") == "weights":
        raise UserError(
            f"server={server} is expected with uploads of gradients or changes, but got weights; set"
            " federation.plan.shares=delta."
        )


def hand_over(
    server: Server, attack: ServerAttack | None, audit: Audit, interceptor: Interceptor
) -> tuple[Audit, Callable[[], Iterator[Observation]]]:
    """Make a malicious ``server`` send crafted models in the rounds of ``audit``.

    Return the replies to intercept one by one, and a function that yields further observations after each round: the
    mean of the replies, once per attacked client and scaled to its number of examples, if the attack uses that mean.
    """
    of_means: list[Observation] = []

    def means() -> Iterator[Observation]:
        while of_means:
            yield of_means.pop(0)

    if attack is None:
        return audit, means
    crafted: dict[int, tuple[ModelState, ModelState]] = {}

    def tamper(state: ModelState, client: int) -> ModelState:
        key = client if attack.level is ThreatLevel.INCONSISTENT else EVERYBODY
        if key not in crafted or crafted[key][0] is not state:
            crafted[key] = state, attack.craft(interceptor.model, state, client)
        return crafted[key][1]

    server.tamper, server.tampered, server.learns = tamper, audit.rounds, attack.trains
    if not attack.reads_sum:
        return audit, means

    def heard(round: int, mean: Upload, numbers: Mapping[int, int]) -> None:
        idle = _decay(server.local_plan.in_round(round), numbers, {key: sent for key, (_, sent) in crafted.items()})
        for client in sorted(audit.clients & numbers.keys()):
            share = mean.num_examples / numbers[client]
            left = {n: t - sum(idle[k][n] for k in idle if k != client) for n, t in mean.tensors.items()}
            own = {name: share * t if t.is_floating_point() else t for name, t in left.items()}
            upload = replace(mean, tensors=own, num_examples=numbers[client], rounding=share * mean.rounding)
            observation = interceptor.observe(VictimId(round, client), sent=crafted[client][1], upload=upload)
            of_means.extend([observation] if observation else [])

    server.heard = heard
    return replace(audit, rounds=frozenset()), means


def _decay(
    plan: LocalPlan, numbers: Mapping[int, int], sent: Mapping[int, ModelState]
) -> Mapping[int, Mapping[str, Tensor]]:
    if not plan.weight_decay or plan.shares == "gradient":
        return {}
    total, found = sum(numbers.values()), dict[int, Mapping[str, Tensor]]()
    for client, number in numbers.items():
        values, steps = sent.get(client, sent.get(EVERYBODY)), number_of_steps(number, plan)
        assert values is not None, "whoever replies was sent something"
        found[client] = {n: number / total * (decayed(p, plan, steps) - p) for n, p in values.parameters.items()}
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerReading:
    """Attack on replies to crafted models: the malicious server's own method if it applies, else ``attack``."""

    server: ServerAttack
    attack: ReconstructionAttack

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        found: dict[int, Reconstruction] = {}
        left: dict[int, Observation] = {}
        for place, observation in enumerate(observations):
            result = self.server.read(observation)
            if isinstance(result, Reconstruction):
                found[place] = result
                progress(len(found), len(observations))
            else:
                left[place] = result
        if left:
            found |= dict(zip(left, self.attack(list(left.values()), seed=seed, progress=progress), strict=True))
        return [found[place] for place in range(len(observations))]
