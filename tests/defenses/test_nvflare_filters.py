"""NVFlare's filters as defenses: figures and digests were computed by NVFlare 2.9's own code on the same update."""

import hashlib
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive.constraints import beyond_cut
from fl_privacy.attacks.gradient_inversion.evident_defense import undo_evident_defenses
from fl_privacy.defenses import exclude_vars, percentile, svt
from fl_privacy.defenses.privacy import guarantee, svt_epsilon
from fl_privacy.effects import Sparse, Truncated
from fl_privacy.errors import UserError
from fl_privacy.types import LocalPlan, Observation


def update_of(seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    sizes = {"conv.weight": ((8, 3, 5, 5), 0.008), "fc.weight": ((10, 64), 0.02), "fc.bias": ((10,), 0.005)}
    made = {name: (rng.standard_normal(shape) * scale).astype(np.float32) for name, (shape, scale) in sizes.items()}
    return {name: torch.from_numpy(value) for name, value in made.items()}


def digest(update: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(update[name].numpy().tobytes() for name in sorted(update))).hexdigest()


@pytest.mark.parametrize(
    ("share", "gamma", "steps", "expected"),
    [
        (10, 0.01, 1, "c8ba4570f073aa30be5904e4e59a756500bd63e1e0f52b30b8a61bdd891b2f07"),
        (10, 0.01, 4, "7470957e0ea81030e390ae634625271c348cc223b609e9bec854ccb46f0c8bb3"),
        (90, 0.02, 1, "221787648c3502338cca688aba6bc610bb9b5ff08c3a5e0574ea0f1a53533d53"),
        (0, 0.003, 3, "11995b4bb7759803c72fa905be80915144cec0746dae1df501f9af86c5cdd2f9"),
    ],
)
def test_percentile_gives_the_bytes_of_nvflare(share: float, gamma: float, steps: int, expected: str) -> None:
    assert digest(percentile(percentile=share, gamma=gamma, steps=steps).apply(update_of(0))) == expected


@pytest.mark.parametrize(
    ("exclude", "left"),
    [("fc", ["conv.weight"]), (["fc.bias"], ["conv.weight", "fc.weight"]), ("bias$", ["conv.weight", "fc.weight"])],
)
def test_exclude_vars_leaves_out_what_nvflare_does(exclude: str | list[str], left: list[str]) -> None:
    assert sorted(exclude_vars(exclude=exclude).apply(update_of(0))) == left


@pytest.mark.parametrize("exclude", ["", [], "(", [1]])
def test_names_that_nvflare_would_ignore_are_refused(exclude: object) -> None:
    with pytest.raises(UserError, match=r"defense\.exclude is expected"):
        exclude_vars(exclude=exclude)  # type: ignore[arg-type]


def test_svt_shares_as_many_values_as_nvflare_of_the_same_size() -> None:
    """Over 40 updates NVFlare shares 113.3 of 1,250 elements on average, of mean magnitude .00684."""
    made = [svt(gamma=0.01, noise_var=20.0).apply(update_of(k), seed=k) for k in range(40)]
    kept = [torch.cat([t.flatten() for t in one.values()]) for one in made]
    assert np.mean([int((t != 0).sum()) for t in kept]) == pytest.approx(113.3, rel=0.03)
    assert np.mean([float(t[t != 0].abs().mean()) for t in kept]) == pytest.approx(0.00684, rel=0.05)
    assert int((svt(replace=False).apply(update_of(0))["fc.weight"] != 0).sum()) > 0


def test_epsilon_of_svt_is_nvflares_and_the_queries_that_it_leaves_out() -> None:
    assert svt_epsilon(1250, noise_var=20.0) == pytest.approx(2500.1, abs=1.0)
    assert svt_epsilon(1250, noise_var=20.0) > 2500.1
    assert 70_000 < svt_epsilon(7_000_000) < 70_002
    found = guarantee(svt(), sample_rate=1.0, delta=1e-5)
    assert math.isinf(found.epsilon(1)) and "70,000" in found.describe(1)


def test_an_attacker_knows_a_cut_element_up_to_its_bound() -> None:
    bounds = beyond_cut(Truncated(bound=0.01), {"w": torch.tensor([0.01, -0.01, 0.002, 0.0])}, 0.0)["w"]
    assert bounds[0].tolist()[:2] == [pytest.approx(0.01), -math.inf] and bounds[1][0] == math.inf
    assert torch.equal(bounds[0][2:], bounds[1][2:])


def test_cut_elements_and_zeros_show_in_an_update() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 40), nn.Sigmoid(), nn.Linear(40, 10))
    loss = nn.functional.cross_entropy(net(torch.rand(1, 3, 4, 4)), torch.tensor([3]))
    gradient = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))
    sent = {name: p.detach() for name, p in net.named_parameters()}

    def effects(step: dict[str, Tensor]) -> list[type]:
        after = {name: sent[name] + change for name, change in step.items()}
        plan = LocalPlan(lr=0.1, steps=1, shares="weights")
        observed = Observation.of_update(sent, after, plan, model=net, input_shape=(3, 4, 4), num_examples=1)
        return [type(part.effect) for part in undo_evident_defenses([observed])[0].knowledge.defense or ()]

    step = {name: -0.1 * value for name, value in gradient.items()}
    assert effects(step) == []
    assert effects(percentile(percentile=10, gamma=0.001).apply(step)) == [Sparse, Truncated]
    assert effects(percentile(percentile=0, gamma=0.001).apply(step)) == [Truncated]
