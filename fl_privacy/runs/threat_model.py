"""Describe a run's threat model in sentences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.adaptive import without_countermeasure
from fl_privacy.attacks.attack import trained_on
from fl_privacy.attacks.malicious import ServerAttack, ThreatLevel
from fl_privacy.effects import Description, Mixed, mixing
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit
from fl_privacy.files import shipped
from fl_privacy.models import TextModel, has_batch_norm
from fl_privacy.runs.setup import Setup
from fl_privacy.types import LocalPlan
from fl_privacy.types.modality import ROWS, TEXTS, Modality, modality_of

_WORDS: Mapping[str, Any] = shipped(__file__, "threat_model.yaml")


def describe_threats(setup: Setup) -> list[str]:
    """Return sentences on attackers, observations, knowledge of the strongest attacker, and defense."""
    model, plan, audit, server = setup.model, setup.plan, setup.audit, setup.server_attack
    knowledge, secure_aggregation = setup.assumed_knowledge(), setup.config.secure_aggregation["name"]
    parts = [(part.name, ", ".join(f"{k}={v}" for k, v in part.settings.items())) for part in setup.defense.parts]
    named = " and ".join(f"{name} ({settings})" if settings else name for name, settings in parts)
    defended = f"Clients defend themselves with {named}." if parts else "Clients do not defend themselves."
    defended += f" {_WORDS['guarded']}" * ("_target_" in setup.config.guard)
    observer = _sites(setup) if setup.config.sites else _server(server)
    others = setup.config.federation.clients - len(setup.config.sites) if setup.config.sites else 0
    if noise := setup.server.plan.noise:
        protects = "which protects from other sites, and not from the server that sees the updates before"
        observer.append(f"The server adds noise of standard deviation {noise:g} to the mean, {protects}.")
    if secure_aggregation != "none" and not setup.config.sites:
        known = knowledge.describe(modality_of(model)) if server is None and secure_aggregation == "secagg" else []
        return [*observer, _WORDS["secure_aggregation"][secure_aggregation], *known, defended]
    lines = [
        *observer,
        f"Each client uploads {_WORDS['shared'][plan.shares]}.",
        *_attacked(audit, others if others > 1 else 0),
    ]
    if plan.augments:
        like = "also" if plan.augment_probes else "not"
        left = f", those of the extra batches are {like}" if audit.uploads == "probe" else ""
        done = " and ".join(["cropped"] * bool(plan.crop_padding) + ["flipped"] * plan.flip)
        lines.append(f"Training images are {done} at random{left}.")
    if has_batch_norm(model):
        mode, same = _WORDS["modes"][plan.probe_batch_norm], plan.batch_norm == plan.probe_batch_norm
        of_probes = (
            f"; that of the attacked batches is in {mode}{' as well' * same}" if audit.uploads == "probe" else ""
        )
        lines.append(
            f"Batch norm of training is in {_WORDS['modes'][plan.batch_norm]} and its running statistics are"
            f" {plan.buffers}{of_probes}."
        )
    if plan.frozen:
        lines.append(f"Neither trained nor uploaded: {', '.join(plan.frozen)}.")
    lines += _OF_MODEL.get(modality_of(model), lambda model, plan: [])(model, plan)
    lines.append("The attacker knows the architecture, the values each client was sent, and how clients train.")
    lines += knowledge.describe(modality_of(model))
    if knowledge.defense is not None:
        lines.append("That is the adaptive attacker; a plain one that knows nothing of the defense attacks as well.")
        parts_known: Description = knowledge.defense
        alone = audit.uploads == "probe" and audit.batch_size == 1
        if alone and knowledge.public_images is not None and mixing(parts_known) is not None:
            parts_known = tuple(part for part in parts_known if not isinstance(part.effect, Mixed))
        if names := without_countermeasure(parts_known):
            lines.append(
                f"Not tested: an attacker that makes use of what it knows of {' and '.join(names)}; there is no"
                " countermeasure against it here, and the adaptive attacker attacks it as if unknown."
            )
    return [*lines, defended]


def _embeddings(model: nn.Module, plan: LocalPlan) -> list[str]:
    assert isinstance(model, TextModel)
    if model.word_weight in plan.held(name for name, _ in model.named_parameters()):
        return ["The gradient of the tokens' embeddings is not uploaded."]
    return [
        "The gradient of the tokens' embeddings is uploaded. Its nonzero rows name the tokens of a batch, unless a"
        " defense or a tied head fills all rows."
    ]


_OF_MODEL: Mapping[Modality, Callable[[nn.Module, LocalPlan], list[str]]] = {
    TEXTS: _embeddings,
    ROWS: lambda model, plan: [_WORDS["schema"]],
}
"""Modality -> function that describes how its models leak, in sentences."""


def _sites(setup: Setup) -> list[str]:
    sites, plan, crafts = setup.config.sites, setup.server.plan, setup.server_attack
    others = setup.config.federation.clients - len(sites)
    who, own = (
        ("Another site is", "its own update") if len(sites) == 1 else (f"{len(sites)} sites are", "their updates")
    )
    alone = plan.fraction < 1 or plan.aggregation == "round_robin"
    seen = "the update of the only other site" if others == 1 else f"the mean of the updates of {others} sites"
    seen = f"the mean of the updates of those of {others} sites that take part in a round" if alone else seen
    if setup.config.threat_model.differences:
        seen = "the updates of single sites, as far as rounds with different participants determine them (exact if a"
        alike = (
            "updates are" if setup.config.threat_model.knows_numbers else "updates, and all numbers of examples, are"
        )
        seen += f" site's {alike} the same in these rounds)"
    rule = "the change of the model" if plan.optimizer.name == "sgd" else f"the undone steps of {plan.optimizer.name}"
    numbers = " and all numbers of examples" if setup.config.threat_model.knows_numbers else ""
    lines = [
        f"{who} {'active' if crafts else 'honest but curious'}. Known: each global model{numbers}. Attack: subtract"
        f" {own} from {rule}.",
        f"This leaves {seen}, up to the rounding of the global model's values; secure aggregation does not hide it.",
        "Not tested: the server, which may see single updates, and a site that trains on crafted data.",
    ]
    if not numbers:
        lines.append(
            "Its share of the mean is estimated: exactly from values that its examples alone change, or from the rank"
            " of a layer's gradient; else equal numbers are assumed, and a part of its own update is left in the mean."
        )
    if crafts:
        lines.append(f"A round before, {own} made the mean a crafted model ({crafts.level}).")
    return lines


def _server(attack: ServerAttack | None) -> list[str]:
    level = attack.level if attack else ThreatLevel.HONEST
    first = (
        "The server is honest but curious: it follows the protocol and analyzes what it receives."
        if attack is None
        else f"The server is malicious ({level}). {attack.description}"
    )
    others = [other.value for other in ThreatLevel if other not in (level, ThreatLevel.HONEST)]
    if attack is not None:
        others = [f"any other server with {level}", *others]
    return [first, f"Not tested: {', '.join(others)}, clients of the server's own (Sybils)."]


def _attacked(audit: Audit, others: int = 0) -> list[str]:
    clients = f"{len(audit.clients)} client{'s' * (len(audit.clients) != 1)}"
    if audit.uploads != "probe":
        return [f"The attack targets the training updates of {clients}."]
    sentences = []
    if audit.probes:
        size = "one example" if audit.batch_size == 1 else f"{audit.batch_size} examples"
        sends = "Each client uploads its usual update of such a batch, as if it were all its data"
        if others:
            sends = "The other sites upload their updates of equal parts of such a batch, as if of all their data"
        batches = f"The attack targets {len(audit.probes)} extra batches of {size}."
        sentences.append(f"{batches} {sends}; the model is not trained on these uploads.")
    if audit.listens:
        sentences.append(
            f"Inference attacks use the training updates of {clients} in {len(audit.rounds)}"
            f" round{'s' * (len(audit.rounds) != 1)}; the attacker holds the examples that it asks about, with their"
            " classes."
        )
    return sentences or ["No upload is attacked."]


@dataclass(frozen=True)
class ClientLocation:
    """Whether clients are simulated, and whose data they train on."""

    simulated: bool = True  # ``True`` if their randomness is derived from the run's seed, not from secrets of their own
    own_data: bool = False  # ``True`` if they train on folders of their nodes, not on the run's data


def who_draws(clients: ClientLocation) -> str:
    """Describe where the clients' randomness and data come from."""
    if clients.simulated:
        return (
            "This is a simulation: all client randomness, including noise, is derived from the run's seed, which the"
            " attacker does not know. Deployed clients use secrets of their own."
        )
    drawn = "Clients are deployed: their randomness is derived from secrets that stay on their nodes."
    if not clients.own_data:
        return drawn
    return f"{drawn} They train on data of their own, which nobody else has seen: the test data are the server's."


