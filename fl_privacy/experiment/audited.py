"""Which uploads of a run are intercepted."""

from collections.abc import Mapping

from fl_privacy.checks import whole
from fl_privacy.config import RunSettings
from fl_privacy.errors import UserError
from fl_privacy.experiment.inferences import build_inferences
from fl_privacy.experiment.server_reading import build_server_attack
from fl_privacy.federation import Audit, Client, Probe, audited_rounds, spread_probes
from fl_privacy.inference import About


def audit_of(config: RunSettings, rounds: int, clients: Mapping[int, Client]) -> Audit:
    """Which uploads of ``rounds`` rounds the attackers of ``config`` get hold of.

    Raises:
        UserError: there are no such rounds or clients, or too few examples.
    """
    inferences = build_inferences(config.inference)
    reads_images = "_target_" in config.attack or config.intercept.save
    if not reads_images and not inferences:
        return Audit()
    chosen = config.intercept.rounds
    audited = audited_rounds(chosen if isinstance(chosen, str | int) else list(chosen), rounds)
    asked = set(clients if config.intercept.clients == "all" else config.intercept.clients)
    if not asked:
        raise UserError(
            "intercept.clients is expected to name clients, but got an empty list; take intercept.clients=all, or"
            " attack=none to attack none."
        )
    colluder = config.threat_model.colluder
    if colluder is not None:
        whole("threat_model.colluder", colluder, at_least=0, at_most=len(clients) - 1, example=0)
    if unknown := sorted(asked - clients.keys()):
        raise UserError(f"intercept.clients is expected within 0..{len(clients) - 1}, but got {unknown}.")
    attack = build_server_attack(config.server)
    asked = (asked - {colluder}) & (set(clients) if attack is None or attack.only is None else {attack.only})
    sizes = {client: p.number_of_examples for client, p in clients.items() if client in asked}
    probes: tuple[Probe, ...] = ()
    about = {inference.about for inference in inferences.values()}
    if config.intercept.uploads == "probe" and (reads_images or About.ATTRIBUTE in about):
        probes = spread_probes(config.victims, config.batch_size, sizes)
    return Audit(
        rounds=audited,
        uploads=config.intercept.uploads,
        probes=probes,
        clients=frozenset(asked),
        batch_size=config.batch_size,
        listens=bool(about - {About.ATTRIBUTE}),
    )
