"""Choose uploads of third-party clients to attack, and describe their app."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.effects import Description, settings_in_words
from fl_privacy.federation import local_update
from fl_privacy.federation.interception import describe_model, ids_of, only
from fl_privacy.models import has_batch_norm, normalization_of
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.runs.app_truth import KnownImages
from fl_privacy.types import Observation, VictimId

MOST_FOUND = 12
"""Most sentences on single updates, the most frequent first."""

MOST_IMAGES, MOST_STEPS = 16, 8
"""Updates of more images or local steps are attacked only on request: that takes hours, and
reveals next to nothing of single images, whatever one image would reveal."""

MOST_PIXELS, MOST_REPLAYED = 1 << 26, 10_000
"""Values of a guess, and local steps, above which an update is never attacked."""


def worth_attacking(
    observations: Sequence[Observation], *, every: bool = False
) -> tuple[Sequence[Observation], list[str]]:
    """Choose observations to attack, and describe the others.

    Probes are chosen if there are any, else training updates of few images and steps, since joint figures would hide
    one of them; ``every`` attacks all.
    """
    if every:
        sizes = {o.id: (o.upload.num_examples * math.prod(o.input_shape), _steps(o)) for o in observations}
        large = {id for id, (pixels, steps) in sizes.items() if pixels > MOST_PIXELS or steps > MOST_REPLAYED}
        said = [f"Not attacked: {len(large)} updates that say to be of more images or steps than can be guessed."]
        return only(observations, lambda id: id not in large), said if large else []
    probes = {id for id in ids_of(observations) if id.probe is not None}
    sizes = {o.id: (o.upload.num_examples, _steps(o)) for o in only(observations, lambda id: id.probe is None)}
    small = {id for id, (images, steps) in sizes.items() if images <= MOST_IMAGES and steps <= MOST_STEPS}
    left = [size for id, size in sizes.items() if probes or id not in small]
    said = []
    if left:
        images, steps = zip(*left, strict=True)
        said.append(
            f"Captured but not attacked: {len(left)} training updates, each of {_span(images)} images in"
            f" {_span(steps)} local step{'' if set(steps) == {1} else 's'}."
            " A single image is mixed with the others there; the leakage of one image in one step is the worst case,"
            " which a client with few images comes close to."
        )
    return only(observations, (probes or small).__contains__), said


def rehearsed(observations: Sequence[Observation], truth: KnownImages, number: int) -> list[Observation]:
    """Compute undefended uploads of one image in one step on the server, for each model that was sent."""
    last = {id.round: place for place, id in enumerate(ids_of(observations))}
    images, made = truth.first(number), []
    for round, place in sorted(last.items()):
        seen = observations[place]
        plan = replace(seen.plan, epochs=None, steps=None, batch_size=None, momentum=0.0, nesterov=False)
        for probe, batch in enumerate(images):
            result = local_update(
                seen.model,
                seen.sent,
                [batch],
                num_examples=1,
                plan=plan,
                defense=Defense(),
                state=ClientState(),
                rng=torch.Generator(),
                private_rng=torch.Generator(),
            )
            made.append(replace(seen, id=VictimId(round, 0, probe), upload=result.upload, plan=plan))
    return made


def describe_app(
    observations: Sequence[Observation], defense: Description, found: Counter[str], defenses: Mapping[int, Description]
) -> list[str]:
    """Describe the threat model and the clients in sentences, with those ``found`` on single updates."""
    lines = [
        "The server is honest but curious: it follows the protocol and analyzes what it receives. The clients are those"
        " of the app.",
        "The attacker knows the architecture, the values each client was sent, and the local plan as given or as"
        " inferred from the updates; no labels, no other images.",
    ]
    if observations:
        model = observations[0].model
        normalization = normalization_of(model)
        lines.append(
            "Images are assumed to enter the model unnormalized, in [0, 1]: if a client normalizes them, give its"
            " transform (transform= or data=)."
            if normalization is None
            else f"Images in [0, 1] are normalized before the model: {normalization.in_words()}."
        )
        if has_batch_norm(model) and any(o.plan.batch_norm == "train" for o in observations):
            lines.append(
                "In training mode batch norm removes each image's brightness and contrast from the gradient:"
                " reconstructions may have other colors than their originals."
            )
        lines += describe_model(model)
    total = max(found.values(), default=0)
    often = found.most_common(MOST_FOUND)
    lines += [f"{said} (So in {n} of {total} updates.)" if n < total else said for said, n in often]
    if all(parts == defense for parts in defenses.values()):
        return [*lines, f"Clients state a defense: {_in_words(defense)}." if defense else "Clients state no defense."]
    stated = Counter(_in_words(parts) for parts in defenses.values())
    lines += [
        f"{number} of {stated.total()} clients {f'state a defense: {text}' if text else 'state none'}."
        for text, number in stated.most_common()
    ]
    return [*lines, "Each client is taken at its word; the page uses what more than half of them state."]


def _in_words(defense: Description) -> str:
    return (settings_in_words(defense) or defense[0].name) if defense else ""


def _steps(observation: Observation) -> int:
    return number_of_steps(observation.upload.num_examples, observation.plan)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(high) if low == high else f"{low} to {high}"