def expect_readable_updates(aggregation: str, where: str) -> None:
    """Raise a ``UserError`` that begins with ``where`` if secure aggregation hides single updates."""
    if aggregation != "none":
        raise UserError(
            f"{where} needs every update and is expected with secure_aggregation=none, but got {aggregation};"
            " use `fl-privacy run` with backend=loop and attack=none, or `fl-privacy attack secure_aggregation=secagg"
            " batch_size=8` for what the sum of eight clients of one example leaks."
        )


LOOKED_AT = 1000  # number of images checked in the victims' split, evenly spaced

MOST_SEEN = 10.0
"""Largest percentage of the victims' split that a generator may have seen; a few images are in both splits."""


def describe_image_prior(
    attack: ReconstructionAttack | None, image: Sequence[int], victims: Tensor | None
) -> list[str]:
    """Describe the data that trained the generator of ``attack``, if any; ``UserError`` if it saw many of ``victims``.

    ``image``: (C, H, W). ``victims``: images (N, C, H, W) that are attacked, uint8 or in [0, 1], if known.
    """
    known = None if attack is None else trained_on(attack, image)
    if known is None:
        return []
    said = f"The attacker looks among the images of a generator that was trained on {known.words()}"
    if not len(known.fingerprints) or victims is None:
        return [f"{said}; whether a victim's image was among these is not checked."]
    chosen = torch.arange(len(victims))[:: max(1, len(victims) // LOOKED_AT)]
    share = 100 * float(known.seen(victims[chosen]).double().mean())
    if share > MOST_SEEN:
        raise UserError(
            f"attack.generator is expected not to have seen the victims, but it was trained on {known.words()}, with"
            f" {share:.0f} % of the images that they come from; attack another split, or train one on other images"
            " (fl-privacy train-generator split=test)."
        )
    return [f"{said}; {share:.1f} % of the images that victims are taken from were among them."]
