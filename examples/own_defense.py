"""A defense of your own: a function that returns hooks, and an effect that says what they do.

    python own_defense.py

attacks it beside an undefended client. From the command line the same is
``fl-privacy attack defense=custom defense._target_=own_defense.shuffled_signs defense.share=0.3``, and in a Flower app
``defense_mod(shuffled_signs(share=0.3), model=Net)``.
"""

import sys

import torch

from fl_privacy.cli.main import run_command_line
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.effects import Part
from fl_privacy.types import Tensors


def shuffled_signs(*, share: float = 0.1) -> Defense:
    """Flip the sign of a random ``share`` of the elements of every upload."""

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        def flipped(tensor: torch.Tensor) -> torch.Tensor:
            chosen = torch.rand(tensor.shape, generator=rng, device=rng.device).to(tensor.device) < share
            return torch.where(chosen, -tensor, tensor)

        return {name: flipped(tensor) for name, tensor in tensors.items()}

    return Defense(parts=(Part("shuffled_signs", {"share": share}, strength="share"),), upload=(on_upload,))


if __name__ == "__main__":
    own = "defense=custom defense._target_=own_defense.shuffled_signs"
    for defense in ("defense=none", f"{own} defense.share=0.01", f"{own} defense.share=0.1"):
        attack = ["attack", "model=lenet_dlg", "attack=idlg", "attack.iterations=100", "victims=6", *defense.split()]
        if status := run_command_line([*attack, *sys.argv[1:]]):
            raise SystemExit(status)
