"""The inference attacks that a configuration names."""

from collections.abc import Mapping, Sequence
from typing import Any

from fl_privacy.attacks.inference import About, AttributeInference, Inference
from fl_privacy.attacks.inference.attribute import ADAPTIVE, AdaptiveAttributeInference
from fl_privacy.errors import UserError
from fl_privacy.runs.config.building import instantiate


def build_inferences(settings: Mapping[str, Any]) -> dict[str, Inference]:
    """Build the attacks that the section ``inference`` names, by name; empty for ``inference=none``.

    Raises:
        UserError: one of them is none, or its settings are wrong.
    """
    found = {}
    for name, section in settings.items():
        if not isinstance(section, Mapping) or "_target_" not in section:
            continue
        made = instantiate(section, f"inference.{name}")
        if not isinstance(getattr(made, "about", None), About) or not callable(getattr(made, "begin", None)):
            raise UserError(
                f"inference.{name}._target_={section['_target_']} is expected to return an Inference, but got"
                f" {type(made).__name__}."
            )
        found[name] = made
    return found


def with_adaptive(inferences: Mapping[str, Inference]) -> dict[str, Inference]:
    """Add to each attack on attributes the one of an attacker who knows the defense."""
    found = dict(inferences)
    for name, inference in inferences.items():
        if isinstance(inference, AttributeInference) and not inference.adaptive:
            found[f"{name}{ADAPTIVE}"] = AdaptiveAttributeInference(methods=inference.methods, public=inference.public)
    return found


def pool_size(inferences: Sequence[Inference]) -> tuple[int, int]:
    """Return how many members and others all of them ask about together."""
    members = max((int(getattr(i, "members", 0)) for i in inferences), default=0)
    return members, max((int(getattr(i, "others", 0)) for i in inferences), default=0)
