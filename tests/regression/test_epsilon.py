"""``leakage.epsilon``: a build fails where many draws contradict a claimed epsilon."""

from pathlib import Path

import pytest
import torch

from fl_privacy.auditing.regression.plugin import LeakageCheck, verdict_on
from fl_privacy.defenses import dp_noise
from fl_privacy.errors import UserError
from fl_privacy.types import Tensors

SMALL = {"weight": torch.zeros(20)}


def silent(update: Tensors) -> Tensors:
    return {name: value / value.norm().clamp_min(1) for name, value in update.items()}


def check(tmp_path: Path) -> LeakageCheck:
    return LeakageCheck(test="test_it", path=tmp_path / "baseline.json", update=False, said=[])


def test_an_honest_mechanism_passes_and_a_sentence_says_what_was_found(tmp_path: Path) -> None:
    found = check(tmp_path)
    found.epsilon(dp_noise(clip_norm=1.0, scale=1.0), 4.4, like=SMALL, draws=300)
    assert "nothing contradicts the claim" in found.said[0]


def test_a_false_claim_fails_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="no noise is added"):
        check(tmp_path).epsilon(silent, 1.0, like=SMALL, draws=300)
    check(tmp_path).epsilon(silent, 1.0, like=SMALL, draws=300, contradicts=True)


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(UserError, match="drawz"):
        verdict_on(silent, claimed=1.0, delta=1e-5, drawz=3)
