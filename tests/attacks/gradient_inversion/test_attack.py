from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import GradientInversion, dlg, idlg, inverting_gradients
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.targets import why_not_attackable
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.errors import UserError
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload
from tests.attacks.victims import CLASSES, error, examples, observations, observe, smooth_net


def _with_upload(observation: Observation, **tensors: torch.Tensor) -> Observation:
    upload = replace(observation.upload, tensors={**observation.upload.tensors, **tensors})
    return replace(observation, upload=upload)


def test_idlg_finds_images_and_labels() -> None:
    truth = examples(6)
    found = idlg(iterations=25, restarts=2, dtype="float64")(observations(smooth_net(), 6), seed=0)
    assert [r.batch.labels.item() for r in found if r.batch] == truth.labels.tolist()
    errors = [float((r.batch.inputs[0] - truth.inputs[i]).square().mean())
              for i, r in enumerate(found) if r.batch]  # fmt: skip
    assert sorted(errors)[3] < 1e-4
    assert all(r.label_source == "inferred" and r.history for r in found)


def test_dlg_optimizes_the_label_as_well() -> None:
    truth = examples(3)
    found = dlg(iterations=60, restarts=4, dtype="float64")(observations(smooth_net(), 3), seed=0)
    best = min(found, key=lambda r: r.loss)
    index = best.id.probe
    assert best.batch is not None and best.label_source == "optimized"
    assert best.batch.labels.item() == truth.labels[index]
    assert float((best.batch.inputs[0] - truth.inputs[index]).square().mean()) < 1e-3


def test_inverting_gradients_comes_nearer_to_the_image() -> None:
    truth, victims = examples(2), observations(smooth_net(), 2, told=True)
    few, many = (inverting_gradients(iterations=n, dtype="float64")(victims, seed=0) for n in (1, 200))
    for i in range(2):
        before, after = (float((f[i].batch.inputs[0] - truth.inputs[i]).square().mean()) for f in (few, many))
        assert after < before / 2
        assert many[i].loss < few[i].loss / 5


@pytest.mark.long
@pytest.mark.parametrize(
    "attack", [idlg(iterations=3, dtype="float64"), inverting_gradients(iterations=25, dtype="float64")]
)
def test_company_chunks_and_order_do_not_matter(attack: GradientInversion) -> None:
    victims = observations(smooth_net(), 5)
    together = attack(victims, seed=7)
    alone = [attack([victim], seed=7)[0] for victim in victims]
    chunked = replace(attack, most_victims=2)(victims[::-1], seed=7)[::-1]
    for a, b, c in zip(together, alone, chunked, strict=True):
        torch.testing.assert_close(a.batch.inputs, b.batch.inputs, rtol=0, atol=1e-6)
        torch.testing.assert_close(a.batch.inputs, c.batch.inputs, rtol=0, atol=1e-6)
        assert a.loss == pytest.approx(b.loss) == pytest.approx(c.loss)
    assert attack(victims, seed=8)[0].loss != together[0].loss


@pytest.mark.long
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(idlg(iterations=4, enough=1e-9), marks=pytest.mark.fuzz),
        idlg(iterations=2, restarts=2),
        inverting_gradients(iterations=15),
    ],
)
def test_one_at_a_time_the_company_does_not_matter_to_the_last_bit(attack: GradientInversion) -> None:
    """In float32, through more moves of L-BFGS than rounding errors need to grow."""
    victims = observations(smooth_net(), 3)
    attack = replace(attack, most_victims=1)
    together = attack(victims[::-1], seed=7)[::-1]
    for victim, found in zip(victims, together, strict=True):
        alone = attack([victim], seed=7)[0]
        assert torch.equal(alone.batch.inputs, found.batch.inputs)
        assert alone.loss == found.loss
        assert alone.history == found.history


def test_the_same_call_ends_in_the_same_bits() -> None:
    victims = observations(smooth_net(), 4)
    one, other = (idlg(iterations=4)(victims, seed=7) for _ in range(2))
    assert all(torch.equal(a.batch.inputs, b.batch.inputs) for a, b in zip(one, other, strict=True))


def test_restarts_batched_or_not_choose_the_same_attempt() -> None:
    victims = observations(smooth_net(), 3)
    attack = idlg(iterations=4, restarts=3, accept=1e-5, dtype="float64")
    assert [r.loss for r in attack(victims, seed=0)] == pytest.approx(
        [r.loss for r in replace(attack, most_victims=1)(victims, seed=0)]
    )


@pytest.mark.long
def test_victims_of_different_models_are_attacked_in_one_call() -> None:
    one, other = observations(smooth_net(0), 2), observations(smooth_net(5), 2)
    attack = idlg(iterations=2, dtype="float64")
    mixed = attack([one[0], other[0], one[1], other[1]], seed=0)
    apart = [attack([v], seed=0)[0] for v in (one[0], other[0], one[1], other[1])]
    assert [r.loss for r in mixed] == pytest.approx([r.loss for r in apart])


