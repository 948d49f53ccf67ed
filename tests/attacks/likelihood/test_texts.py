"""A text is found behind noise by its likelihood, and not behind noise that hides it."""

import itertools
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from fl_privacy.attacks import attack
from fl_privacy.attacks.attack import no_progress, within
from fl_privacy.attacks.auto import AutoAttack
from fl_privacy.attacks.auto.other_modalities import TextMembers
from fl_privacy.attacks.gradient_inversion.evident_defense import undo_evident_defenses
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.attacks.likelihood.texts import MEMBER, LikeliestText, _likely_labels, is_drowned, why_not_searched
from fl_privacy.defenses import ClientState, dp_noise, dp_sgd
from fl_privacy.effects import Noise
from fl_privacy.models import Bert
from fl_privacy.types import Certainty, LocalPlan, ModelState, Observation, Reconstruction, Upload, VictimId

WORDS, LONGEST = 40, 6
TEXTS = torch.randint(3, WORDS, (200, LONGEST), generator=torch.Generator().manual_seed(1))
TEXTS[:, 0] = 1
TEXTS[:, -1] = 2


def behind_noise(number: int, scale: float, optimizer: str, classes: int = 2) -> tuple[Observation, torch.Tensor]:
    """Observe one noisy step on one text, with other texts as public ones."""
    torch.manual_seed(0)
    size = {"vocabulary_size": WORDS, "max_length": LONGEST, "num_classes": classes}
    model = Bert(**size, width=16, layers=1, heads=2, hidden=32, std=0.2)
    text, label = TEXTS[number : number + 1], torch.tensor([number % classes])
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(F.cross_entropy(model(text), label), parameters)
    adam = optimizer != "sgd"
    steps = [-0.01 * (g / (g.abs() + 1e-8) if adam else 100 * g) for g in gradients]
    defense, rng = dp_noise(scale=scale, clip_norm=1000.0), torch.Generator().manual_seed(number)
    tensors = defense.upload[0](dict(zip(names, steps, strict=True)), ClientState(), rng)
    observation = Observation(
        id=VictimId(0, 0, number),
        model=model,
        sent=ModelState.of(model),
        upload=Upload(tensors=tensors, num_examples=1),
        plan=LocalPlan(shares="delta", lr=0.01 if adam else 1.0, optimizer=optimizer),  # type: ignore[arg-type]
        input_shape=(LONGEST,),
        num_classes=classes,
    )
    public = TEXTS[torch.arange(len(TEXTS)) != number]
    labels = torch.zeros(len(public), dtype=torch.long)
    return observation.given(defense=defense.parts, public_images=public, public_labels=labels), text[0]


