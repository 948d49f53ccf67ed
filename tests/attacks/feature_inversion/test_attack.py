"""Model inversion: with the right front it finds the image, and what it needs it recovers from public gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_privacy.attacks import GradientInversion, model_inversion
from fl_privacy.attacks.feature_inversion import UNKNOWN, Recovery, applies, recover_by_lemma
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.settings import Uniform
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.effects import Part, PrivateLayers
from fl_privacy.errors import UserError
from fl_privacy.models import Front
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, ModelState, Observation, Reconstruction, VictimId
from tests.attacks.victims import SHAPE, examples, observe, smooth_net

FAST = {
    "iterations": 40,
    "lr": 1.0,
    "line_search": "strong_wolfe",
    "total_variation": 0.0,
    "dtype": "float64",
    "restarts": 1,
}


def split(observation: Observation, *, stand_in: nn.Module) -> Observation:
    """Make the first layer private; the attacker has that of ``stand_in``."""
    private = {name for name in observation.sent.parameters if name.startswith("0.")}

    def public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t for name, t in tensors.items() if name not in private}

    own = {name: p.detach() for name, p in stand_in.named_parameters() if name in private}
    return replace(
        observation,
        sent=ModelState(public(dict(observation.sent.parameters))),
        upload=replace(observation.upload, tensors=public(dict(observation.upload.tensors))),
    ).given(private=ModelState(own), colluder=1)


def features(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return Front(model, "2")(batch.inputs)


def victims(count: int, *, stand_in: nn.Module | None = None, known: bool = True) -> tuple[list[Observation], Tensor]:
    model, images = smooth_net(), []
    observed = []
    for k in range(count):
        batch = examples(1, seed=k + 1)
        seen = split(observe(model, batch, id=VictimId(0, 0, k)), stand_in=stand_in or model)
        observed.append(seen.given(features=features(model, batch)) if known else seen)
        images.append(batch.inputs)
    return observed, torch.cat(images)


def errors(found: list, truth: Tensor) -> list[float]:
    return [float((r.batch.inputs[0] - t).square().mean()) for r, t in zip(found, truth, strict=True)]


def test_with_the_victim_s_own_front_the_image_is_found() -> None:
    observed, truth = victims(3)

    found = model_inversion(**FAST)(observed, seed=0)

    assert max(errors(found, truth)) < 1e-6
    assert [r.loss < 1e-6 for r in found] == [True] * 3


def test_known_features_need_no_update_that_tells_anything() -> None:
    observed, truth = victims(1)
    silent = {name: torch.zeros_like(g) for name, g in observed[0].upload.tensors.items()}
    quiet = replace(observed[0], upload=replace(observed[0].upload, tensors=silent))

    found = model_inversion(**FAST)([quiet], seed=0)

    assert max(errors(found, truth)) < 1e-6
    assert found[0].batch.labels.tolist() == [UNKNOWN]
    assert "zero everywhere" in model_inversion(**FAST, features="recovered")([quiet], seed=0)[0].failure


def test_with_a_stranger_s_front_it_is_not() -> None:
    observed, truth = victims(3, stand_in=smooth_net(seed=9))

    assert min(errors(model_inversion(**FAST)(observed, seed=0), truth)) > 1e-2


def narrow_front(seed: int = 0) -> nn.Module:
    """Its second layer's gradient has more elements than its input."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Sigmoid(), nn.Conv2d(4, 16, 3, padding=1), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(1024, 5),
    )  # fmt: skip
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return net.double()


def test_features_are_recovered_from_the_public_gradients_alone() -> None:
    model, stranger, batch = narrow_front(), narrow_front(seed=9), examples(1)
    observed = split(observe(model, batch), stand_in=stranger)  # whose front tells nothing of the features
    recovery = Recovery(
        matching=GradientInversion(
            objective=L2(), optimizer=LBFGS(), start=Uniform(), iterations=60, dtype="float64", labels="infer"
        )
    )

    (found,) = recovery([observed], Front(stranger, "2"), seed=0, progress=lambda done, total: None)

    expected = features(model, batch)
    assert isinstance(found, Tensor)
    assert (found - expected).norm() / expected.norm() < 0.01


def test_the_image_is_found_from_recovered_features() -> None:
    model, batch = narrow_front(), examples(1)
    observed = split(observe(model, batch), stand_in=model)

    found = model_inversion(**FAST, features="recovered", matching="l2", matching_iterations=60)([observed], seed=0)

    assert errors(found, batch.inputs)[0] < 1e-3


@pytest.mark.parametrize(("bias", "low", "high"), [(0.0, -2, 6), (2.0, 0, 10)])
def test_features_are_looked_for_in_twice_the_range_around_zero(bias: float, low: float, high: float) -> None:
    front = nn.Sequential(nn.Conv2d(2, 1, 1), nn.Identity(), nn.Conv2d(1, 2, 1), nn.Flatten())
    front.append(nn.Linear(128, 5)).double()
    with torch.no_grad():
        front[0].weight.copy_(torch.tensor([-1.0, 3.0]).view(1, 2, 1, 1))
        front[0].bias.fill_(bias)  # of images: bias - 1 .. bias + 3
    ends: list[float] = []

    def matching(observations: list[Observation], **_: object) -> list[Reconstruction]:
        stretched = observations[0].model
        ends.extend([stretched.low, stretched.low + stretched.width])
        return [Reconstruction(id=o.id, batch=None, failure="not tried") for o in observations]

    Recovery(matching=matching)([observe(front, examples(1))], Front(front, "2"), seed=0, progress=lambda *_: None)

    assert low <= ends[0] <= low + 0.2
    assert high - 0.6 <= ends[1] <= high


