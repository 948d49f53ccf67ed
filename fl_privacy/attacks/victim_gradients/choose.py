"""Which way the victims' gradients are computed."""

import warnings

import torch
from torch import Tensor

from fl_privacy.attacks.victim_gradients.base import Setting, VictimGradients
from fl_privacy.attacks.victim_gradients.one_by_one import OneByOne
from fl_privacy.attacks.victim_gradients.vectorized import Vectorized


def choose(setting: Setting, inputs: Tensor, labels: Tensor) -> VictimGradients:
    """The fastest way that works for this model.

    Args:
        setting: model, plan and tensors to match.
        inputs: (1, B, C, H, W) of a trial.
        labels: (1, B).

    Raises:
        RuntimeError: the model can't be run on such inputs.
    """
    slow = OneByOne(setting)
    with torch.no_grad():
        setting.model(inputs[0])
    try:
        vectorized = Vectorized(setting)
        vectorized(inputs, labels)
    except RuntimeError as error:
        warnings.warn(
            f"{type(setting.model).__name__} can't be vectorized over victims, which are attacked one by one:"
            f" {str(error).strip().splitlines()[0]}",
            stacklevel=2,
        )
        return slow
    return vectorized
