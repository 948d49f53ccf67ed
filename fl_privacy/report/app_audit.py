"""The head of the page of an audit: somebody else's Flower app, and what of it was attacked."""

from collections.abc import Mapping

from fl_privacy.report.settings import chosen
from fl_privacy.results import Run
from fl_privacy.results.attack_facts import AttackedUploads, facts_of


def is_audit(run: Run) -> bool:
    """Whether ``run`` attacked clients that this package did not write."""
    choices = run.identity.config.get("choices")
    app = isinstance(choices, Mapping) and choices.get("federation") == "app"
    return app or run.identity.config.get("command") == "audit"


def audit_lede(run: Run) -> str:
    """What was audited and attacked, in sentences."""
    config = run.identity.config
    federation = config.get("federation")
    audited = config.get("command") == "audit" and isinstance(federation, Mapping)
    rounds = federation.get("rounds") if audited and isinstance(federation, Mapping) else None
    model = chosen(run, "model")
    trained = f"{model} of a Flower app" + (f", trained by {chosen(run, 'federation')}" if rounds else "")
    trained += f" over {rounds} round{'s' if rounds != 1 else ''}" if rounds else ""
    guarded = (
        f"defended by {' and '.join(run.defenses)}, as clients say"
        if run.defenses
        else "undefended as far as clients say"
    )
    attacked = run.of_kind("image")
    against = f", attacked by {chosen(run, 'attack')}" if attacked else ""
    against += ", with and without knowledge of the defense" if run.summary.adaptive else ""
    return f"{trained}, {guarded}{against}. {_attacked(run)}".strip()


def _attacked(run: Run) -> str:
    """How many images each attacked upload is of: that decides how much leaks."""
    sizes: dict[str, int] = {}
    for image in run.of_kind("image"):
        sizes[image["id"]] = max(sizes.get(image["id"], 0), image["image"] + 1)
    if not sizes:
        return "No upload was attacked, which says nothing of what uploads give away."
    probes = [size for id, size in sizes.items() if "victim-" in id]
    updates = [size for id, size in sizes.items() if "victim-" not in id]
    said = []
    if facts_of(run).source is AttackedUploads.SERVER:
        said.append(
            f"Attacked were {len(probes)} uploads of one image each that the server computed itself, undefended."
        )
    elif probes:
        images = "one image each, the worst case" if set(probes) == {1} else f"{_span(probes)} images each"
        said.append(f"Attacked were {len(probes)} uploads computed from {images}.")
    if updates:
        images = "one image" if set(updates) == {1} else f"{_span(updates)} images"
        said.append(f"Attacked were {len(updates)} training updates, each of {images}.")
    return " ".join(said)


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(high) if low == high else f"{low} to {high}"