def linear_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 12), nn.Sigmoid(), nn.Linear(12, 5)).double()


def test_lemma_1_solves_linear_layers_and_convolutions_of_one_position() -> None:
    batch = examples(1)
    model = linear_model()
    gradients = loss_gradients(model, ModelState.of(model), batch).gradients
    found = recover_by_lemma(model[3], gradients["3.weight"], gradients["3.bias"])
    torch.testing.assert_close(found[None], model[:3](batch.inputs).detach())

    whole = nn.Sequential(nn.Sigmoid(), nn.Conv2d(2, 6, 8), nn.Flatten(), nn.Linear(6, 5)).double()
    gradients = loss_gradients(whole, ModelState.of(whole), batch).gradients
    found = recover_by_lemma(whole[1], gradients["1.weight"], gradients["1.bias"])
    torch.testing.assert_close(found[None], whole[0](batch.inputs))

    assert applies(whole[1], (2, 8, 8), 1)
    assert not applies(whole[1], (2, 9, 9), 1)
    assert not applies(whole[1], (2, 8, 8), 2)
    assert recover_by_lemma(whole[1], gradients["1.weight"], torch.zeros(6).double()) is None


def test_behind_a_linear_front_the_lemma_gives_the_features_exactly() -> None:
    model, batch = linear_model(), examples(1)
    observed = observe(model, batch)
    private = {"1.weight", "1.bias"}
    own = ModelState({n: p for n, p in observed.sent.parameters.items() if n in private})
    public = {n: p for n, p in observed.sent.parameters.items() if n not in private}
    uploaded = {n: g for n, g in observed.upload.tensors.items() if n not in private}
    observed = replace(observed, sent=ModelState(public), upload=replace(observed.upload, tensors=uploaded)).given(
        private=own
    )
    recovery = Recovery(matching=GradientInversion(iterations=1))

    (found,) = recovery([observed], Front(model, "3"), seed=0, progress=lambda done, total: None)

    torch.testing.assert_close(found, model[:3](batch.inputs).detach())


def test_features_are_recovered_where_the_attacker_chooses() -> None:
    observed, truth = victims(2, known=False)
    attack = model_inversion(**FAST, recover_at="5")  # linear: Lemma 1 is exact

    found = attack(observed, seed=0)

    front, guesses = Front(smooth_net(), "5"), torch.cat([r.batch.inputs for r in found])
    torch.testing.assert_close(front(guesses.double()), front(truth), atol=1e-2, rtol=0)
    assert all(r.loss < 1e-6 for r in found)
    told, _ = victims(2)
    at_first = model_inversion(**FAST)
    assert [r.loss for r in replace(at_first, recover_at="5")(told, seed=0)] == [r.loss for r in at_first(told, seed=0)]


def test_victims_do_not_change_one_another() -> None:
    observed, _ = victims(3)
    attack = model_inversion(**FAST | {"restarts": 2})

    together = attack(observed, seed=4)
    alone = attack([observed[1]], seed=4)[0]

    torch.testing.assert_close(together[1].batch.inputs, alone.batch.inputs, atol=1e-4, rtol=0)


def test_an_attacker_that_knows_of_the_split_finds_front_and_image_together() -> None:
    generator = torch.Generator().manual_seed(5)
    near = smooth_net()
    with torch.no_grad():
        near[0].weight += 0.1 * torch.randn(near[0].weight.shape, generator=generator).double()
    observed, _ = victims(2, stand_in=near)
    informed = [o.given(defense=(Part("split_fed", effect=PrivateLayers()),)) for o in observed]
    attack = model_inversion(**FAST, anchor=1e-4)

    plain, joint = attack(observed, seed=0), attack(informed, seed=0)

    assert all(j.loss < p.loss for j, p in zip(joint, plain, strict=True))
    assert all("jointly" in j.countermeasures[0] for j in joint)
    assert all(not p.countermeasures for p in plain)


def test_who_is_told_nothing_says_so() -> None:
    observed, _ = victims(1, known=False)
    (told_nothing,) = model_inversion(**FAST, features="known")(observed, seed=0)
    assert "threat_model=shown_features" in told_nothing.failure
    bare = replace(observed[0], knowledge=replace(observed[0].knowledge, private=None))
    (without,) = model_inversion(**FAST)([bare], seed=0)
    assert "0.weight is missing; give a stand-in for it" in without.failure
    wrong = observed[0].given(features=torch.zeros(1, *SHAPE))
    assert "are expected, but got" in model_inversion(**FAST)([wrong], seed=0)[0].failure


def test_guesses_are_stretched_where_the_paper_s_scaling_is_asked_for() -> None:
    seen, _ = victims(2)
    clamped, stretched = (
        [
            r.batch.inputs
            for r in model_inversion(**FAST | {"iterations": 1}, **how)(seen, seed=0)
            if r.batch is not None
        ]
        for how in ({}, {"into_range": "stretch"})
    )
    assert len(clamped) == len(stretched) == 2
    assert not any(torch.equal(one, other) for one, other in zip(clamped, stretched, strict=True))
    assert {(float(image.min()), float(image.max())) for image in stretched} == {(0.0, 1.0)}
    with pytest.raises(UserError, match="into_range is expected to be one of clamp, stretch, but got 'cut'"):
        model_inversion(into_range="cut")  # type: ignore[arg-type]
