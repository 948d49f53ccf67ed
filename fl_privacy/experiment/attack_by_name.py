"""An attack as an audit or a test is told of it: by a name with settings after it, or as it is."""

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.errors import UserError


def attack_called(attack: str | ReconstructionAttack) -> tuple[ReconstructionAttack | None, str]:
    """The attack and its name, of ``idlg attack.iterations=50`` or of an attack; ``None`` for ``none``.

    Raises:
        UserError: there is no such attack or setting.
    """
    if not isinstance(attack, str):
        if not callable(attack):
            raise UserError(
                f"attack is expected to be a name or an attack, but got {type(attack).__name__}; try attack='auto'."
            )
        return attack, type(attack).__name__
    from fl_privacy.config import compose_run  # noqa: PLC0415
    from fl_privacy.experiment.build import build_attack  # noqa: PLC0415

    name, *settings = attack.split() or [""]
    config = compose_run([f"attack={name}", *settings])
    return build_attack(config.attack, device=config.device, threads=config.attack_threads), name
