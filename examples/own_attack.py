"""An attack of your own: observations in, reconstructions out; the truth is never seen.

    python own_attack.py

reads six digits with it. From the command line the same is ``fl-privacy attack model=mlp attack=custom
attack._target_=own_attack.first_layer``, in Python ``reconstruct(observations, first_layer())``.
"""

import sys
from collections.abc import Sequence

import torch

from fl_privacy.attacks import Progress, ReconstructionAttack, no_progress
from fl_privacy.cli.main import run_command_line
from fl_privacy.types import Batch, Observation, Reconstruction


def first_layer() -> ReconstructionAttack:
    """Read the input of a fully connected first layer: a row of its weight's gradient is the input times the bias's.

    Phong et al. 2017, "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", section 3.
    """

    def attack(
        observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        return [_read(observation) for observation in observations]

    return attack


def _read(observation: Observation) -> Reconstruction:
    update = observation.update()
    (weight_name, weight), *_ = ((name, value) for name, value in update.items() if value.dim() > 1)
    bias = update.get(weight_name.replace("weight", "bias"))
    if weight.dim() != 2 or bias is None:
        return Reconstruction(id=observation.id, batch=None, failure="the first layer is not fully connected")
    row = bias.abs().argmax()
    image = (weight[row] / bias[row]).view(1, *observation.input_shape).clamp(0, 1)
    label = list(update.values())[-1].argmin().view(1)  # of the output layer's bias: only the true class is pushed up
    return Reconstruction(id=observation.id, batch=Batch(image, label), loss=0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    own = ["model=mlp", "attack=custom", "attack._target_=own_attack.first_layer", "victims=6"]
    own += ["model.mean=null", "model.std=null"]  # a model that normalizes its input shows it normalized
    raise SystemExit(run_command_line(["attack", *own, *sys.argv[1:]]))