def of_batch(numbers: list[int]) -> tuple[Observation, torch.Tensor]:
    """Observe a noisy step of SGD on a batch of texts, with other texts as public ones."""
    seen, _ = behind_noise(numbers[0], 0.001, "sgd")
    labels, text = torch.tensor([k % 2 for k in numbers]), TEXTS[numbers]
    names, parameters = zip(*seen.model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(F.cross_entropy(seen.model(text), labels), parameters)
    update = {name: -seen.plan.lr * each for name, each in zip(names, gradients, strict=True)}
    (on_upload,) = dp_noise(scale=0.001, clip_norm=1000.0).upload
    tensors = on_upload(update, ClientState(), torch.Generator().manual_seed(0))
    public = TEXTS[[k for k in range(len(TEXTS)) if k not in numbers]]
    seen = replace(seen, upload=Upload(tensors=tensors, num_examples=len(numbers)))
    return seen.given(public_images=public, public_labels=torch.zeros(len(public), dtype=torch.long)), text


@pytest.mark.long
def test_texts_of_a_batch_are_found_and_those_of_another_are_not() -> None:
    seen, texts = of_batch([0, 1])
    (found,) = LikeliestText(evaluations=1200)([seen], seed=0)
    assert found.batch is not None and sorted(found.batch.labels.tolist()) == [0, 1]

    def right(others: torch.Tensor) -> float:
        assert found.batch is not None
        pairs = [found.batch.inputs[list(order)] for order in itertools.permutations(range(2))]
        return max(float((pair == others)[:, 1:-1].float().mean()) for pair in pairs)

    assert right(texts) >= 0.7
    assert right(TEXTS[2:4]) <= 0.4


@pytest.mark.long
def test_the_temperature_falls_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, text = behind_noise(0, 0.001, "sgd")
    ticks = itertools.count()
    monkeypatch.setattr(attack.time, "perf_counter", lambda: float(next(ticks)))
    with within(120.0) as limit:
        (found,) = LikeliestText(evaluations=1_000_000)([seen], seed=0)
    assert limit.cut and found.batch is not None and share_right(found.batch.inputs[0], text) >= 0.8


def share_right(found: torch.Tensor, text: torch.Tensor) -> float:
    """Return the share of the text's words, without its two ends, that stand at their place."""
    return float((found == text)[1:-1].float().mean())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_text_is_found_behind_noise_and_another_is_not(optimizer: str) -> None:
    (seen, text), (_, other) = (behind_noise(number, 0.001, optimizer) for number in (0, 1))
    (found,) = LikeliestText(evaluations=480)([seen], seed=0)
    assert found.batch is not None and found.member == MEMBER and found.batch.labels.tolist() == [0]
    assert share_right(found.batch.inputs[0], text) >= 0.8
    assert share_right(found.batch.inputs[0], other) <= 0.4
    assert found.history[-1] < found.history[0]


def test_the_same_is_found_again() -> None:
    seen, _ = behind_noise(0, 0.002, "adamw")
    found, again = (LikeliestText(evaluations=100)([seen], seed=0)[0].batch for _ in range(2))
    assert found is not None and again is not None and torch.equal(again.inputs, found.inputs)


def test_every_class_is_tried() -> None:
    seen, _ = behind_noise(19, 0.001, "sgd", classes=20)
    (found,) = LikeliestText(evaluations=100)([seen], seed=0)
    assert found.batch is not None and found.batch.labels.tolist() == [19]


def test_nothing_is_found_behind_much_noise() -> None:
    seen, text = behind_noise(0, 1.0, "adamw")
    (found,) = LikeliestText(evaluations=200)([seen], seed=0)
    assert found.batch is not None and share_right(found.batch.inputs[0], text) <= 0.5


def test_auto_searches_behind_noise() -> None:
    seen, text = behind_noise(2, 0.002, "adamw")
    (found,) = AutoAttack(evaluations=100)([seen], seed=0)
    assert found.member == MEMBER and found.batch is not None
    assert float((found.batch.inputs[0] == text).float().mean()) >= 0.5


def test_no_descent_is_tried_on_a_drowned_update(monkeypatch: pytest.MonkeyPatch) -> None:
    drowned, clear = (behind_noise(2, scale, "adamw")[0] for scale in (0.02, 0.002))
    assert is_drowned(drowned) and not is_drowned(clear) and not is_drowned(clear.given(defense=()))
    monkeypatch.setattr(TextMembers, "_descend", Mock(side_effect=AssertionError))
    (found,) = TextMembers(evaluations=100)([drowned], seed=0, progress=no_progress)
    assert found.member == MEMBER and found.batch is not None


def without_the_head(number: int, scale: float, optimizer: str) -> Observation:
    """Observe a step on a text whose output layer stays with the client."""
    seen, _ = behind_noise(number, scale, optimizer)
    kept = {name: value for name, value in seen.upload.tensors.items() if "classifier" not in name}
    return replace(seen, upload=replace(seen.upload, tensors=kept))


@pytest.mark.long
def test_a_text_without_its_output_layer_is_searched_behind_noise() -> None:
    seen, text, other = without_the_head(0, 0.001, "adamw"), TEXTS[0], TEXTS[1]
    (found,) = LikeliestText(evaluations=480)([seen], seed=0)
    assert found.batch is not None and found.batch.labels.tolist() == [0]
    assert share_right(found.batch.inputs[0], text) >= 0.75
    assert share_right(found.batch.inputs[0], other) <= 0.4


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.long)])
def test_a_text_without_its_output_layer_is_attacked_without_a_defense(optimizer: str) -> None:
    seen = without_the_head(2, 1e-9, optimizer).given(defense=None)
    (found,) = TextMembers(evaluations=20)([seen], seed=0, progress=no_progress)
    assert found.failure is None and found.batch is not None
    assert sorted(found.batch.inputs[0].tolist()) == sorted(TEXTS[2].tolist())


