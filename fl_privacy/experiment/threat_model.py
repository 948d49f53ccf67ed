"""The threat model of a run in sentences, for its report."""

from omegaconf import DictConfig
from torch import nn

from fl_privacy.defenses import Defense
from fl_privacy.effects import settings_in_words
from fl_privacy.interception import Audit
from fl_privacy.models import has_batch_norm
from fl_privacy.types import Knowledge, LocalPlan

_SHARED = {
    "gradient": "the gradient of one batch",
    "delta": "the change of its weights after local training",
    "weights": "its weights after local training",
}

_MODES = {"train": "training mode", "eval": "evaluation mode"}

_SECURE = {
    "secagg": "The server is honest but curious and sees the sum of the updates, numbers of examples, training"
    " losses and whole-number buffers; SecAgg+ hides each update. A server that breaks the protocol and"
    " asks for both kinds of key shares unmasks them.",
    "ckks": "The server is honest but curious and sees ciphertexts, numbers of examples and the largest value in each"
    " tensor; the clients share the secret key: one of them that colludes with the server reveals every update.",
}


def threat_model(config: DictConfig, model: nn.Module, plan: LocalPlan, audit: Audit, defense: Defense) -> list[str]:
    """Who attacks, what is seen, what is known, what is defended."""
    if config.secure_aggregation.name != "none":
        return [_SECURE[config.secure_aggregation.name], _describe_defense(defense)]
    lines = [
        "The server is honest but curious: it follows the protocol and reads what it receives.",
        f"Each client uploads {_SHARED[plan.shares]}.",
    ]
    if audit.target == "probe":
        lines.append(
            f"Attacked are {len(audit.probes)} extra batches of {audit.batch_size} example(s): each client sends them"
            " through its own defended update as if they were all its data; the model is not trained on these uploads."
        )
    else:
        lines.append(f"Attacked are the training updates of {len(audit.clients)} clients.")
    if plan.augments:
        like = "likewise" if plan.augment_probes else "not"
        left = f", those of the extra batches are {like}" if audit.target == "probe" else ""
        lines.append(f"Training images are {_augmentation(plan)} at random{left}.")
    if has_batch_norm(model):
        lines.append(_batch_norm(plan, audit.target))
    lines.append("The attacker knows the architecture, the values each client was sent, and the local plan.")
    known = ["The attacker is given the true labels."] if config.knows_labels else []
    if config.public_images:
        known.append(f"The attacker holds {config.public_images} public images of the same domain, none attacked.")
    if config.attack.get("start") == "previous":
        known.append("The attacker starts from its own guess at the same examples in the round it attacked before.")
    if defense.private:
        known.append(_stand_in(config.colluder))
    if config.knows_features:
        known.append(
            f"The attacker sees what enters {config.features_at or 'the first public layer'} of a victim's model."
        )
    if config.knows_defense and defense.parts:
        joins = "" if defense.changes_images else ", and which updates of different rounds come from the same examples"
        known.append(
            f"The attacker knows the defense and its settings ({settings_in_words(defense.parts)}){joins}: the adaptive"
            " attacker. Beside it a plain one that knows nothing of this attacks the same victims."
        )
    known = known or Knowledge().describe()
    return lines + known + [_describe_defense(defense)]


def who_draws(simulated: bool) -> str:
    """Where the clients' randomness comes from, in a sentence."""
    if simulated:
        return (
            "This is a simulation: all that clients draw at random, noise too, derives from the run's seed, which the"
            " attacker is not told. Deployed clients draw it from secrets of their own."
        )
    return "Clients are deployed: what they draw at random derives from secrets that stay on their nodes."


def _batch_norm(plan: LocalPlan, target: str) -> str:
    training = f"Batch norm of training is in {_MODES[plan.batch_norm]} and its running statistics are {plan.buffers}"
    if target != "probe":
        return f"{training}."
    same = plan.batch_norm == plan.probe_batch_norm
    return f"{training}; that of the attacked batches is in {_MODES[plan.probe_batch_norm]}{' as well' * same}."


def _augmentation(plan: LocalPlan) -> str:
    return " and ".join(["cropped"] * bool(plan.crop_padding) + ["flipped"] * plan.flip)


def _stand_in(colluder: int | None) -> str:
    if colluder is None:
        return "For private layers, which it does not see, the attacker takes values of its own draw."
    return (
        f"Client {colluder} colludes: its private layers stand in for those of the victims; it is not attacked itself."
    )


def _describe_defense(defense: Defense) -> str:
    if not defense.parts:
        return "Clients do not defend themselves."
    parts = [(part.name, ", ".join(f"{key}={value}" for key, value in part.settings.items())) for part in defense.parts]
    return f"Clients defend themselves with {' and '.join(f'{n} ({s})' if s else n for n, s in parts)}."
