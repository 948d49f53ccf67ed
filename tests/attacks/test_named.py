"""The names of attacks come from ``conf/attack`` alone."""

import builtins
from typing import Any

import pytest
import torch

from fl_privacy.attacks import reconstruct
from fl_privacy.attacks.named import attack_named, attack_names
from fl_privacy.errors import UserError
from fl_privacy.runs.build import build_attack
from fl_privacy.runs.config import compose_run, options
from fl_privacy.types import Observation
from tests.attacks.victims import observations, smooth_net


def test_every_option_of_the_configuration_has_its_name() -> None:
    assert set(attack_names()) == set(options("attack")) - {"none", "custom"}


@pytest.mark.parametrize("name", attack_names())
def test_an_attack_by_its_name_is_that_of_the_configuration(name: str) -> None:
    built = build_attack(compose_run([f"attack={name}"]).attack, device="cpu")
    made = attack_named(name)()
    assert type(built) is type(made)
    assert repr(getattr(built, "objective", None)) == repr(getattr(made, "objective", None))
    assert getattr(built, "iterations", None) == getattr(made, "iterations", None)


def test_a_preset_with_settings_runs_by_its_name() -> None:
    (found,) = reconstruct(observations(smooth_net(), 1), "ats_adam_l2", iterations=2)
    assert found.failure is None


def test_without_pyyaml_what_has_settings_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="ats_adam_l2 is expected to find the package PyYAML"):
        attack_named("ats_adam_l2")
    assert attack_named("dlg")


@pytest.mark.parametrize("seed", [34, 68, 71, 330])
def test_targets_that_no_loss_could_have_are_not_tried(seed: int) -> None:
    """The gradient of cross entropy, solved for targets of binary cross entropy, gives some outside of [0, 1]."""
    torch.manual_seed(seed)
    net, image = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3)), torch.eye(3).view(1, 1, 3, 3)
    loss = torch.nn.functional.cross_entropy(net(image), torch.tensor([1]))
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    (found,) = reconstruct([Observation.of_gradients(net, gradients, input_shape=(1, 3, 3))], "analytic")
    assert found.batch is not None
    torch.testing.assert_close(found.batch.inputs, image, atol=1e-3, rtol=0)
