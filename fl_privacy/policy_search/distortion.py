"""What a policy does to images: how many it alters, and how much of their structure it leaves (FSIM, by piq)."""

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fl_privacy.extras import lacks
from fl_privacy.policy_search.privacy import transformed_by
from fl_privacy.transformations import Policy

VISIBLE = 40.0
"""Decibels: where the PSNR of a transformed image to its original is above, no difference is seen."""


def altered_shares(images: Tensor, policies: Sequence[Policy], *, seed: int) -> list[float]:
    """Share of ``images`` (N, C, H, W) that each policy visibly alters, to a PSNR of at most ``VISIBLE`` decibels.

    Some policies leave images as they are: color on grey ones, autocontrast on those that span all levels, solarize at
    level 0, what undoes itself.
    """
    least = 10 ** (-VISIBLE / 10)
    errors = torch.stack(
        [(transformed_by(images, policy, seed) - images).square().flatten(1).mean(1) for policy in policies]
    )
    shares: list[float] = (errors >= least).double().mean(1).tolist()
    return shares


def require_fsim() -> ModuleType:
    """The package piq.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("piq")
    except ImportError as error:
        raise lacks("piq", "fsim_at_least", instead="or leave it null") from error


def fsim_scores(images: Tensor, policies: Sequence[Policy], *, seed: int) -> list[float]:
    """Mean feature similarity (Zhang et al. 2011) of ``images`` (N, C, H, W) and what each policy makes of them.

    1 is no distortion.

    Raises:
        UserError: piq is not installed.
    """
    piq = require_fsim()
    chromatic = images.shape[1] == 3
    found = [
        float(piq.fsim(transformed_by(images, policy, seed), images, data_range=1.0, chromatic=chromatic))
        for policy in policies
    ]
    return torch.tensor(found).nan_to_num(0.0).tolist()