def test_a_broken_victim_says_why_and_harms_nobody() -> None:
    victims = observations(smooth_net(), 2)
    sound = victims[0]
    weight = sound.upload.tensors["0.weight"]
    zeros = {name: torch.zeros_like(t) for name, t in sound.upload.tensors.items()}
    broken = {
        "finite": _with_upload(sound, **{"0.weight": weight * float("nan")}),
        "zero everywhere": _with_upload(sound, **zeros),
        "constant": _with_upload(sound, **{name: t + 3 for name, t in zeros.items()}),
        "uploaded as": _with_upload(sound, **{"0.weight": weight[:1]}),
        "model that was sent": _with_upload(sound, head=torch.ones(1)),
        "withheld": replace(sound, upload=Upload(tensors={}, num_examples=1)),
        "at least 1 example": replace(sound, upload=replace(sound.upload, num_examples=0)),
        "but the model fails": replace(sound, input_shape=(3, 8, 8)),
        "Outputs (": replace(sound, num_classes=CLASSES + 1),
        "class indices": sound.given(labels=torch.zeros(2, dtype=torch.long)),
        "add up to 1": sound.given(labels=torch.full((1, CLASSES), 0.5)),
        "but reach": sound.given(labels=torch.tensor([CLASSES])),
        "cover the model": replace(sound, sent=ModelState({})),
    }
    attack = idlg(iterations=2, dtype="float64")
    found = attack([victims[0], *broken.values(), victims[1]], seed=0)
    for expected, result in zip(broken, found[1:-1], strict=True):
        assert result.batch is None and result.failure is not None
        assert expected in result.failure and "\n" not in result.failure
    assert [found[0].loss, found[-1].loss] == pytest.approx([r.loss for r in attack(victims, seed=0)])


def test_values_whose_sum_alone_is_infinite_are_attacked() -> None:
    sound = observations(smooth_net(), 1)[0]
    weight = sound.upload.tensors["0.weight"].float()
    large = torch.full_like(weight, 0.9 * torch.finfo(torch.float32).max)
    assert why_not_attackable(_with_upload(sound, **{"0.weight": large})) is None
    large.view(-1)[0] = -torch.inf
    assert "finite" in str(why_not_attackable(_with_upload(sound, **{"0.weight": large})))


def test_withheld_and_muted_tensors_are_not_matched() -> None:
    victim = observations(smooth_net(), 1, told=True)[0]
    tensors = dict(victim.upload.tensors)
    del tensors["5.weight"]
    withheld = replace(victim, upload=replace(victim.upload, tensors=tensors))
    nonsense = _with_upload(victim, **{"5.weight": torch.randn_like(victim.upload.tensors["5.weight"])})
    muted = idlg(iterations=3, layers={"5.weight": 0}, dtype="float64")([nonsense], seed=0)[0]
    assert idlg(iterations=3, dtype="float64")([withheld], seed=0)[0].loss == pytest.approx(muted.loss)


def test_without_the_output_layer_labels_must_be_optimized() -> None:
    victim = observations(smooth_net(), 1)[0]
    tensors = {name: t for name, t in victim.upload.tensors.items() if not name.startswith("5")}
    victim = replace(victim, upload=replace(victim.upload, tensors=tensors))
    assert "attack.labels=optimize" in str(idlg(iterations=1, dtype="float64")([victim], seed=0)[0].failure)
    assert dlg(iterations=1, dtype="float64")([victim], seed=0)[0].batch is not None


def test_loss_scale_is_undone() -> None:
    model, batch = smooth_net(), examples(1)
    plain, scaled = (observe(model, batch, plan=LocalPlan(loss_scale=s)) for s in (1.0, 0.5))
    a, b = (idlg(iterations=30, restarts=3, dtype="float64")([o], seed=0)[0] for o in (plain, scaled))
    assert a.batch is not None and b.batch is not None
    assert error(b.batch, batch) < 1e-3 and a.batch.labels.equal(b.batch.labels)


def test_a_batch_is_recovered_up_to_its_order() -> None:
    model, batch = smooth_net(), examples(2, seed=5)
    found = idlg(iterations=60, restarts=3, labels="known", dtype="float64")([observe(model, batch, told=True)], seed=0)
    assert found[0].batch is not None
    assert found[0].batch.inputs.shape == batch.inputs.shape
    assert error(found[0].batch, batch) < 1e-3


def test_progress_reaches_the_end_and_never_goes_back() -> None:
    seen: list[tuple[int, int]] = []
    idlg(iterations=3, restarts=2, dtype="float64")(
        observations(smooth_net(), 3), seed=0, progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_unfinite_iterates_are_taken_back() -> None:
    attack = GradientInversion(objective=L2(), optimizer=LBFGS(lr=1e200), labels="known", iterations=5, dtype="float64")
    found = attack(observations(smooth_net(), 1, told=True), seed=0)[0]
    assert found.batch is not None and found.batch.inputs.isfinite().all()


def test_no_victims() -> None:
    assert idlg()([], seed=0) == []


@pytest.mark.parametrize(
    "settings", [{"iterations": 0}, {"restarts": 0}, {"labels": "guess"}, {"projection": "cut"}, {"dtype": "float16"}]
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        GradientInversion(**settings)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="head"):
        idlg(layers={"head*": 0})(observations(smooth_net(), 1), seed=0)


@pytest.mark.long
def test_known_labels_may_be_mixed() -> None:
    """Beside a victim whose labels are class indices."""
    plain, (second,) = observations(smooth_net(), 1, told=True), examples(1, seed=7).inputs.split(1)
    mixed = Batch(second, torch.tensor([[0.6, 0.0, 0.4, 0.0, 0.0]], dtype=torch.float64))
    victim = observe(smooth_net(), mixed, told=True)
    attack = idlg(iterations=60, restarts=3, labels="known", dtype="float64")
    found = attack([*plain, victim, victim.given(labels=torch.tensor([0]))], seed=0)
    assert error(found[1].batch, mixed) < 1e-4 < error(found[2].batch, mixed)
    assert found[1].label_source == "known" and found[1].batch.labels.tolist() == [0]
    assert error(found[0].batch, examples(1)) < 1e-4


def test_known_labels_are_demanded_only_where_asked() -> None:
    victim = observations(smooth_net(), 1)[0]
    assert victim.knowledge == Knowledge() or victim.knowledge.labels is None
    assert "observation.given(labels=labels)" in str(idlg(labels="known")([victim], seed=0)[0].failure)