def test_descents_follow_a_search_that_fails_on_a_drowned_update(monkeypatch: pytest.MonkeyPatch) -> None:
    drowned, _ = behind_noise(2, 0.02, "adamw")
    assert is_drowned(drowned)
    monkeypatch.setattr(LikeliestText, "prepared", Mock(side_effect=NotAttackableError("no likelihood")))
    (found,) = TextMembers(evaluations=40)([drowned], seed=0, progress=no_progress)
    assert found.failure is None and found.batch is not None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_noise_of_a_text_is_evident_and_weight_decay_is_none(optimizer: str) -> None:
    noisy, clear = (behind_noise(2, scale, optimizer)[0].given(defense=None) for scale in (0.02, 1e-9))
    decayed = {name: value - 1e-3 * clear.sent.parameters[name] for name, value in clear.upload.tensors.items()}
    others = [clear, replace(clear, upload=replace(clear.upload, tensors=decayed))]
    found, *none = undo_evident_defenses([noisy, *others])
    assert isinstance((found.knowledge.defense or ())[0].effect, Noise)
    assert not any(one.knowledge.defense for one in none)
    assert is_drowned(found) == (optimizer == "adamw")


def test_full_steps_of_a_decay_are_no_noise() -> None:
    """Adam's step by a decay's gradient is as long as any other, in the direction of the word's sign."""
    clear = behind_noise(2, 1e-9, "adam")[0].given(defense=None)
    tensors = {
        name: torch.where(value.abs() < 1e-6, -0.01 * clear.sent.parameters[name].sign(), value)
        for name, value in clear.upload.tensors.items()
    }
    decayed = replace(clear, upload=replace(clear.upload, tensors=tensors), plan=replace(clear.plan, weight_decay=0.01))
    assert undo_evident_defenses([decayed])[0].knowledge.defense is None


def test_auto_keeps_what_reproduces_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def solved(members: TextMembers, seen: object, best: list[Reconstruction], *others: object, **more: object) -> None:
        best[0] = replace(best[0], member="tag", certainty=Certainty.CONSISTENT)

    monkeypatch.setattr(TextMembers, "_descend", solved)
    seen, _ = behind_noise(2, 0.002, "adamw")
    (found,) = TextMembers(evaluations=100)([seen], seed=0, progress=no_progress)
    assert found.member == "tag"


def test_a_search_ends_with_its_time_and_refuses_what_it_cannot_compare() -> None:
    seen, _ = behind_noise(0, 0.002, "adamw")
    with within(0.0):
        (found,) = LikeliestText()([seen], seed=0)
    assert found.batch is not None and len(found.history) == 2
    several = replace(seen, plan=replace(seen.plan, epochs=3))
    assert why_not_searched(seen) is None
    assert "single local step" in (why_not_searched(several) or "")
    two = replace(seen, upload=replace(seen.upload, num_examples=2))
    assert "behind Adam's step" in (why_not_searched(two) or "")
    assert "Up to 4 texts" in (why_not_searched(replace(seen, upload=replace(seen.upload, num_examples=9))) or "")
    assert "defense" in (why_not_searched(seen.given(defense=())) or "")
    decayed = replace(seen, plan=replace(seen.plan, optimizer="adam", weight_decay=0.1))
    assert "before" in (why_not_searched(decayed) or "")
    early = [dp_sgd(noise_multiplier=1.0), dp_noise(scale=0.01, at="gradient"), dp_noise(at="gradient", layers=[1])]
    assert all("before" in (why_not_searched(seen.given(defense=each.parts)) or "") for each in early)
    gradient = replace(seen, plan=replace(seen.plan, optimizer="sgd"))
    assert why_not_searched(gradient.given(defense=early[0].parts)) is None


def test_a_text_is_searched_without_public_ones_and_from_an_earlier_guess() -> None:
    seen, text = behind_noise(0, 0.001, "sgd")
    alone = seen.given(public_images=None, public_labels=None)
    (found,) = LikeliestText(evaluations=240)([alone], seed=0)
    assert found.batch is not None and found.history[-1] < found.history[0]
    (known,) = LikeliestText(evaluations=12)([alone.given(previous=text[None])], seed=0)
    assert known.batch is not None and torch.equal(known.batch.inputs[0], text)


def test_classes_of_many_are_not_listed_for_several_texts() -> None:
    likelihood, victim = Mock(), Mock(labels=None, label_source="inferred")
    with pytest.raises(NotAttackableError, match="classes are expected for 4 texts"):
        _likely_labels(Mock(shape=(4, 8), num_classes=20_000), victim, likelihood, torch.zeros(3, 4, 8))
    likelihood.losses.assert_not_called()
